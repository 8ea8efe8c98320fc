"""Micro-batches and data-parallel parts of a batch draw what the whole batch draws, in any order of execution."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import Shard, UnsupportedRandomOperator, init_device_mesh, random
from vescale_testing import ranks

STREAMS = pytest.mark.parametrize("name", ["torch", "philox"])
M = 4  # micro-batches


def in_stream(name, seed=3):
    if name == "torch":
        torch.manual_seed(seed)
        return contextlib.nullcontext()
    return random.stream(name, seed=seed)


def draws(x):
    """Masks and noise of one forward."""
    return torch.cat([F.dropout(x, 0.5), torch.rand_like(x), torch.randn(x.shape[0], 3), F.dropout(x, 0.1)], dim=1)


def whole(name, x):
    with in_stream(name):
        return draws(x), torch.rand(5)


@STREAMS
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_micro_batches_are_parts_of_the_whole(name, order):
    x = torch.ones(8, 20)
    expected, _ = whole(name, x)
    parts = {}
    with in_stream(name), random.micro_batches(M) as micro_batch:
        for m in order:
            with micro_batch(m):
                parts[m] = draws(x.chunk(M)[m])
    assert torch.equal(torch.cat([parts[m] for m in range(M)]), expected)


@STREAMS
def test_the_stream_ends_where_the_whole_batch_leaves_it(name):
    x = torch.ones(8, 20)
    _, after = whole(name, x)
    with in_stream(name):
        with random.micro_batches(M) as micro_batch:
            for m in range(M):
                with micro_batch(m):
                    draws(x.chunk(M)[m])
        assert torch.equal(torch.rand(5), after)


@STREAMS
def test_without_the_context_micro_batches_differ(name):
    x = torch.ones(8, 20)
    expected, _ = whole(name, x)
    with in_stream(name):
        assert not torch.equal(torch.cat([draws(part) for part in x.chunk(M)]), expected)


@STREAMS
def test_a_micro_batch_goes_on_where_it_was_left(name):
    """As on a rank with two stages: forward of stage 0 for all micro-batches, then stage 1."""
    x = torch.ones(8, 20)
    with in_stream(name):
        expected = [F.dropout(x, 0.5), F.dropout(x, 0.5)]
    with in_stream(name), random.micro_batches(2) as micro_batch:
        stages = []
        for _ in range(2):
            parts = []
            for m in range(2):
                with micro_batch(m):
                    parts.append(F.dropout(x.chunk(2)[m], 0.5))
            stages.append(torch.cat(parts))
    assert not torch.equal(*expected)
    assert torch.equal(torch.stack(stages), torch.stack(expected))


@ranks(4)
def test_parts_of_parts(shard, shard_of):
    """Micro-batches of a data-parallel rank, plain and sharded over another axis; whichever context comes first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    x = torch.ones(8, 6)
    for name, first in itertools.product(("torch", "philox"), ("dp", "micro")):
        expected, _ = whole(name, x)
        rows = expected.chunk(2)[dp.get_local_rank()].chunk(2)
        with in_stream(name), random.micro_batches(2) as micro_batch:
            for m in range(2):
                contexts = [lambda: random.local_batch(dp), lambda m=m: micro_batch(m)]
                outer, inner = contexts if first == "dp" else contexts[::-1]
                with outer(), inner():
                    assert torch.equal(draws(torch.ones(2, 6)), rows[m]), (name, first)
        with in_stream(name):
            expected = F.dropout(x, 0.5).chunk(2)[dp.get_local_rank()].chunk(2)
        with in_stream(name), random.micro_batches(2) as micro_batch:
            for m in range(2):
                with random.local_batch(dp), micro_batch(m):
                    y = F.dropout(shard(torch.ones(2, 6), tp, (Shard(1),)), 0.5)
                assert torch.equal(y.to_local(), shard_of(expected[m], tp, (Shard(1),))), (name, first)


@ranks(3)
def test_local_batches_of_the_counter_based_stream():
    dp = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    x = torch.ones(6, 20)
    expected, after = whole("philox", x)
    mine = expected.chunk(3)[dp.get_local_rank()]
    with random.stream("philox", seed=3):
        with random.local_batch(dp):
            assert torch.equal(draws(torch.ones(2, 20)), mine)
        assert torch.equal(torch.rand(5), after)
    with random.local_batch(dp), random.stream("philox", seed=3):
        assert torch.equal(draws(torch.ones(2, 20)), mine)
    with random.local_batch(dp), random.stream("philox", seed=4):
        torch.manual_seed(3)  # seeds the stream, and leaves the batch
        assert torch.equal(draws(torch.ones(2, 20)), mine)
    with random.stream("philox", seed=3):
        assert torch.equal(draws(torch.ones(2, 20)), mine) == (dp.get_local_rank() == 0)


@ranks(2)
def test_a_generator_of_ones_own_in_a_local_batch(shard, shard_of):
    """It is cut once, in whichever order the contexts were entered."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    dp, tp = mesh["dp"], mesh["tp"]
    expected = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).chunk(2)[dp.get_local_rank()]
    local_batch, philox = (lambda: random.local_batch(dp)), (lambda: random.stream("philox", seed=0))
    for outer, inner in ((local_batch, philox), (philox, local_batch)):
        with outer(), inner():
            assert torch.equal(torch.rand(2, 3, generator=torch.Generator().manual_seed(1)), expected)
            sharded = shard(torch.zeros(2, 3), tp, (Shard(1),))
            sharded.uniform_(generator=torch.Generator().manual_seed(1))
            assert torch.equal(sharded.to_local(), shard_of(expected, tp, (Shard(1),)))


@ranks(2)
def test_draws_without_a_batch_dim_are_refused():
    dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    refused = {
        "a tensor without dims has no batch dim": lambda: torch.rand(()),
        "randperm.* outside random.local_batch": lambda: torch.randperm(5),
        "multinomial.* give it the batch as dim 0": lambda: torch.multinomial(torch.ones(4), 1),
    }
    with random.stream("philox", seed=3):
        expected = torch.rand(3)
    with random.stream("philox", seed=3):
        with random.local_batch(dp):
            for text, draw in refused.items():
                with pytest.raises(UnsupportedRandomOperator, match=text):
                    draw()
        assert torch.equal(torch.rand(3), expected)  # none was spent


def test_misuse_of_micro_batches():
    with pytest.raises(ValueError, match="expected an integer of 1 or more for count, got 0"), random.micro_batches(0):
        pass
    with random.micro_batches(2) as micro_batch:
        with pytest.raises(IndexError, match="expected a micro-batch from 0 to 1, got 2"), micro_batch(2):
            pass
        with micro_batch(0), pytest.raises(RuntimeError, match="micro-batch 1 was entered inside micro-batch 0"):
            with micro_batch(1):
                pass
