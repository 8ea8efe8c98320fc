"""Point-to-point transfers between the ranks of one pipeline.

Two process groups carry tensors: one to higher ranks and one to lower ranks. In one group, an ordered backend such as
NCCL could block a send in one direction behind a send in the other. Within a group and a pair of ranks, messages match
by order: the sender's (``mail.py``). A third group, on the host, carries small objects during the first micro-batch and
a few integers per step, and the result of the step where ranks compute on the CPU (``collectives.py``).

Sends are asynchronous; buffers stay alive until their send completes. A tensor is sent as bytes in storage order, so
every dtype is supported and a transposed dense tensor arrives transposed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._lost_ranks import Failures, first_line
from .._torch import bound_device, default_store, new_group
from .collectives import broadcast, gather
from .listener import listener
from .timing import Stopwatch, WaitMeter
from .tree import flatten

UP, DOWN = "to higher ranks", "to lower ranks"

_A_SEND = "a send to another stage"
_NOTHING = contextlib.nullcontext()

# number of the next group, per default group and ranks
_numbers: dict[tuple[object, tuple[int, ...]], itertools.count] = {}


def new_groups(ranks: Sequence[int], backend: str, count: int, *, everyone: bool, timeout: timedelta | None) -> list:
    """Create ``count`` process groups over ``ranks``.

    Args:
        ranks: global ranks of this pipeline, in stage order.
        backend: name of the backend.
        count: number of groups over the same ranks.
        everyone: if True, every rank of the world takes part in each creation. NCCL needs this to split communicators
            (``init_process_group(device_id=...)``). Otherwise only ``ranks`` take part.
        timeout: time limit of a transfer; the backend's default if None.
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
    """Send and receive for one rank of a pipeline. A rank's name is its index in the pipeline axis.

    Attributes:
        is_dry: whether the group has torch's backend "fake": nothing is sent, and zeros arrive.
        is_alone: whether there are no other processes.
        device: of this rank.
        ranks: global ranks.
        failures: what the ranks tell each other of failures.
        watch: takes the times of waits; None if no steps are measured.
        meters: measure waits, see `PipelineEngine.on_wait`.
    """

    def __init__(self, axis: DeviceMesh, *, timeout: timedelta | None) -> None:
        self.num_ranks = axis.size()
        self.rank = axis.get_local_rank()
        self.ranks = axis.mesh.flatten().tolist()
        self.device = current_device(axis.device_type)
        self._pending: dict[int, tuple[Any, torch.Tensor, _Channel]] = {}
        self._num_sent = 0
        self._channels: dict[str, _Channel] = {}
        self.step = 0
        self._of_inputs = self.device
        self.watch: Stopwatch | None = None
        self.meters: list[WaitMeter] = []
        self.is_dry = is_dry(axis)
        self.is_alone = self.num_ranks == 1 or self.is_dry
        if self.is_alone:
            return
        backend = dist.get_backend(axis.get_group())
        self._wire = torch.device("cpu") if "gloo" in backend else self.device
        everyone = bound_device() is not None
        groups = new_groups(self.ranks, backend, 2, everyone=everyone, timeout=timeout)
        self._channels = {way: _Channel(self, group, self._wire) for way, group in zip((UP, DOWN), groups, strict=True)}
        (control,) = new_groups(self.ranks, "gloo", 1, everyone=False, timeout=timeout)
        self._control = _Channel(self, control, torch.device("cpu"))
        self._axis_name = (axis.mesh_dim_names or ("",))[0]
        rank, name = self.ranks[self.rank], control.group_name
        self.failures = Failures(self.ranks, rank, default_store(), name=name)
        self._has_answered = False  # to others that have failed

    def begin_step(self, args: tuple, kwargs: dict) -> None:
        """Begin a step with these inputs. In a dry run all tensors are on their device, which may be "meta"."""
        self.step += 1
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        self._of_inputs = tensors[0].device if tensors else self.device

    def device_of(self, device_type: str) -> torch.device:
        """Return this rank's device for a tensor on ``device_type`` of another stage."""
        if self.is_dry:
            return self._of_inputs
        return self.device if device_type == self.device.type else current_device(device_type)

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Let Ctrl-C end waits for messages in this context."""
        return contextlib.nullcontext() if self.is_alone else listener().step()

    # --- tensors ---

    def send(self, tensor: torch.Tensor, to: int, *, stride: Sequence[int] | None = None) -> int:
        """Begin to send a plain tensor, and return its number. Do not write to it before ``wait_sends``.

        ``stride`` has the strides on the receiver; the tensor's own by default.
        """
        self._num_sent += 1
        if self.is_dry:
            return self._num_sent
        if stride is not None and tuple(stride) != tensor.stride() and _is_dense(tensor.shape, tuple(stride)):
            source = tensor
            tensor = torch.empty_strided(source.shape, tuple(stride), dtype=source.dtype, device=source.device)
            tensor.copy_(source)
        flat = _in_storage_order(tensor, as_bytes=self._wire.type != "cpu").to(self._wire)
        if self._wire.type != "cpu":  # those of gloo complete when they are waited for
            self._pending = {number: sent for number, sent in self._pending.items() if not sent[0].is_completed()}
        if flat.numel():
            channel = self._channels[UP if to > self.rank else DOWN]
            self._pending[self._num_sent] = channel.send(flat, to, _A_SEND), flat, channel
        return self._num_sent

    def receive(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device,
        source: int,
        what: str,
    ) -> Arrival:
        """Begin to receive a plain tensor from rank ``source``; ``what`` names it in errors."""
        tensor = new_tensor(shape, stride, dtype, device)
        if self.is_dry:
            tensor.zero_()
        if self.is_dry or tensor.numel() == 0:
            return Arrival(tensor)
        flat = _in_storage_order(tensor, as_bytes=self._wire.type != "cpu")
        buffer = flat if device.type == self._wire.type else torch.empty_like(flat, device=self._wire)
        channel = self._channels[UP if self.rank > source else DOWN]
        what = f"the receive of {what}"
        return Arrival(tensor, _InFlight(channel, channel.receive(buffer, source, what), flat, buffer, what))

    def wait_send(self, number: int) -> None:
        """Wait until the send of this number completes, and free its memory."""
        if (sent := self._pending.pop(number, None)) is not None:
            work, _, channel = sent
            channel.wait(work, _A_SEND)

    def wait_sends(self) -> None:
        """Wait until every send of the step completes."""
        for number in list(self._pending):
            self.wait_send(number)

    def drop_sends(self) -> None:
        """Drop unfinished sends after a failure."""
        self._pending = {}

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank ``source`` on every rank; all pass a tensor of the same shape and dtype."""
        if self.is_alone or not tensor.numel():
            return tensor
        carried = tensor.to(self._wire, copy=True, memory_format=torch.contiguous_format)
        if self._wire.type == "cpu":
            broadcast(self._control, carried, source, "the result")
        else:
            dist.broadcast(carried, self.ranks[source], group=self._channels[UP].group)
        return carried.to(tensor.device)

    # --- small objects on the host ---

    def gather_objects(self, item: Any) -> list[Any]:
        """Return every rank's object, in order."""
        if self.is_alone:
            return [item] * self.num_ranks
        mine = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = [size for (size,) in self.gather_integers([mine.numel()])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = gather(self._control, padded, "descriptions")
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(gathered, sizes, strict=True)]

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's list of 64-bit integers, in order; all lists have the same length."""
        if self.is_alone:
            return [list(values)] * self.num_ranks
        rows: list[list[int]] = gather(self._control, torch.tensor(values, dtype=torch.int64), "integers").tolist()
        return rows

    # --- failures ---

    def report(self, error: BaseException, what: str) -> None:
        """Tell the ranks that wait for this one that it has failed in ``what``, unless it has answered them before."""
        if not self.is_alone and not self._has_answered:
            text = "".join(traceback.format_exception(error)).strip()
            self.failures.report(f"{type(error).__name__} in {what} in step {self.step}\n{text}")

    def has_failed(self) -> bool:
        """Return whether this rank or another one has reported a failure, after which messages do not fit any more."""
        return not self.is_alone and self.failures.seen()

    def failed(self, what: str, cause: str) -> RuntimeError:
        """Return the error of a message that failed: what the other ranks know of it, too."""
        self._has_answered = True
        return RuntimeError(self.failures.describe(f"{what} over axis {self._axis_name!r} in step {self.step}", cause))

    def waiting(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for a wait for another rank."""
        if not self.meters:
            return _NOTHING if self.watch is None else self.watch.waiting()
        contexts = contextlib.ExitStack()
        if self.watch is not None:
            contexts.enter_context(self.watch.waiting())
        for meter in self.meters:
            contexts.enter_context(meter.waiting(self._wire.type))
        return contexts

    @contextlib.contextmanager
    def on_wait(self, meter: WaitMeter) -> Iterator[None]:
        """Let ``meter`` measure waits inside the context."""
        self.meters.append(meter)
        try:
            yield
        finally:
            self.meters.remove(meter)


class _Channel:
    """A process group for messages between the ranks of a transport; see `collectives.Channel`.

    Args:
        transport: that of the ranks.
        group: whose tensors are on the device ``wire``.
    """

    def __init__(self, transport: Transport, group: dist.ProcessGroup, wire: torch.device) -> None:
        self.group = group
        self.rank, self.size = transport.rank, transport.num_ranks
        self._transport, self._is_on_host = transport, wire.type == "cpu"
        self._in_group = [dist.get_group_rank(group, rank) for rank in transport.ranks]

    def send(self, tensor: torch.Tensor, to: int, what: str) -> Any:
        try:
            return dist.isend(tensor, group=self.group, group_dst=self._in_group[to])
        except RuntimeError as error:  # the connections are closed
            raise self._transport.failed(what, first_line(error)) from error

    def receive(self, tensor: torch.Tensor, source: int, what: str) -> Any:
        try:
            return dist.irecv(tensor, group=self.group, group_src=self._in_group[source])
        except RuntimeError as error:  # the connections are closed
            raise self._transport.failed(what, first_line(error)) from error

    def wait(self, work: Any, what: str) -> None:
        """Wait for a message: on the CPU the process, on an accelerator its current stream."""
        with self._transport.waiting():
            if self._is_on_host:
                listener().wait(
                    work, self.group, self._transport.failures, functools.partial(self._transport.failed, what)
                )
            else:
                work.wait()


@dataclass
class _InFlight:
    """A receive that was begun: ``buffer`` gets what is in ``flat``, a view of the tensor."""

    channel: _Channel
    work: Any
    flat: torch.Tensor
    buffer: torch.Tensor
    what: str

    def wait(self) -> None:
        self.channel.wait(self.work, self.what)
        if self.buffer is not self.flat:
            self.flat.copy_(self.buffer)


class Arrival:
    """A tensor on its way to this rank."""

    def __init__(self, tensor: torch.Tensor, in_flight: _InFlight | None = None) -> None:
        self._tensor, self._in_flight = tensor, in_flight

    def wait(self) -> torch.Tensor:
        """Return the tensor when it is there."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        return self._tensor


def new_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with these strides if they are dense, else a contiguous one."""
    if not _is_dense(tuple(shape), tuple(stride)):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def is_dry(axis: DeviceMesh) -> bool:
    """Return whether an axis has a group of torch's backend "fake", on which this process is the only rank."""
    return axis.size() > 1 and dist.get_backend(axis.get_group()) == "fake"


def current_device(device_type: str) -> torch.device:
    """Return this process's device of a type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


@functools.lru_cache(maxsize=1024)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements fill memory without gaps or overlaps, in some order of the dims."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _in_storage_order(tensor: torch.Tensor, *, as_bytes: bool) -> torch.Tensor:
    """Return the elements as they are in memory, in a contiguous tensor: a view of dense memory, else a copy.

    ``as_bytes`` is for backends that know fewer dtypes than torch.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if not as_bytes and tensor.is_contiguous():
        return tensor
    if not _is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
