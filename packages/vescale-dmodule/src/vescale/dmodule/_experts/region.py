"""Experts as a local region: each rank runs the module's own forward on its own experts.

The placements of the tokens decide (see ``axes``) what a rank computes:

    tokens sharded over the expert axes     exchanged: see ``dispatch``. The host waits once, for the split sizes.
    tokens replicated over them             each rank computes the tokens of its experts; an all-reduce adds the
                                            outputs. The forward gets all tokens. Experts of other ranks have the index
                                            ``num_local``, which the forward skips, and weight zero. On the CPU, where
                                            the host does not wait, many tokens are selected before the forward.

Both give one device's values and gradients at every number of ranks: gradients of hidden states, weights and parameters
are sums over the tokens, never means, and nothing is scaled by a number of ranks.

The region works on local tensors and process groups. In eager mode its hooks unwrap DTensors and wrap the output;
inside :meth:`ExpertRegion.on_local_tensors` they take and return plain local tensors in a layout that the caller
declares.

Random operators inside experts are refused: the tokens of an expert have no global position.

Inside of ``vescale.dtensor.exact`` there is no local part: every rank runs the forward on DTensors, for all tokens and
with all experts, whose parameters are gathered for the call. Sums over tokens and experts then have the bits of one
device.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from vescale.dtensor import random
from vescale.dtensor.extension import exact_num_blocks, waits_of

from .. import _torch
from .._boundary.convert import bring
from .._boundary.edges import depend_on
from .._execution.patch import ModulePatch, Row
from ..errors import PlanError
from .allocate import Allocation, initial_allocation
from .axes import Axes, axes_of, lane_table
from .dispatch import AllToAll, send_to_experts
from .local import expert_of, from_local, gradient_placements, layout_of_tokens, local_rows, to_local
from .operators import Group, share, sum_ranks
from .plan import ExpertLayout

__all__ = ["ExpertRegion", "experts_region", "install_region"]

REGION = "_vescale_experts"
ALLOCATION = "_vescale_allocation"
LOADS = "_vescale_loads"
RANDOM = "experts run on local tensors; move the random operator out of them"
# Elements of (token, expert) rows below which finding the rows of this rank takes longer than the forward saves.
FEW = 1 << 17

Placements = tuple[Placement, ...]


def experts_region(module: nn.Module) -> ExpertRegion | None:
    """Return the region of an experts module, None if it is none."""
    return vars(module).get(REGION)


@dataclass(frozen=True)
class _Call:
    """A running forward.

    Attributes:
        undo: closed at its end.
        operands: operands of its output, besides parameters.
        parameters: local shards, by name.
        finish: returns the result from the output and all its operands.
    """

    undo: contextlib.ExitStack
    operands: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    finish: Callable[..., Tensor]


class ExpertRegion:
    """The experts of one module on the ranks of a mesh. Copies of the module share it: one of them runs at a time.

    Attributes:
        layout: from the plan.
        mesh: the ranks.
        num_ranks: number of blocks that the experts are cut into.
        num_local: number of experts of a rank.
        last_tokens: placements of the tokens in the last call; None before the first.
    """

    def __init__(self, layout: ExpertLayout, mesh: DeviceMesh, signature: inspect.Signature):
        self.layout, self.mesh, self.signature = layout, mesh, signature
        self.num_ranks = math.prod(mesh.size(axis) for axis in layout.expert_axes)
        self.num_local = layout.num_experts // self.num_ranks
        self.last_tokens: Placements | None = None
        self._declared: Placements | None = None
        self._running: list[_Call] = []
        self._called: set[str] = set()
        self._leading = tuple(signature.parameters)[: len(layout.arguments)] == tuple(layout.arguments)
        # Constant between calls, by what they depend on.
        self._axes: dict[Placements, Axes] = {}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._sums: dict[Axes, _torch.Collectives | None] = {}
        self._gradients: dict[Axes, dict[str, Placements]] = {}
        self._tables: dict[object, Tensor] = {}

    def __deepcopy__(self, memo: dict) -> ExpertRegion:  # process groups have no copies
        return self

    # --------------------------------------------------------------------------------------------- for the caller

    @contextlib.contextmanager
    def on_local_tensors(self, tokens: Sequence[Placement]) -> Iterator[None]:
        """Take plain tensors as this rank's part of tensors in the layout ``tokens``, and return such a part.

        It is one in :meth:`output_placements`, which differ from ``tokens`` only if the plan wants a partial output.
        Gradients of the output are expected in ``tokens``; those of hidden states and weights come so, reduced. Those
        of parameters come in :meth:`gradient_placements`.

        Args:
            tokens: one placement per mesh axis: ``Replicate()``, or anything sharded: each rank has its own tokens.
        """
        before, self._declared = self._declared, tuple(tokens)
        try:
            yield
        finally:
            self._declared = before

    def gradient_placements(self, tokens: Sequence[Placement]) -> dict[str, Placements]:
        """Return the placements of the parameters' gradients, by name inside the module, for tokens that lie so."""
        axes = self.axes(tokens)
        if axes not in self._gradients:
            self._gradients[axes] = gradient_placements(self.layout, axes)
        return self._gradients[axes]

    def output_placements(self, tokens: Sequence[Placement]) -> Placements:
        """Return the placements of the output, for tokens that lie so: theirs, unless the plan wants a partial sum."""
        summed = self.axes(tokens).summed if self.layout.partial_output else ()
        return tuple(Partial() if axis in summed else placement for axis, placement in enumerate(tokens))

    def axes(self, tokens: Sequence[Placement]) -> Axes:
        """Return what each mesh axis does for tokens that lie so."""
        tokens = tuple(tokens)
        if tokens not in self._axes:
            self._axes[tokens] = axes_of(self.layout.expert_axes, self.layout.inner_axes, tokens)
        return self._axes[tokens]

    def group(self, axes: Sequence[int]) -> Group:
        """Return the ranks that differ from this one along ``axes`` only; None if there is no other."""
        axes = tuple(axes)
        if axes not in self._groups:
            several = [axis for axis in axes if self.mesh.size(axis) > 1]
            self._groups[axes] = _torch.flat_group(self.mesh, several) if several else None
        return self._groups[axes]

    # --------------------------------------------------------------------------------------------- hooks

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook: bring the operands to this rank's experts and show the module only those."""
        names = self.layout.arguments
        # binding takes as long as an operator, and models pass these by position
        by_position = self._leading and len(args) == len(names) and not kwargs
        bound = None if by_position else self.signature.bind(*args, **kwargs)
        operands = args if bound is None else tuple(bound.arguments[name] for name in names)
        wrap: Callable[[Tensor], Tensor] = _same
        tokens, is_local = self._declared, exact_num_blocks() is None
        if not is_local:
            tokens = layout_of_tokens(operands[0], self.mesh)[-self.mesh.ndim :]
        elif tokens is None or any(isinstance(operand, DTensor) for operand in operands):
            tokens = layout_of_tokens(operands[0], self.mesh)
            wrap = from_local(operands[0], self.output_placements(tokens), tokens, self.mesh)
            operands = tuple(to_local(operand, tokens, self.mesh) for operand in operands)
        self.last_tokens = tokens
        call = self._start(module, operands, tokens, wrap) if is_local else self._start_whole(module, operands)
        self._running.append(call[0])
        if bound is None:
            return call[1], kwargs
        bound.arguments.update(zip(names, call[1], strict=True))
        return bound.args, bound.kwargs

    def _start(
        self, module: nn.Module, operands: tuple[Tensor, ...], tokens: Placements, wrap: Callable[[Tensor], Tensor]
    ) -> tuple[_Call, tuple[Tensor, ...]]:
        """Begin a call on local operands; return what ends it, and what the forward gets."""
        hidden, index, weights = operands
        _check(hidden, index, weights, type(module).__name__)
        axes = self.axes(tokens)
        index = index.long()
        self._count_loads(module, index)
        summed = self._sum_group(axes)
        hidden, weights = share(summed, hidden, weights)
        masked = not axes.group and self._masks(hidden, index)
        start = self._masked if masked else self._exchanged
        *operands, back = start(module, hidden, index, weights, axes)

        undo = contextlib.ExitStack()
        rows, parameters = self._local_rows(module, tokens, absent=masked)
        undo.enter_context(ModulePatch(rows))
        if self._declared is None:  # static mode forbids them itself, at no cost per operator
            undo.enter_context(random.forbidden(RANDOM))
        self._called.clear()
        summed = None if self.layout.partial_output else summed

        def finish(output: Tensor, *seen: Tensor) -> Tensor:
            if back is None:
                return wrap(sum_ranks(output, summed, *seen))
            return wrap(sum_ranks(back(depend_on(output, *seen)), summed))

        return _Call(undo, (operands[0], operands[2]), parameters, finish), tuple(operands)

    def _start_whole(self, module: nn.Module, operands: tuple[Tensor, ...]) -> tuple[_Call, tuple[Tensor, ...]]:
        """Begin a call on DTensors that all ranks have whole, with all experts."""
        mesh = next((t.device_mesh for t in operands if isinstance(t, DTensor)), self.mesh)  # may have an axis of rows
        tokens, here, everywhere = layout_of_tokens(operands[0], mesh), _whole_on(self.mesh), _whole_on(mesh)
        tables = [table for part in module.modules() for table in _torch.tensor_tables(part)]
        sharded = [(table, name, t) for table in tables for name, t in table.items() if isinstance(t, DTensor)]
        undo = contextlib.ExitStack()
        undo.enter_context(ModulePatch((table, name, bring(t, here, self.mesh)) for table, name, t in sharded))

        def finish(output: Tensor) -> Tensor:
            return bring(output, tokens, mesh, is_result=True)

        return _Call(undo, (), {}, finish), tuple(bring(operand, everywhere, mesh) for operand in operands)

    def leave(self, module: nn.Module, _args: tuple, output: Tensor | None) -> Tensor | None:
        """Forward hook, called always: put the module back as it was and bring the output to where the tokens are."""
        if not self._running:  # an earlier hook raised
            return None
        call = self._running.pop()
        call.undo.close()
        if output is None:  # the forward raised
            return None
        if not isinstance(output, Tensor):
            raise PlanError(f"{type(module).__name__}: expected an output of one tensor, got a {type(output).__name__}")
        return call.finish(output, *call.operands, *self._used(call.parameters))

    def note_call(self, name: str) -> None:
        """Record that the forward called the expert ``name``, a submodule."""
        self._called.add(name)

    def _used(self, parameters: dict[str, Tensor]) -> list[Tensor]:
        """Return the parameters that have a gradient on one device: of submodules, those that any rank called.

        For submodules that takes an all-reduce of a bit per expert and a wait of the host.
        """
        if self.layout.kind != "modules" or not torch.is_grad_enabled() or not parameters:
            return list(parameters.values())
        names = list(dict.fromkeys(map(expert_of, parameters)))
        called = torch.tensor([name in self._called for name in names], dtype=torch.int32, device=self.mesh.device_type)
        group = self.group(range(self.mesh.ndim))
        if group is not None:
            waits_of(group).run("all-reduce", dist.all_reduce, called, dist.ReduceOp.MAX)
        used = {name for name, flag in zip(names, called.tolist(), strict=True) if flag}
        return [shard for leaf, shard in parameters.items() if expert_of(leaf) in used]

    # --------------------------------------------------------------------------------------------- two paths

    def _masks(self, hidden: Tensor, index: Tensor) -> bool:
        """Return whether the forward gets all tokens and skips those of other ranks' experts."""
        if self.layout.skips_absent is not None:
            return self.layout.skips_absent
        if index.device.type != "cpu" or type(index) is not Tensor or torch.compiler.is_compiling():
            return True
        return hidden.numel() * index.shape[-1] < FEW

    def _masked(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, axes: Axes) -> tuple:
        """Let every rank see all tokens, with the index ``num_local`` in place of experts that are not its own.

        There is no way back: the last value is None.
        """
        lanes = self._table(module, axes, index.device)[:, 0]
        index = lanes.index_select(0, index.clamp(max=self.layout.num_experts).reshape(-1)).view(index.shape)
        return hidden, index, weights.masked_fill(index == self.num_local, 0), None

    def _exchanged(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, axes: Axes) -> tuple:
        """Send tokens to their experts; the output's way back is the last value."""
        group, table = self.group(axes.group), self._table(module, axes, index.device)
        dispatcher = AllToAll() if group is None else self.layout.dispatcher
        return send_to_experts(hidden, index, weights, table, dispatcher, group=group, num_local=self.num_local)

    def _table(self, module: nn.Module, axes: Axes, device: torch.device) -> Tensor:
        """Return the lanes of each expert, (num_experts + 1, copies) int64."""
        slots = allocation_of(module, self.layout)
        key = slots, axes, device
        if key not in self._tables:
            coord = self.mesh.get_coordinate()
            table = lane_table(slots, axes=axes, shape=self.mesh.shape, coord=coord)
            self._tables[key] = torch.tensor(table, device=device)
        return self._tables[key]

    def _local_rows(
        self, module: nn.Module, tokens: Placements, *, absent: bool
    ) -> tuple[list[Row], dict[str, Tensor]]:
        coord = self.mesh.get_coordinate()
        number = 0
        for axis in self.layout.expert_axes:
            number = number * self.mesh.size(axis) + coord[axis]
        block = range(number * self.num_local, (number + 1) * self.num_local)
        silent = self.layout.once if any(coord[axis] for axis in self.layout.inner_axes) else frozenset()
        gradients = self.gradient_placements(tokens)
        return local_rows(module, self.layout, block=block, gradients=gradients, silent=silent, absent=absent)

    def _sum_group(self, axes: Axes) -> _torch.Collectives | None:
        """Return the ranks whose outputs are summed."""
        if axes not in self._sums:
            group = self.group(axes.summed)
            self._sums[axes] = None if group is None else _torch.Collectives(group)
        return self._sums[axes]

    def _count_loads(self, module: nn.Module, index: Tensor) -> None:
        """Add up the pairs that each expert gets of this rank's tokens, if the allocator needs loads."""
        if not self.layout.allocator.needs_loads or not module.training:
            return
        if LOADS not in vars(module):
            vars(module)[LOADS] = index.new_zeros(self.layout.num_experts + 1)
        chosen = index.detach().reshape(-1).clamp(max=self.layout.num_experts)
        vars(module)[LOADS].scatter_add_(0, chosen, torch.ones_like(chosen))


# ------------------------------------------------------------------------------------------------- parts


def allocation_of(module: nn.Module, layout: ExpertLayout) -> Allocation:
    """Return the slot of each expert now. It belongs to the module, not to the region, which copies share."""
    return vars(module).get(ALLOCATION) or initial_allocation(layout.num_experts)


def _same(value: Tensor) -> Tensor:
    return value


def _check(hidden: Tensor, index: Tensor, weights: Tensor, kind: str) -> None:
    """Refuse operands whose shapes or dtypes do not fit together.

    Raises:
        PlanError: with their shapes.
    """
    shapes = tuple(hidden.shape), tuple(index.shape), tuple(weights.shape)
    if index.ndim < 2 or shapes[1] != shapes[2] or shapes[0][:-1] != shapes[1][:-1]:
        raise PlanError(
            f"{kind}: expected hidden states, indices and weights of shapes (tokens, hidden), (tokens, k) and "
            f"(tokens, k), got {shapes}"
        )
    if index.is_floating_point():
        raise PlanError(f"{kind}: expected integer indices, got {index.dtype}")


# ------------------------------------------------------------------------------------------------- installation


def install_region(module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh) -> ExpertRegion:
    """Run ``module``, whose parameters are DTensors in ``layout.parameters``, on this rank's experts."""
    region = ExpertRegion(layout, mesh, inspect.signature(module.forward))
    vars(module)[REGION] = region
    if layout.kind == "modules":
        for name, expert in module.named_children():
            expert.register_forward_pre_hook(_Noted(region, name))
    module.register_forward_pre_hook(region.enter, with_kwargs=True)
    module.register_forward_hook(region.leave, always_call=True)
    module.register_state_dict_pre_hook(_refuse_moved)
    module.register_load_state_dict_pre_hook(_refuse_moved)
    return region


@dataclass(frozen=True)
class _Noted:
    """Forward pre-hook of an expert that is a submodule."""

    region: ExpertRegion
    name: str

    def __call__(self, _expert: nn.Module, _args: tuple) -> None:
        self.region.note_call(self.name)


def _refuse_moved(module: nn.Module, *_: object) -> None:
    """Refuse to read or write the parameters by expert while experts are not in order.

    Raises:
        RuntimeError: with the way out.
    """
    layout = vars(module)[REGION].layout
    if allocation_of(module, layout) != initial_allocation(layout.num_experts):
        raise RuntimeError(
            f"the experts of this {type(module).__name__} were moved by rebalance_experts, so its tensors are not in "
            "the order of one device; call restore_experts(model, optimizer) before state_dict() and load_state_dict()"
        )


def _whole_on(mesh: DeviceMesh) -> Placements:
    return (Replicate(),) * mesh.ndim
