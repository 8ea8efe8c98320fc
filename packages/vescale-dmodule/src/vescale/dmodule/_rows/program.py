"""A module on this rank's rows, with the results that one device has on the rows of all ranks.

Data-parallel ranks call a module with different rows. Most modules treat every row alone, so the mean over ranks of
their losses and gradients is that of one device. Others mix rows: statistics of a batch, losses of routers, contrastive
losses, means over targets some of which are ignored. And a random operator has the rows on any dim, or on none. So the
first call with a new signature runs a few more times before, forward and without side effects:

    record     on DTensors: rows are Shard(0) on the data-parallel axis, everything else is equal on all ranks
    search     on this rank's rows: which operators give something else than their part of the recorded result?
    compare    on this rank's rows, as later calls will run: the outputs, and what the call leaves or writes in
               attributes and buffers, must be parts of the recorded ones

    nothing mixes rows, draws are slices of a global draw    later calls are plain calls
    otherwise                                                those operators run on DTensors at their place: islands

A loss is what its mean over ranks is: a rank returns its own value, N times its summand of a sum on N ranks, or the
value of all ranks. Other sums over rows become those over the rows of all ranks. ``mode`` has the gradients.

Inside of ``vescale.dtensor.exact`` nothing is recorded, and all of every call runs on DTensors: see ``whole_call``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.dtensor.extension import exact_num_blocks

from .. import _torch
from .._boundary.values import map_leaves
from .._static.operators import ModuleOperators
from .call import RecordedRows, RowsCall
from .calls import JointCalls
from .mode import RowsHooks, RowWiseHooks, from_all_rows, on_all_rows
from .recording import RowsRecorder
from .values import Output
from .whole_call import WholeCall

__all__ = ["RowsProgram"]


class RowsProgram(JointCalls[RecordedRows]):
    """Run a module on this rank's rows as one device runs it on the rows of all ranks; see `JointCalls`.

    Args:
        module: the module; its parameters and buffers are plain tensors, equal on all ranks.
        mesh: 1-D, the data-parallel ranks in the order of their rows.
        meet: bound method, called with a text before a recording, in which all ranks must take part; held weakly.
        row_wise: names of modules that run on this rank's rows as they are. What they return is compared.

    Attributes:
        call: the call in progress.
        recorder: records calls.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        *,
        meet: Callable[[str], None] | None,
        row_wise: Iterable[str] = (),
    ):
        super().__init__(module, mesh, meet=meet)
        self.call = RowsCall(mesh)
        self.row_wise = frozenset(row_wise)
        self.recorder = RowsRecorder(module, self.call, self._hook, self.row_wise)
        self._hooks: dict[str, RowsHooks] = {}
        self._whole = WholeCall(module, mesh)

    def attach(self) -> None:
        """Hook the module, outside of all hooks that it has."""
        super().attach()
        for name in self.row_wise:
            RowWiseHooks().register(self.module.get_submodule(name))

    @property
    def covers_rows(self) -> bool:
        """Whether what runs now has the results of all rows by this program: draws, statistics."""
        if self.recorder.is_running:
            return not self.recorder.keeps_draws
        return self.call.is_open or self._whole.covers_rows or (self.call.recorded is not None and _torch.in_backward())

    def islands(self) -> dict[str, str]:
        """Return the operators that run on the rows of all ranks, and what each communicates in a forward."""
        return dict(self.call.costs)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Begin a call, and run its own recorded operators if the module has any."""
        super().enter(module, args, kwargs)
        if self.call.is_open and "" in self._hooks:
            self._hooks[""].enter(module, args)
        opens = exact_num_blocks() is not None and self._depth == 1 and not self.recorder.is_running
        return self._whole.open(args, kwargs) if opens else None

    def leave(self, module: nn.Module, args: tuple, result: object) -> object:
        """End a call. ``result`` is None if it raised."""
        if self._depth and self.call.is_open and "" in self._hooks:
            self._hooks[""].leave(module, args, result)
        return super().leave(module, args, result)

    # in compiled code a call is not recorded
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"

    def _open(self, recorded: RecordedRows | None) -> None:
        self.call.open(recorded)

    def _open_exactly(self, _args: tuple, _kwargs: dict) -> None:
        self._open(None)  # none of its operators alone

    def _close(self, result: object) -> object:
        if self._whole.is_open:
            return self._whole.close(result)
        if not self.call.is_open:
            return None
        try:
            if result is not None:
                self.call.check_position("")
        finally:
            self.call.is_open = False
        return None if result is None else self._reduced(result)

    def _reduced(self, result: object) -> object:
        """Return a result with the sums over ranks in place of summands."""
        outputs = self.call.recorded.outputs
        for known in outputs:
            if known.attribute is not None and known.must_be_reduced:
                self._reduce_attribute(known)
        recorded = iter([known for known in outputs if known.attribute is None])

        def reduce(tensor: Tensor, _where: str) -> Tensor:
            known = next(recorded, None)
            return tensor if known is None or not known.must_be_reduced else self._of_all_rows(tensor, known)

        return map_leaves(reduce, result, "")

    def _reduce_attribute(self, known: Output) -> None:
        """Put the value of all ranks into an attribute in which the call has left a summand, or this rank's mean."""
        name, key = known.attribute
        part = self.module.get_submodule(name)
        table = next(t for t in (_torch.tensor_tables(part)[1], vars(part)) if key in t)
        tensor = table[key]
        if not (tensor.requires_grad and not tensor.ndim and known.placements[0].is_partial("avg")):  # else a loss
            table[key] = self._of_all_rows(tensor, known)

    def _of_all_rows(self, tensor: Tensor, known: Output) -> Tensor:
        if known.is_loss and tensor.requires_grad:
            return tensor * self.mesh.size()  # whose mean over ranks is the sum, without communication
        value = on_all_rows(tensor, known.placements, known.shape, self.mesh)
        value = value.redistribute(placements=[Replicate()])
        return from_all_rows(value) if value.requires_grad else _torch.local_of(value)

    def _hook(self, operators: Mapping[str, ModuleOperators]) -> None:
        modules = dict(self.module.named_modules())
        for name in operators:
            if name not in self._hooks:
                self._hooks[name] = hooks = RowsHooks(self.call, name)
                if name:  # a hook registered during a call of its module misses that call
                    hooks.register(modules[name])
