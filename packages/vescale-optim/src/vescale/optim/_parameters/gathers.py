"""Gathers of updated parameters (ZeRO 1, 2), overlapped with the next forward.

After its update every rank has new values for its part of each bucket. The gathers are launched bucket by bucket, in
the order in which the forward needs them, which is the reverse of backward's, and each is awaited at its first use:

    main thread     | step | zero_grad | batch |  layer 0  |  layer 1  |  layer 2  | ...
    gathers                | bucket 2 |  bucket 1  |  bucket 0  |
                                               ^ waits for bucket 2    ^ for bucket 0, which is there already

Whoever reads or writes a parameter by a function of torch waits for its bucket (`_awaited.py`). Where that would not be
seen, or would cost more than it gains, somebody waits earlier:

    step                 ``overlap=False``; a bucket whose memory is shared by a tensor of somebody else; compiled
                         modules, those of `vescale.dmodule` in mode ``compile`` as well: their code depends on classes
    call of a module     that has parameters of its own and is not torch's: it may give them to a C++ extension
    call of the whole    inside a transform of ``torch.func``, which unwraps tensors in C++

Static mode of `vescale.dmodule` reads local tensors in place of DTensors, which wait as those do.

The next step waits for everything, as do a compilation, a fork, the end of the program and the deletion of the model.
Torch counts changes of a parameter, for autograd: a backward of a forward from before the step is an error, as in one
process. So a parameter that has been updated counts one change at each launch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch
from .._checks import executions_of
from .._gradients.bucket import FlatBucket
from .guard import AwaitedValues

__all__ = ["ParameterGathers"]

_everywhere: weakref.WeakSet[ParameterGathers] = weakref.WeakSet()


class ParameterGathers:
    """The gathers of all buckets of a module.

    Args:
        module: The module.
        buckets: Its buckets, in the order of backward; those that are not sharded are left alone.
        overlap: Whether gathers may be on their way when a step has ended.

    Attributes:
        waits_in_step: Whether all gathers are awaited where they are launched.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[FlatBucket], *, overlap: bool):
        self._awaited = [AwaitedValues(b) for b in reversed(buckets) if b.sharded and b.axis.size > 1]
        params = [slot.param for awaited in self._awaited for slot in awaited.bucket.slots]
        self._tensors = [(param, tensor) for param in params for tensor in {param, _torch.local_tensor(param)}]
        self._executions = executions_of(module)
        self.waits_in_step = not overlap or _torch.is_compiled(module)
        if self._awaited and not self.waits_in_step:
            _everywhere.add(self)
            self._attach(module)
            for awaited in self._awaited:
                awaited.invite_sharers()

    def _attach(self, root: nn.Module) -> None:
        _finish_at_exit_and_fork()
        of_param = {slot.param: awaited for awaited in self._awaited for slot in awaited.bucket.slots}
        for module in root.modules():
            own = {of_param[p] for p in module.parameters(recurse=False) if p in of_param}
            if own and not type(module).__module__.startswith("torch."):
                module.register_forward_pre_hook(_Await(own), prepend=True)
        root.register_forward_pre_hook(_AwaitInTransforms(self._awaited), prepend=True)

    def launch(self, num_views: Mapping[int, int]) -> None:
        """Start the gathers, and wait for those that cannot be awaited later.

        Args:
            num_views: By index of a bucket: how many tensors the optimizer has over its values.
        """
        self.finish()
        if not self._awaited:
            return
        _torch.on_compilation(_finish_before_compilation)
        if self.waits_in_step or self._runs_compiled_blocks():
            at_once = list(self._awaited)
        else:
            at_once = [a for a in self._awaited if a.is_shared(num_views.get(a.bucket.plan.index, 0))]
        _torch.count_change([tensor for param, tensor in self._tensors if param.grad is not None])
        for awaited in self._awaited:
            awaited.launch()
        for awaited in at_once:
            awaited.finish()

    def _runs_compiled_blocks(self) -> bool:
        return any(mode == "compile" for each in self._executions for mode in getattr(each, "modes", {}).values())

    def finish(self) -> None:
        """Wait for all that are on their way.

        Raises:
            RuntimeError: If one has failed.
        """
        for awaited in self._awaited:
            awaited.finish()

    @property
    def is_on_its_way(self) -> bool:
        """Whether there is something to wait for."""
        return any(awaited.is_on_its_way for awaited in self._awaited)

    def __del__(self):
        with contextlib.suppress(RuntimeError, AttributeError):  # a lost rank; a constructor that has raised
            self.finish()


class _Await:
    """A forward pre-hook that waits for some buckets; a copy of its module needs none."""

    def __init__(self, awaited: Sequence[AwaitedValues]):
        self.awaited = tuple(awaited)

    def __call__(self, _module: nn.Module, _args: tuple) -> None:
        if not torch.compiler.is_compiling():  # what is compiled has waited
            for each in self.awaited:
                each.finish()

    def __reduce__(self) -> Any:
        return type(self), ((),)


class _AwaitInTransforms(_Await):
    """The same, only inside of a transform such as ``torch.func.grad``."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and _torch.in_transform():
            super().__call__(module, args)


def _finish_before_compilation() -> None:
    """Show the compiler plain parameters, now and from now on: its code would hold for either class only."""
    for gathers in list(_everywhere):
        if gathers.is_on_its_way:
            gathers.finish()
            gathers.waits_in_step = True


def _finish_all() -> None:
    for gathers in list(_everywhere):
        with contextlib.suppress(RuntimeError):  # lost ranks are named where somebody reads
            gathers.finish()


_is_registered = False


def _finish_at_exit_and_fork() -> None:
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_finish_all)  # late, so that it runs before process groups are destroyed
        os.register_at_fork(before=_finish_all)
