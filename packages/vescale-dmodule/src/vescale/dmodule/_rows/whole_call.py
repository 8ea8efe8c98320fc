"""A call of a module of plain tensors inside of ``vescale.dtensor.exact``: DTensors, from its arguments to its results.

Rows are Shard(0) on the data-parallel axis, and everything else is equal on all ranks. Operators have the forms of
exact mode, so results and gradients are those of one device on the rows of all ranks. A parameter gets its whole
gradient on every rank. Parts that activation checkpointing repeats in backward run in the same way.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.dtensor.extension import exact_num_blocks

from .. import _torch
from .._boundary.convert import as_dtensor, in_one_call, is_plain
from .._boundary.rows_axis import gradient_outside
from .._boundary.values import map_leaves
from .._execution.eager import EagerScope, hook_scope
from .._gradients.sync import GradientSync
from .values import has_rows, num_rows

__all__ = ["WholeCall"]


class _ExactScope(EagerScope):
    """The running modules inside of ``exact``; hooks in other calls do nothing."""

    def enter(self, module: nn.Module, name: str) -> None:
        if exact_num_blocks() is not None:
            super().enter(module, name)


class WholeCall:
    """The calls of a module on the rows of all ranks.

    Args:
        module: its parameters and buffers are plain tensors, equal on all ranks.
        mesh: 1-D, the data-parallel ranks in the order of their rows; None for a copy of the module.

    Attributes:
        is_open: whether a call is running.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh | None):
        self.is_open = self._is_hooked = False
        self._module, self._mesh = module, mesh
        self._scope = _ExactScope(True, GradientSync(), attaches=False)
        self._rows: int | None = None

    @property
    def covers_rows(self) -> bool:
        """Whether what runs now, a call or a part that backward repeats, is on DTensors."""
        return self.is_open or (self._is_hooked and exact_num_blocks() is not None and _torch.in_backward())

    def open(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Begin a call, and return its arguments with DTensors in place of tensors of rows."""
        rows, mesh = num_rows(args, kwargs), self._mesh
        if not self._is_hooked:
            self._is_hooked = True
            for name, child in self._module.named_children():  # a hook of the module itself misses the call that runs
                hook_scope(child, name, self._scope)
        self.is_open, self._rows = True, rows
        self._scope.enter(self._module, "")

        def distribute(tensor: Tensor, _where: str) -> Tensor:
            if not is_plain(tensor):
                return tensor
            if not has_rows(tensor, rows):
                return as_dtensor(tensor, mesh)
            return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)

        return map_leaves(distribute, (args, kwargs), "")

    def close(self, result: object) -> object:
        """End a call, and return its result with this rank's part of each tensor; None if it raised."""
        self.is_open = False
        if result is None:
            self._scope.path[1:] = []  # of parts that have not ended
        self._scope.leave("")
        return None if result is None else map_leaves(lambda leaf, _where: in_one_call(self._part, leaf), result, "")

    def _part(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        has_all_rows = tensor.ndim and self._rows and tensor.shape[0] == self._rows * self._mesh.size()
        wanted = Shard(0) if has_all_rows else Replicate()
        local = tensor.redistribute(placements=[wanted]).to_local()
        if has_all_rows and local.requires_grad:
            local.register_hook(lambda gradient: gradient_outside(gradient.shape))
        return local
