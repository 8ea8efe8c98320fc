"""The dispatch mode that sees every operator of a constructor and decides what becomes of it.

===============================================  ======================================================================
operator                                         what happens
===============================================  ======================================================================
on deferred tensors, or a factory                recorded; the result is deferred
random                                           recorded, also on real tensors: the generator must not advance
`torch.tensor(data)`                             its data are kept as a constant; the result is deferred
on real tensors only (made outside, numpy's)     runs as always; the result is real
on the `meta` device                             runs as always
result depends on data (`item`, `nonzero`, …)    the inputs are computed on demand, the result is real or a constant
===============================================  ======================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._demand import Reader
from ._generators import GeneratorLog
from ._ops import ALIAS, GEOMETRY_FACTORIES, SAME_KIND
from ._tape import Tape
from ._tensor import DeferredTensor, DeferredTensorError, record, wrap_constant
from ._torch import Op, TorchDispatchMode, foreign_memory, is_random, tree_leaves, tree_map_only, written_arguments

__all__ = ["Recorder"]

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Records a constructor on a new tape.

    Attributes:
        tape: what was recorded.
        log: the generators it draws from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.log = GeneratorLog(self.tape)
        self._reader = Reader(self.tape, self.log)
        self._is_paused = False
        self.tape.read = self.read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002 (torch's signature)
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if isinstance(tensor, DeferredTensor)]
        if self._is_paused or func is SAME_KIND or (not deferred and self._runs_as_always(func, tensors, kwargs)):
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            # numpy may still change its memory: such a tensor stays real, and is copied where it is used
            return wrap_constant(self.tape, self.log, args[0]) if not deferred else args[0]
        owner = self._owner(func, deferred)
        if owner is not self.tape:
            return func(*args, **kwargs)
        if func is aten.set_.source_Tensor and len(deferred) == 2:
            args[0].data = args[1]
            return args[0]
        if func is aten._local_scalar_dense.default:
            return self._now(func, args, kwargs)
        try:
            return record(self.tape, self.log, func, args, kwargs)
        except NotImplementedError:
            if is_random(func) or written_arguments(func):
                raise
            return self._now(func, args, kwargs)

    def read(self, value: int) -> Tensor:
        """Return the present contents of a value."""
        self._is_paused = True
        try:
            return self._reader.read(value)
        finally:
            self._is_paused = False

    def finish(self) -> None:
        """End the recording: no more contents on demand, and all generators as they were before it."""
        self.tape.read = None
        try:
            self.log.note_changes()
        finally:
            self.log.restore()

    def _runs_as_always(self, func: Op, tensors: list[Tensor], kwargs: dict) -> bool:
        """Tell whether an operator without deferred arguments is none of ours."""
        if any(tensor.is_meta for tensor in tensors) or torch.device(kwargs.get("device") or "cpu").type == "meta":
            return True
        if not tensors or is_random(func) or func in GEOMETRY_FACTORIES:
            return False
        return func is not aten.lift_fresh.default or foreign_memory(tensors[0])

    def _owner(self, func: Op, deferred: list[DeferredTensor]) -> Tape:
        tapes = {id(tensor.deferred.tape): tensor.deferred.tape for tensor in deferred}
        if set(tapes) <= {id(self.tape)}:
            return self.tape
        if func in ALIAS:
            return deferred[0].deferred.tape
        raise DeferredTensorError(
            f"{func} uses tensors of another deferred_init: {deferred}. Build both in one deferred_init, or materialize the "
            "first one before"
        )

    def _now(self, func: Op, args: tuple, kwargs: dict) -> object:
        """Run an operator whose result cannot be described without data."""
        real_args, real_kwargs = tree_map_only(DeferredTensor, lambda t: self.read(t.deferred.value), (args, kwargs))
        with torch.no_grad():
            result = func(*real_args, **real_kwargs)
        return tree_map_only(Tensor, lambda tensor: wrap_constant(self.tape, self.log, tensor), result)
