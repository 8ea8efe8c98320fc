"""The collectives of one mesh axis: no-ops on an axis of one rank, with errors that name the collective.

All ranks of the axis must make every call here in the same order; the caller is responsible for that. ``what`` names
the purpose of a collective in errors ("bucket 3"). If a rank is gone, the errors of all others name it (`Failures`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import (
    METERS,
    Fact,
    Failures,
    check_facts,
    describe_difference,
    differing_texts,
    first_line,
    group_of_ranks,
    waiting,
)

from .. import _torch

__all__ = ["Axis", "Pending"]

#: Seconds between two checks of a collective during a wait with a limit.
_NAP = 0.0002

_NOTHING = contextlib.nullcontext()

#: Bytes of a shard from which gloo gathers by broadcasts, one per rank: its all-gather copies through a buffer.
IN_PLACE_BYTES = 2**16


@dataclass(frozen=True)
class Axis:
    """A mesh axis: its size, this rank's coord, and the collectives that the package needs.

    Asynchronous calls return a `Pending` to wait for, or None without a collective.

    Attributes:
        name: Its name in errors.
        size: Number of ranks.
        coord: This rank's coord, which is also its rank in the group.
        group: Its process group; an axis of this rank only may have none.
        device_type: Device type of the mesh.
        listening: The ranks that share failures, if more ranks than those of the axis wait for each other.
    """

    name: str
    size: int
    coord: int
    group: dist.ProcessGroup | None
    device_type: str
    listening: tuple[int, ...] | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh, *, role: str) -> Axis:
        """Return the only axis of ``mesh``; ``role`` begins the error.

        Raises:
            ValueError: If the mesh is not 1-D.
        """
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            came = f"axes {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else repr(mesh)
            raise ValueError(f'{role} expects a 1-D DeviceMesh such as mesh["dp"], got {came}')
        return cls.of_dim(mesh, 0)

    @classmethod
    def of_dim(cls, mesh: DeviceMesh, dim: int) -> Axis:
        """Return axis number ``dim`` of ``mesh``."""
        name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"mesh axis {dim}"
        return cls(name, mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim), mesh.device_type)

    def of_this_rank(self) -> Axis:
        """Return an axis of this rank only, without a process group."""
        return Axis(self.name, 1, 0, None, self.device_type)

    @cached_property
    def on_host(self) -> Axis:
        """The same ranks, for numbers that the host reads: it waits for the other hosts and for no device.

        The group is that of the axis if it has a backend for the CPU, else one of gloo, which all ranks create here.
        """
        if self.device_type == "cpu":
            return self
        group = self.group
        if self.size > 1 and "cpu:" not in str(dist.get_backend_config(group)):
            group = group_of_ranks(self.ranks, keep_order=True, purpose="numbers on the host", backend="gloo")
        return replace(self, group=group, device_type="cpu")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the axis, which identify it independently of the mesh."""
        return (dist.get_rank(),) if self.group is None else tuple(dist.get_process_group_ranks(self.group))

    @cached_property
    def is_dry(self) -> bool:
        """Whether the group has torch's backend "fake", which carries no data: the other ranks do not exist."""
        return self.group is not None and dist.get_backend(self.group) == "fake"

    @cached_property
    def failures(self) -> Failures:
        """The store in which the ranks of the axis record failures."""
        return Failures(self.listening or self.ranks, self.ranks[self.coord], _torch.default_store())

    def __repr__(self) -> str:
        return f"{self.name}({self.coord} of {self.size})"

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, *, what: str = "") -> Pending | None:
        """Start the reduction of ``tensor``, in place."""
        if self.size == 1:
            return None
        return self._start("all-reduce", what, dist.all_reduce, tensor, op=op)

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, *, what: str = "") -> Pending | None:
        """Start summing ``buffer``, which may be overwritten; this coord's part of the sum goes to ``shard``."""
        if self.size == 1:
            shard.copy_(buffer)
            return None
        if self.device_type != "cpu":
            return self._start("reduce-scatter", what, _torch.reduce_scatter, shard, buffer)
        # gloo implements it as an all-reduce of a copy, too, and its work has no wait with a time-out
        pending = self._start("reduce-scatter", what, dist.all_reduce, buffer)
        pending.at_end = lambda: shard.copy_(buffer.view(self.size, -1)[self.coord].view(shard.shape))
        return pending

    def all_gather(self, buffer: Tensor, shard: Tensor, *, what: str = "") -> Pending | None:
        """Start filling ``buffer`` with every coord's ``shard``, which may be its own part of ``buffer``."""
        if self.size == 1:
            return None
        in_place = self.device_type == "cpu" and shard.numel() * shard.element_size() >= IN_PLACE_BYTES
        collective = self._broadcast_each if in_place else _torch.all_gather
        return self._start("all-gather", what, collective, buffer, shard)

    def _broadcast_each(self, buffer: Tensor, shard: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> _Works:
        parts = buffer.view(self.size, -1)
        if shard.data_ptr() != parts[self.coord].data_ptr():
            parts[self.coord].copy_(shard.view(-1))
        settings = {"group": group, "async_op": async_op}
        return _Works([dist.broadcast(part, group_src=coord, **settings) for coord, part in enumerate(parts)])

    def exchange(self, received: Tensor, buffer: Tensor, *, what: str = "") -> Pending | None:
        """Start an all-to-all: part i of ``received`` is this coord's part of coord i's ``buffer``."""
        if self.size == 1:
            received.copy_(buffer)
            return None
        return self._start("all-to-all", what, dist.all_to_all_single, received, buffer)

    def exchange_uneven(
        self, pieces: Sequence[Sequence[Tensor]], num_received: Sequence[int], like: Tensor, *, what: str = ""
    ) -> list[Tensor]:
        """Send ``pieces[coord]`` to each coord and return a flat tensor per coord, of ``num_received[coord]`` elements.

        All tensors have the dtype and device of ``like``; the order of sending is kept. Values travel as bytes, so that
        every backend takes every dtype.
        """
        size = like.element_size()
        sent = [sum(piece.numel() for piece in to_one) for to_one in pieces]
        flat = [piece.reshape(-1) for to_one in pieces for piece in to_one]
        outgoing = torch.cat(flat) if flat else like.new_empty(0)
        incoming = like.new_empty(sum(num_received))
        splits = {
            "output_split_sizes": [numel * size for numel in num_received],
            "input_split_sizes": [numel * size for numel in sent],
        }
        buffers = incoming.view(torch.uint8), outgoing.view(torch.uint8)
        self._start("all-to-all", what, dist.all_to_all_single, *buffers, **splits).wait()
        return list(incoming.split(list(num_received)))

    def gather_uneven(self, mine: Tensor, numels: Sequence[int], *, what: str = "") -> list[Tensor]:
        """Return the flat tensor of every coord, of ``numels[coord]`` elements; ``mine`` is this coord's."""
        every = [mine if coord == self.coord else mine.new_empty(numel) for coord, numel in enumerate(numels)]
        works = [
            self._start("broadcast", what, dist.broadcast, each.view(torch.uint8), group_src=coord)
            for coord, each in enumerate(every)
            if each.numel()
        ]
        for work in works:
            work.wait()
        return every

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory and not on the devices of the axis, so that copies are sent."""
        return tensor.device.type != self.device_type

    def _start(self, kind: str, what: str, collective: Callable, *tensors: Tensor, **kwargs: object) -> Pending:
        name = f"the {kind}{what and ' of '}{what} over axis {self.name!r}"
        home, copy_back = tensors[0], None  # every collective writes its result to its first tensor
        if self.is_elsewhere(home):
            tensors = tuple(tensor.to(self.device_type, copy=True) for tensor in tensors)
            copy_back = functools.partial(home.copy_, tensors[0])
        try:
            work = collective(*tensors, group=self.group, async_op=True, **kwargs)
        except dist.DistError as error:  # an error of the backend; wrong arguments raise other errors
            raise RuntimeError(self.failures.describe(name, first_line(error))) from error
        return Pending(work, name, self, copy_back)

    def broadcast_(self, tensors: Iterable[Tensor], *, chunk_bytes: int) -> None:
        """Overwrite ``tensors``, of any dtype and bit for bit, by those of coord 0, a few chunks at a time."""
        if self.size == 1:
            return
        chunk: list[Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            chunk.append(tensor)
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= chunk_bytes:
                self._broadcast_chunk(chunk)
                chunk, num_bytes = [], 0
        self._broadcast_chunk(chunk)

    def _broadcast_chunk(self, chunk: list[Tensor]) -> None:
        if not chunk:
            return
        pieces = [t.contiguous().view(-1).view(torch.uint8) for t in chunk]
        flat = torch.cat(pieces)
        self._start("broadcast", "parameters and buffers", dist.broadcast, flat, group_src=0).wait()
        if self.coord != 0:
            for tensor, bytes_ in zip(chunk, flat.split([p.numel() for p in pieces]), strict=True):
                # clone: a slice of bytes need not be aligned for the wider dtype
                tensor.copy_(bytes_.clone().view(tensor.dtype).view(tensor.shape))

    def check_same(self, text: str, *, what: str, fix: str = "give all ranks the same") -> None:
        """Compare a description over the axis.

        Args:
            text: The description.
            what: What it describes, in the singular.
            fix: The fix, at the end of the error.

        Raises:
            ValueError: On every rank, with the first line that differs.
        """
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        if len(set(self.gather_number(digest, what=f"a digest of {what}"))) > 1:
            texts = differing_texts(text, self.group)
            raise ValueError(f"{describe_difference(what, texts)} (axis {self.name!r}); {fix}")

    def check_facts(self, facts: Iterable[Fact], *, what: str) -> None:
        """Compare facts over the axis; the host waits.

        Raises:
            ValueError: On every rank, with names, values and ranks, if one differs.
        """
        if self.size > 1:
            check_facts(facts, self.group, maxima=functools.partial(self._maxima, what))

    def _maxima(self, what: str, numbers: Sequence[int]) -> list[int]:
        largest = torch.tensor(numbers, dtype=torch.int64)
        self.on_host.all_reduce(largest, dist.ReduceOp.MAX, what=what).wait()
        return largest.tolist()

    def gather_number(self, number: int, *, what: str) -> list[int]:
        """Return the number of every coord, an integer of 64 bits."""
        if self.size == 1:
            return [number]
        mine, every = torch.tensor([number]), torch.empty(self.size, dtype=torch.int64)
        self.on_host._start("all-gather", what, _torch.all_gather, every, mine).wait()
        return every.tolist()


class _Works:
    """Several collectives as one; the time-out of a wait applies to each of them."""

    def __init__(self, works: Sequence[dist.Work]):
        self.works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, *timeout: timedelta) -> None:
        for work in self.works:
            work.wait(*timeout)


class Pending:
    """A collective in flight. Its failure names it, this rank, and the ranks that are gone.

    Attributes:
        at_end: Called by `wait`, once, when the collective has succeeded.
    """

    def __init__(self, work: dist.Work | _Works, name: str, axis: Axis, copy_back: Callable[[], object] | None = None):
        self._work = work
        self._name = name
        self._axis = axis
        self._copy_back = copy_back  # copies the result to its destination
        self.at_end: Callable[[], object] | None = None

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the collective has ended or failed."""
        end = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(_NAP)
        return True

    def wait(self) -> None:
        """Wait for the result: on the CPU the process, on an accelerator its current stream.

        Raises:
            RuntimeError: If the collective failed, here or on another rank.
        """
        with waiting(self._axis.device_type) if METERS else _NOTHING:
            self._wait()
        if self._copy_back is not None:
            self._copy_back()
            self._copy_back = None
        if self.at_end is not None:
            self.at_end()
            self.at_end = None

    def _wait(self) -> None:
        if self._axis.device_type == "cpu":
            self._axis.failures.wait(self._work, self._name)
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(self._axis.failures.describe(self._name, first_line(error))) from error
