"""All-gathers of updated parameters (ZeRO 1, 2), overlapped with the next forward.

After its update every rank has new values for its part of each bucket. The all-gathers are launched bucket by bucket,
in the order in which the forward needs them, which is the reverse of backward's. A bucket is awaited at its first use:

    main thread     | step | zero_grad | batch |  layer 0  |  layer 1  |  layer 2  | ...
    all-gathers            | bucket 2 |  bucket 1  |  bucket 0  |
                                               ^ waits for bucket 2    ^ for bucket 0, which is complete

    BucketGather.launch     the all-gather starts; the guard of the bucket closes (`guard.py`)
    first read or write     waits and opens the guard
    BucketGather.finish     the same, without a read

Where the guard would not see a read, or costs more than it gains, the wait comes earlier:

    step                 ``overlap=False``; a bucket whose memory another tensor shares; compiled modules, those of
                         `vescale.dmodule` in mode ``compile`` as well, because their code depends on classes
    call of a module     that has parameters of its own and is not torch's: it may give them to a C++ extension
    call of the root     inside a transform of ``torch.func``, which unwraps tensors in C++

The next step waits for everything, as do a compilation, a fork, the end of the program and the deletion of the model.
Torch counts changes of a parameter, for autograd: a backward of a forward from before the step is an error, as in one
process. So a parameter that has been updated counts one change at each launch.

Note: tensors that share memory
    A tensor made before the launch (``w = param.detach()``, a kept state dict) is not guarded. It holds the storage of
    the buffer, so the number of holders shows it. Then the bucket is awaited in the step.

Note: accelerators
    A wait lets the stream wait that reads first. If that is not the stream of the launch, the host waits as well: after
    that all streams may read.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .._checks import executions_of
from .._gradients.bucket import FlatBucket
from .._ranks.axis import Pending
from .guard import MEMORY, Guard, Memory, Wait
from .home import Home, bring_home

__all__ = ["BucketGather", "ParameterGathers"]

#: Process-wide: a compilation, a fork and the end of the program concern the gathers of every model. Held weakly.
_everywhere: weakref.WeakSet[ParameterGathers] = weakref.WeakSet()


class BucketGather:
    """The all-gather of one bucket's parameters.

    Args:
        bucket: The bucket, with parameters in its ``values``.

    Attributes:
        guard: Lets reads wait while the all-gather is in flight.
    """

    def __init__(self, bucket: FlatBucket):
        self.bucket = bucket
        self.guard = Guard({slot.fqn: slot.param for slot in bucket.slots}, Wait(self.finish))
        self._pending: Pending | None = None
        self._stream: torch.Stream | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()

    def admit_leaves(self) -> None:
        """Let other packages register leaves over the memory of DTensors, see `Memory`."""
        for slot in self.bucket.slots:
            if isinstance(slot.param, DTensor):
                setattr(slot.param, MEMORY, Memory(self.guard, frees=False))

    @property
    def is_in_flight(self) -> bool:
        """Whether the all-gather has been launched and not been awaited."""
        return self._pending is not None

    def is_shared(self, num_views: int) -> bool:
        """Return whether an unguarded tensor shares memory with the parameters.

        Args:
            num_views: How many tensors the optimizer has over the buffer.
        """
        own = 1 + 3 * len(self.bucket.slots) + num_views  # the buffer; of each slot its parameter, part and home
        return _torch.num_holders(self.bucket.values) != own + len(self.guard.leaves())

    def launch(self) -> None:
        """Start the all-gather; from now on a read of a parameter waits."""
        self._pending = self.bucket.gather_values()
        if self._pending is None:
            return
        if self.bucket.axis.device_type != "cpu":
            self._stream = torch.accelerator.current_stream(self.bucket.values.device)
        self.guard.close()

    def finish(self) -> None:
        """Wait for the all-gather, and open the guard.

        Raises:
            RuntimeError: If the all-gather failed, here or on another rank; again in every later call.
        """
        if self._pending is None:
            return
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._pending is None:  # another thread has waited
                return
            try:
                self._pending.wait()
            except RuntimeError as error:
                self._failure = str(error)
                raise
            self._let_all_streams_read()
            self.guard.open()
            self._pending = None

    def _let_all_streams_read(self) -> None:
        if self._stream is not None:
            here = torch.accelerator.current_stream(self.bucket.values.device)
            if here != self._stream:
                here.synchronize()


class ParameterGathers:
    """The all-gathers of all buckets of a module.

    Args:
        module: The module.
        buckets: Its buckets, in the order of backward; those that are not sharded are skipped.
        overlap: Whether all-gathers may be in flight when a step has ended.

    Attributes:
        waits_in_step: Whether all of them are awaited in the step that launches them.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[FlatBucket], *, overlap: bool):
        sharded = [bucket for bucket in buckets if bucket.sharded]
        self._homes = [home for bucket in sharded for home in _homes(bucket)]
        self._gathers = [BucketGather(bucket) for bucket in reversed(sharded) if bucket.axis.size > 1]
        params = [slot.param for gather in self._gathers for slot in gather.bucket.slots]
        self._tensors = [(param, tensor) for param in params for tensor in {param, _torch.local_tensor(param)}]
        self._executions = executions_of(module)
        self.waits_in_step = not overlap or _torch.is_compiled(module)
        if self._gathers and not self.waits_in_step:
            _everywhere.add(self)
            self._attach(module)
            for gather in self._gathers:
                gather.admit_leaves()

    def _attach(self, root: nn.Module) -> None:
        _finish_at_exit_and_fork()
        of_param = {slot.param: gather for gather in self._gathers for slot in gather.bucket.slots}
        for module in root.modules():
            own = {of_param[p] for p in module.parameters(recurse=False) if p in of_param}
            if own and not type(module).__module__.startswith("torch."):
                module.register_forward_pre_hook(_Wait(own), prepend=True)
        root.register_forward_pre_hook(_WaitInTransforms(self._gathers), prepend=True)

    def launch(self, num_views: Mapping[int, int]) -> None:
        """Start the all-gathers, and wait for those that cannot be awaited later.

        Args:
            num_views: By index of a bucket: how many tensors the optimizer has over its values.
        """
        self.settle()
        if not self._gathers:
            return
        _torch.on_compilation(_finish_before_compilation)
        if self.waits_in_step or self._runs_compiled_blocks():
            at_once = list(self._gathers)
        else:
            at_once = [g for g in self._gathers if g.is_shared(num_views.get(g.bucket.plan.index, 0))]
        _torch.count_change([tensor for param, tensor in self._tensors if param.grad is not None])
        for gather in self._gathers:
            gather.launch()
        for gather in at_once:
            gather.finish()

    def _runs_compiled_blocks(self) -> bool:
        return any(mode == "compile" for each in self._executions for mode in getattr(each, "modes", {}).values())

    def finish(self) -> None:
        """Wait for all that are in flight.

        Raises:
            RuntimeError: If one has failed.
        """
        for gather in self._gathers:
            gather.finish()

    def settle(self) -> None:
        """Wait for all that are in flight; then let the buckets have values that ``param.data = tensor`` put in place.

        Raises:
            RuntimeError: If a gather has failed, or such a tensor does not fit.
        """
        self.finish()
        bring_home(self._homes)

    @property
    def is_in_flight(self) -> bool:
        """Whether an all-gather is in flight."""
        return any(gather.is_in_flight for gather in self._gathers)

    def __del__(self):
        with contextlib.suppress(RuntimeError, AttributeError):  # a lost rank; a constructor that has raised
            self.finish()


def _homes(bucket: FlatBucket) -> list[Home]:
    places = zip(bucket.slots, bucket.plan.slots, strict=True)
    return [
        Home(slot.fqn, slot.param, bucket.values[plan.start : plan.start + plan.numel].view(slot.local_view.shape))
        for slot, plan in places
    ]


class _Wait:
    """A forward pre-hook that waits for some buckets; in a copy of its module it does nothing."""

    def __init__(self, gathers: Sequence[BucketGather]):
        self.gathers = tuple(gathers)

    def __call__(self, _module: nn.Module, _args: tuple) -> None:
        if not torch.compiler.is_compiling():  # what is compiled has waited
            for gather in self.gathers:
                gather.finish()

    def __reduce__(self) -> Any:
        return type(self), ((),)


class _WaitInTransforms(_Wait):
    """The same, only inside a transform such as ``torch.func.grad``."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and _torch.in_transform():
            super().__call__(module, args)


def _finish_before_compilation() -> None:
    """Let the compiler see plain parameters, now and in later steps: its code would depend on the guarded class."""
    for gathers in list(_everywhere):
        if gathers.is_in_flight:
            gathers.finish()
            gathers.waits_in_step = True


def _finish_all() -> None:
    for gathers in list(_everywhere):
        with contextlib.suppress(RuntimeError):  # a read names the ranks that are gone
            gathers.finish()


@functools.cache  # once per process
def _finish_at_exit_and_fork() -> None:
    atexit.register(_finish_all)  # late, so that it runs before process groups are destroyed
    os.register_at_fork(before=_finish_all)
