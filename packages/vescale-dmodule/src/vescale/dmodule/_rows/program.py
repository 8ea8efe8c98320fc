"""A module on this rank's rows, with the results that one device has on the rows of all ranks.

Data-parallel ranks call a module with different rows. Most modules treat every row alone, so the mean over ranks of
their losses and gradients is that of one device. Others mix rows: statistics of a batch, losses of routers, contrastive
losses, means over targets some of which are ignored. And a random operator has the rows on any dim, or on none. So the
first call with a new signature runs a few more times before, forward and without side effects:

    record     on DTensors: rows are Shard(0) on the data-parallel axis, everything else is equal on all ranks
    search     on this rank's rows: which operators give something else than their part of the recorded result?
    compare    on this rank's rows, as later calls will run: the outputs must be parts of the recorded ones

    nothing mixes rows, draws are slices of a global draw    later calls are plain calls
    otherwise                                                those operators run on DTensors at their place: islands

A loss is what its mean over ranks is: a rank returns its own value, N times its summand of a sum on N ranks, or the
value of all ranks. Other sums over rows become those over the rows of all ranks. ``mode`` has the gradients.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from .. import _torch
from .._boundary.values import describe_value, map_leaves
from .._static.operators import ModuleOperators
from .._static.recording.compare import maxima
from .call import RecordedRows, RowsCall
from .mode import RowsHooks, RowWiseHooks, from_all_rows, on_all_rows
from .recording import OwnError, RowsRecorder
from .values import WAY_OUT, num_rows

__all__ = ["RowsProgram"]

logger = logging.getLogger("vescale.dmodule")

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

WARNS_AT = 32  # signatures after which a warning says that shapes keep changing


class RowsProgram:
    """Run a module on this rank's rows as one device runs it on the rows of all ranks.

    It concerns calls in training mode with gradients; all ranks make them together. Other calls run as they are, and so
    do calls that a function mode or a transform sees, as in a pipeline, whose values may stand for those of others.

    Args:
        module: the module; its parameters and buffers are plain tensors, equal on all ranks.
        mesh: 1-D, the data-parallel ranks in the order of their rows.
        meet: bound method, called with a text before a recording, in which all ranks must take part; held weakly.
        row_wise: names of modules that run on this rank's rows as they are. What they return is compared.

    Attributes:
        recorded: by signature of a call; None where nothing mixes rows.
        call: the call in progress.
        recorder: records calls.
        is_uneven: whether ranks may have different numbers of rows. They compare them in every call then, and calls
            with different numbers run as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        *,
        meet: Callable[[str], None] | None,
        row_wise: Iterable[str] = (),
    ):
        self.module, self.mesh = module, mesh
        self._meet = None if meet is None else weakref.WeakMethod(meet)
        self.recorded: dict[Hashable, RecordedRows | None] = {}
        self.call = RowsCall(mesh)
        self.row_wise = frozenset(row_wise)
        self.recorder = RowsRecorder(module, self.call, self._hook, self.row_wise)
        self.is_uneven = False
        self._depth = 0  # calls of the module that are running
        self._failure: RuntimeError | None = None  # of a recording of the call in progress, which should fail itself
        self._hooks: dict[str, RowsHooks] = {}
        self._dropouts = [part for part in module.modules() if isinstance(part, _DROPOUTS)]

    def __reduce__(self) -> object:
        return _of_copy, ()  # which runs as it is

    def attach(self) -> None:
        """Hook the module, outside of all hooks that it has."""
        self.module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self.leave, always_call=True)
        for name in self.row_wise:
            RowWiseHooks().register(self.module.get_submodule(name))

    @property
    def covers_rows(self) -> bool:
        """Whether what runs now has the results of all rows by this program: draws, statistics."""
        if self.recorder.is_running:
            return not self.recorder.keeps_draws
        return self.call.is_open or (self.call.recorded is not None and _torch.in_backward())

    def islands(self) -> dict[str, str]:
        """Return the operators that run on the rows of all ranks, and what each communicates in a forward."""
        return dict(self.call.costs)

    # --------------------------------------------------------------------------------------------- calls

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begin a call: record it if its signature is new."""
        if self._meet is None or torch.compiler.is_compiling():
            return
        if self._depth and not _torch.is_in_own_forward(module):  # an interrupted call
            self._depth, self.call.is_open = 0, False
        self._depth += 1
        if self._depth == 1 and not self.recorder.is_running:
            self._begin(args, kwargs)
        if self.call.is_open and "" in self._hooks:
            self._hooks[""].enter(module, args)

    def _begin(self, args: tuple, kwargs: dict) -> None:
        recorded = self._failure = None
        if self.module.training and torch.is_grad_enabled() and not _torch.is_traced():
            signature = self._signature(args, kwargs)
            is_new = signature not in self.recorded
            if self.is_uneven:
                is_even, is_new = self._meet_uneven(num_rows(args, kwargs), is_new=is_new)
                if not is_even:
                    self.call.open(None)
                    return
            if is_new:
                try:
                    self.recorded[signature] = self._record(args, kwargs)
                except OwnError as raised:
                    self._failure = raised.error
                self._warn_of_many()
            recorded = self.recorded.get(signature)
        self.call.open(recorded)

    def _meet_uneven(self, rows: int | None, *, is_new: bool) -> tuple[bool, bool]:
        """Return whether all ranks have the same number of rows, and whether any has a new signature.

        Raises:
            RuntimeError: on every rank, if ranks have different numbers, and a call that mixes rows has been recorded.
        """
        rows = -1 if rows is None else rows
        most, least, is_new_anywhere = maxima([rows, -rows, float(is_new)], self.mesh)
        if most != -least and any(self.recorded.values()):
            raise RuntimeError(
                f"expected the same number of rows on all ranks, since {type(self.module).__name__} mixes rows "
                f"(DDP.islands()), got {-least:.0f} to {most:.0f}; {WAY_OUT}"
            )
        return most == -least, bool(is_new_anywhere)

    def leave(self, module: nn.Module, args: tuple, result: object) -> object:
        """End a call. ``result`` is None if it raised."""
        if not self._depth or torch.compiler.is_compiling():
            return None
        self._depth -= 1
        if not self._depth and self._failure is not None:
            failure, self._failure = self._failure, None
            if result is not None:  # it fails on the rows of other ranks
                raise failure
        if not self.call.is_open:
            return None
        if "" in self._hooks:
            self._hooks[""].leave(module, args, result)
        if self._depth or self.recorder.is_running:
            return None
        try:
            if result is not None:
                self.call.check_position("")
        finally:
            self.call.is_open = False
        return None if result is None else self._reduced(result)

    # in compiled code a call is not recorded
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"

    def _reduced(self, result: object) -> object:
        """Return a result with the sums over ranks in place of summands."""
        recorded = iter(self.call.recorded.outputs)

        def reduce(tensor: Tensor, _where: str) -> Tensor:
            known = next(recorded, None)
            if known is None or not known.must_be_reduced:
                return tensor
            if known.is_loss and tensor.requires_grad:
                return tensor * self.mesh.size()  # whose mean over ranks is the sum, without communication
            value = on_all_rows(tensor, known.placements, known.shape, self.mesh)
            value = value.redistribute(placements=[Replicate()])
            return from_all_rows(value) if value.requires_grad else _torch.local_of(value)

        return map_leaves(reduce, result, "")

    def _signature(self, args: tuple, kwargs: dict) -> Hashable:
        device = self.mesh.device_type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return dtype, tuple(part.p for part in self._dropouts), tuple(map(describe_value, args)), describe_value(kwargs)

    def _record(self, args: tuple, kwargs: dict) -> RecordedRows | None:
        meet, depth = self._meet(), self._depth
        if meet is None:
            return None  # without its DDP the module is alone
        name = type(self.module).__name__
        meet(f"the first call of {name} with new shapes or arguments, which all ranks make together")
        self._depth = 0
        try:
            return self.recorder.record(args, kwargs)
        finally:
            self._depth = depth

    def _warn_of_many(self) -> None:
        if len(self.recorded) == WARNS_AT:
            logger.warning(
                "%s has been called with %d different shapes or arguments, and each first call runs it several times "
                "more; pad batches to few lengths, and pass numbers that change as tensors",
                type(self.module).__name__,
                WARNS_AT,
            )

    def _hook(self, operators: Mapping[str, ModuleOperators]) -> None:
        modules = dict(self.module.named_modules())
        for name in operators:
            if name not in self._hooks:
                self._hooks[name] = hooks = RowsHooks(self.call, name)
                if name:  # a hook registered during a call of its module misses that call
                    hooks.register(modules[name])


def _of_copy() -> RowsProgram:
    return RowsProgram(nn.Module(), None, meet=None)
