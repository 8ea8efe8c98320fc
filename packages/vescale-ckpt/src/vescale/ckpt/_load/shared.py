"""Read what several ranks hold alike once, and pass it on.

Ranks that hold the same boxes of all tensors under a first name ("model", "optimizer") are replicas of each other
there. Their reads make chunks of equal size, and every replica reads a part of the chunks, neighbors in the files. They
go to the others by broadcasts in an order in which all replicas take turns, so that they read at the same time:

    replica 0   reads chunk 0   reads chunk 1 ...      broadcasts:  0 of replica 0, 0 of replica 1,
    replica 1   reads chunk 0   reads chunk 1 ...                   1 of replica 0, 1 of replica 1, ...

Replicas on one host do not: the system reads a file once there, and its memory is faster than messages. What is at a
URL is in no such memory.

At most ``_IN_FLIGHT`` chunks are in memory. A replica that cannot read a chunk sends what its memory has, so that none
waits, and raises when all have been sent: the load fails on all ranks then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from .._control import Control
from .._format.boxes import Box
from .._format.data_files import pack_files
from .._format.dtypes import ITEM_BYTES
from .._format.manifest import Manifest
from .plan import Read

CHUNK_BYTES = 16 * 1024**2
LEAST_BYTES = 16 * 1024**2  # replicas with less read it each for itself: they save less than a process group costs
_IN_FLIGHT = 8

Boxes = Mapping[str, Sequence[Box]]


def digests(boxes: Boxes, manifest: Manifest) -> dict[str, str]:
    """Return a text for each first name with enough bytes, equal for equal boxes of all tensors under it."""
    contents: dict[str, list] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for name in sorted(boxes):
        first, item_bytes = first_name(name), ITEM_BYTES[manifest.tensors[name].meta.dtype]
        contents[first].append([name, [[box.offsets, box.sizes] for box in boxes[name]]])
        sizes[first] += sum(box.num_elements for box in boxes[name]) * item_bytes
    texts = {first: json.dumps(content).encode() for first, content in contents.items() if sizes[first] >= LEAST_BYTES}
    return {first: hashlib.sha256(text).hexdigest() for first, text in texts.items()}


def first_name(name: str) -> str:
    """Return the first component of a tensor's name."""
    return name.partition("/")[0]


def find_replicas(found: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[dict[str, tuple[int, ...]]]:
    """Return for each rank its replicas, itself included, by first name, where there are some on several hosts.

    Args:
        found: digests of each rank.
        hosts: of each rank; each its own one, if what is read is at a URL.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(found):
        for item in own.items():
            members.setdefault(item, []).append(rank)
    groups = {item: tuple(ranks) for item, ranks in members.items()}
    shares = [{first: groups[first, digest] for first, digest in own.items()} for own in found]
    return [
        {first: ranks for first, ranks in own.items() if len({hosts[rank] for rank in ranks}) > 1} for own in shares
    ]


Chunk = list[tuple[str, Read]]


def make_chunks(reads: Mapping[str, Sequence[Read]], manifest: Manifest) -> list[Chunk]:
    """Return reads, cut and put together to chunks, each with its file, in the order of files."""
    cut: Chunk = []
    for file, own in reads.items():
        for read in own:
            limit = CHUNK_BYTES // ITEM_BYTES[manifest.tensors[read.name].meta.dtype]
            cut += [(file, Read(read.name, read.into, box, read.piece)) for box in _cut(read.box, limit)]
    sizes = [num_bytes(read, manifest) for _, read in cut]
    return [cut[run.start : run.stop] for run in pack_files(sizes, max_bytes=CHUNK_BYTES)]


def num_bytes(read: Read, manifest: Manifest) -> int:
    """Count the bytes of a read."""
    return read.box.num_elements * ITEM_BYTES[manifest.tensors[read.name].meta.dtype]


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its first dim of more than one index, into parts of at most ``limit`` elements.

    A part has a power of two of rows where it can, so that parts of usual matrices begin where blocks do.
    """
    if box.num_elements <= limit:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    fitting = limit * box.sizes[dim] // box.num_elements
    step = 1 << max(0, fitting.bit_length() - 1)
    for start in range(0, box.sizes[dim], step):
        yield from _cut(box.rows(dim, start, min(start + step, box.sizes[dim])), limit)


def turns(sizes: Sequence[int], num_replicas: int) -> list[tuple[int, int]]:
    """Return ``(replica, chunk)`` in the order of broadcasts: equal parts of the bytes, and all replicas take turns.

    Args:
        sizes: bytes of the chunks, none empty, in the order of files.
        num_replicas: how many share them.
    """
    parts: list[list[int]] = [[] for _ in range(num_replicas)]
    total, ends = sum(sizes), accumulate(sizes)
    for chunk, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        parts[(2 * end - size) * num_replicas // (2 * total)].append(chunk)  # by the middle of the chunk
    longest = max(map(len, parts), default=0)
    return [(i, part[turn]) for turn in range(longest) for i, part in enumerate(parts) if turn < len(part)]


class SharedRead:
    """Reads chunks with the replicas of a group.

    Args:
        control: the replicas.
        values: returns the part of the state that a read fills.
        read_into: ``(file, read, target)`` reads the values of a read.
        manifest: of the checkpoint.
        progress: is told of the bytes of each chunk.
    """

    def __init__(
        self,
        control: Control,
        values: Callable[[Read], torch.Tensor],
        read_into: Callable[[str, Read, torch.Tensor], None],
        manifest: Manifest,
        progress: Callable[[int], None],
    ) -> None:
        self._control, self._values, self._read_into, self._manifest = control, values, read_into, manifest
        self._progress = progress
        self._error: Exception | None = None

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Read, and pass on, all chunks, the same on each replica."""
        sizes = [sum(num_bytes(read, self._manifest) for _, read in chunk) for chunk in chunks]
        in_flight: deque[Callable[[], None]] = deque()
        for replica, number in turns(sizes, self._control.size):
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft()()
            in_flight.append(self._pass_on(replica, chunks[number], sizes[number]))
        while in_flight:
            in_flight.popleft()()
        if self._error is not None:
            raise self._error

    def _pass_on(self, replica: int, chunk: Chunk, size: int) -> Callable[[], None]:
        """Begin to send or to receive a chunk, and return what ends it."""
        targets = [self._values(read) for _, read in chunk]
        dtypes = [getattr(torch, self._manifest.tensors[read.name].meta.dtype) for _, read in chunk]
        is_direct = len(chunk) == 1 and _has_form(targets[0], dtypes[0])
        buffer = _bytes_of(targets[0]) if is_direct else torch.empty(size, dtype=torch.uint8)
        parts = targets if is_direct else _parts_of(buffer, chunk, dtypes)
        if replica == self._control.rank and self._error is None:
            for (file, read), part in zip(chunk, parts, strict=True):
                self._attempt(functools.partial(self._read_into, file, read, part))
        work = dist.broadcast(buffer, group=self._control.group, group_src=replica, async_op=True)

        def end() -> None:
            self._control.wait(work, "the broadcast of values")
            if not is_direct:
                for target, part in zip(targets, parts, strict=True):
                    self._attempt(functools.partial(target.copy_, part))
            self._attempt(functools.partial(self._progress, size))

        return end

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            self._error = self._error or error


def _has_form(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the memory of a tensor is that of contiguous values of a dtype on the CPU."""
    is_plain = target.device.type == "cpu" and target.dtype == dtype and not (target.is_conj() or target.is_neg())
    return is_plain and target.is_contiguous()


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of contiguous values; dims of size 1 may have any stride."""
    return values.detach().as_strided((values.numel(),), (1,)).view(torch.uint8)


def _parts_of(buffer: torch.Tensor, chunk: Chunk, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return the tensors of a chunk in a buffer, those of wide elements first."""
    parts, end = {}, 0
    for i in sorted(range(len(chunk)), key=lambda i: -dtypes[i].itemsize):
        sizes = chunk[i][1].box.sizes
        size = math.prod(sizes) * dtypes[i].itemsize
        parts[i] = buffer[end : end + size].view(dtypes[i]).view(sizes)
        end += size
    return [parts[i] for i in range(len(chunk))]
