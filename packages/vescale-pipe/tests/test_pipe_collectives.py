"""Gathers and broadcasts made of messages give every rank all tensors, over any number of ranks."""

import collections
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vescale.pipe._run.collectives import broadcast, gather


class Mailbox:
    """One rank of a channel whose ranks are threads; counts the messages that it sends."""

    def __init__(self, rank, size, queues):
        self.rank, self.size, self._queues = rank, size, queues
        self.num_sent = 0

    def send(self, tensor, to, what):
        assert tensor.is_contiguous()
        self.num_sent += 1
        self._queues[self.rank, to].put((tensor.clone(), what))

    def receive(self, tensor, source, what):
        return tensor, source, what

    def wait(self, work, what):
        if work is None:  # a send
            return
        tensor, source, expected = work
        found, sent_as = self._queues[source, self.rank].get(timeout=10)
        assert what == expected == sent_as
        tensor.copy_(found)


def on_threads(size, function):
    """Return what the function returns on each rank, and how many messages each has sent."""
    queues = collections.defaultdict(queue.SimpleQueue)
    for pair in ((a, b) for a in range(size) for b in range(size)):
        queues[pair] = queue.Queue()
    boxes = [Mailbox(rank, size, queues) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = [each.result() for each in [pool.submit(function, box) for box in boxes]]
    assert all(each.empty() for each in queues.values())
    return results, [box.num_sent for box in boxes]


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_gather(size, dtype):
    """Rank by rank, in the fewest rounds."""
    rows = torch.arange(3 * size, dtype=dtype).reshape(size, 3)
    found, sent = on_threads(size, lambda box: gather(box, rows[box.rank], "rows"))
    for each in found:
        torch.testing.assert_close(each, rows, rtol=0, atol=0)
    assert sent == [(size - 1).bit_length()] * size


@pytest.mark.parametrize("size", range(1, 10))
def test_a_broadcast(size):
    """From any rank; no rank sends more often than there are binary digits, and each gets the tensor once."""
    for source in range(size):
        found, sent = on_threads(size, lambda box, source=source: _shared(box, source))
        assert [each.tolist() for each in found] == [[source, -1.5]] * size
        assert sum(sent) == size - 1
        assert max(sent) <= (size - 1).bit_length()


def _shared(box, source):
    tensor = torch.tensor([float(box.rank), -1.5 if box.rank == source else 0.0])
    broadcast(box, tensor, source, "numbers")
    return tensor


def test_another_order_is_noticed():
    """The sibling that breaks it: rows of other ranks, or of another source."""
    rows = torch.arange(9).reshape(3, 3)
    found, _ = on_threads(3, lambda box: gather(box, rows[box.rank], "rows"))
    assert not torch.equal(found[1], rows.roll(1, 0))
    shared, _ = on_threads(3, lambda box: _shared(box, 2))
    assert shared[0].tolist() != [0.0, -1.5]
