"""Point-to-point transfers between the stages of one pipeline.

Two process groups carry tensors, one for values (towards later stages) and one for gradients (towards earlier ones):
an ordered backend such as NCCL could otherwise block a send in one direction behind a send in the other. Within a group
and a pair of ranks, messages are matched by order alone, which is the program's order on both sides. A third group, on
the host, carries small objects during the first micro-batch and a few integers per step.

Sends are asynchronous; their buffers are kept until they are done. Tensors travel as the bytes of their storage order
(a transposed dense tensor arrives transposed), so any dtype does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._torch import bound_device, new_group

FORWARD, BACKWARD = "forward", "backward"

# of the groups that the same ranks have made in a world
_numbers: dict[tuple[object, tuple[int, ...]], itertools.count] = {}


def new_groups(ranks: Sequence[int], backend: str, count: int, *, everyone: bool, timeout: timedelta | None) -> list:
    """Create ``count`` process groups over ``ranks``.

    Args:
        ranks: global ranks of this pipeline, in stage order.
        backend: name of the backend.
        count: number of groups over the same ranks.
        everyone: True where every rank of the world must take part in each creation, as NCCL needs when it splits
            communicators (``init_process_group(device_id=...)``); otherwise only ``ranks`` take part.
        timeout: after which a stuck transfer fails; the backend's default if None.
    """
    kwargs: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if not everyone:
        members = tuple(ranks)
        numbers = itertools.islice(_numbers.setdefault((dist.group.WORLD, members), itertools.count()), count)
        return [new_group(members, number, **kwargs) for number in numbers]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, tuple(ranks))
    mine = []
    for row in sorted(set(rows)):
        groups = [dist.new_group(list(row), **kwargs) for _ in range(count)]
        if row == tuple(ranks):
            mine = groups
    return mine


class Transport:
    """Sends and receives of one rank of a pipeline. Stages are named by their index in the pipeline axis."""

    def __init__(self, axis: DeviceMesh, *, timeout: timedelta | None) -> None:
        self.num_stages = axis.size()
        self.stage = axis.get_local_rank()
        self._ranks = axis.mesh.flatten().tolist()
        self.device = current_device(axis.device_type)
        self._pending: list[tuple[Any, torch.Tensor]] = []
        self._groups: dict[str, dist.ProcessGroup] = {}
        if self.num_stages == 1:
            return
        backend = dist.get_backend(axis.get_group())
        self._wire = torch.device("cpu") if "gloo" in backend else self.device
        everyone = bound_device() is not None
        groups = new_groups(self._ranks, backend, 2, everyone=everyone, timeout=timeout)
        self._groups = dict(zip((FORWARD, BACKWARD), groups, strict=True))
        (self._control,) = new_groups(self._ranks, "gloo", 1, everyone=False, timeout=timeout)

    def device_of(self, device_type: str) -> torch.device:
        """Return this rank's device for tensors that are on ``device_type`` on another stage."""
        return self.device if device_type == self.device.type else current_device(device_type)

    # --- tensors ---

    def send(self, tensor: torch.Tensor, to: int, direction: str, *, stride: Sequence[int] | None = None) -> None:
        """Begin to send a plain tensor; it must not be written before ``wait_sends``.

        ``stride`` are the strides that the receiver expects, the tensor's own by default.
        """
        if stride is not None and tuple(stride) != tensor.stride() and _is_dense(tensor.shape, stride):
            source = tensor
            tensor = torch.empty_strided(source.shape, tuple(stride), dtype=source.dtype, device=source.device)
            tensor.copy_(source)
        flat = _bytes_in_storage_order(tensor).to(self._wire)
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]
        if flat.numel():
            work = dist.isend(flat, self._ranks[to], group=self._groups[direction])
            self._pending.append((work, flat))

    def receive(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device,
        source: int,
        direction: str,
    ) -> torch.Tensor:
        """Return a new plain tensor with the elements that stage ``source`` sends."""
        if not _is_dense(shape, stride):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
        if tensor.numel() == 0:
            return tensor
        flat = _bytes_in_storage_order(tensor)
        buffer = flat if device.type == self._wire.type else torch.empty_like(flat, device=self._wire)
        dist.recv(buffer, self._ranks[source], group=self._groups[direction])
        if buffer is not flat:
            flat.copy_(buffer)
        return tensor

    def wait_sends(self) -> None:
        """Wait until every send of the step is done."""
        for work, _ in self._pending:
            work.wait()
        self._pending = []

    def drop_sends(self) -> None:
        """Forget unfinished sends after a failure."""
        self._pending = []

    def broadcast_from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor on every stage; all pass one of the same shape and dtype."""
        carried = tensor.to(self._wire, copy=True)
        dist.broadcast(carried, self._ranks[-1], group=self._groups[FORWARD])
        return carried.to(tensor.device)

    # --- small objects on the host ---

    def gather_objects(self, item: Any) -> list[Any]:
        """Return every stage's object, in stage order."""
        items: list[Any] = [None] * self.num_stages
        dist.all_gather_object(items, item, group=self._control)
        return items

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return every stage's list of 64-bit integers, in stage order; all lists have one length."""
        mine = torch.tensor(values, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.num_stages)]
        dist.all_gather(gathered, mine, group=self._control)
        return [item.tolist() for item in gathered]

    def send_flags(self, flags: Sequence[bool], to: int) -> None:
        """Begin to send a list of booleans on the host."""
        tensor = torch.tensor(flags, dtype=torch.uint8)
        self._pending.append((dist.isend(tensor, self._ranks[to], group=self._control), tensor))

    def receive_flags(self, count: int, source: int) -> list[bool]:
        """Return the list of ``count`` booleans that stage ``source`` sends."""
        tensor = torch.empty(count, dtype=torch.uint8)
        dist.recv(tensor, self._ranks[source], group=self._control)
        return [bool(flag) for flag in tensor.tolist()]


def current_device(device_type: str) -> torch.device:
    """Return this process's device of a type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements fill memory without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _bytes_in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one row of bytes: a view where memory is dense, a contiguous copy otherwise."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not _is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
