"""The mode: which form an operator has. It runs above DTensor, on global tensors.

Every operator that reaches it is one of these; the first that fits counts:

===================================  ==========================================================================
operator                             runs
===================================  ==========================================================================
no floating-point operand            as it is: integers do not round
consists of others (inference mode)  by its definition
`PRODUCTS`, `SUMS`                   in blocks, with the tree
`DEFINITIONS`                        in torch's functions, each of which comes back here
on lists (``_foreach_add``)          one by one
`adds_nothing`                       as it is
pointwise                            as it is if that is one IEEE operation, or in whole vectors
`LINES`                              on whole lines
torch's losses, by their definition  the same as `DEFINITIONS`
**any other**                        the call of one device, on gathered operands
===================================  ==========================================================================

The list is closed: nothing runs on shards unless one of the rows above the last one says why that is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .._exact_context import SOURCES
from .._operators.tables import COMPOSE
from .._torch import dispatch
from ..errors import UnsupportedOperator
from . import losses, norms, sums
from .collectives import NAMESPACES, refuse_sums
from .passing import adds_nothing, is_exact_dtype
from .pointwise import has_own_dispatch, run_pointwise
from .products import PRODUCTS
from .sums import SUMS
from .whole import LINES, embed, refuse_fused, run_on_lines, run_whole

__all__ = ["ExactMode"]

FORMS = {**PRODUCTS, **SUMS, torch.ops.aten.embedding.default: embed}
DEFINITIONS = {**sums.DEFINITIONS, **norms.DEFINITIONS, **losses.DEFINITIONS}
COMPOSED = frozenset(op for name in COMPOSE if (op := dispatch.overload(name)) is not None)


class ExactMode(dispatch.TorchDispatchMode):
    """Run each operator in a form whose bits do not depend on the layout."""

    def __init__(self, num_blocks: int):
        super().__init__()
        self.num_blocks = num_blocks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return self._run_foreign(func, args, kwargs)
        if any(has_own_dispatch(each) and not issubclass(each, DTensor) for each in types):
            return NotImplemented  # a wrapper of another kind: what it consists of comes back here
        tensors = list(tensors_in((args, kwargs)))
        self._check(func, tensors)
        if all(map(is_exact_dtype, tensors)) or tensors[0].device.type == "meta" or _is_outside(tensors):
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, op: dispatch.Op, args: tuple, kwargs: dict) -> object:
        if (form := FORMS.get(op)) is not None:
            return form(self.num_blocks, op, *args, **kwargs)
        if (definition := DEFINITIONS.get(op)) is not None:
            with self:
                return definition(*args, **kwargs)
        if op.overloadpacket.__name__.startswith("_foreach_"):
            return self._run_each(op, args, kwargs)
        if adds_nothing(op, args, kwargs):
            return op(*args, **kwargs)
        if torch.Tag.pointwise in op.tags and op not in COMPOSED:
            return run_pointwise(op, args, kwargs)
        if dispatch.is_composite(op):
            with self:
                return op.decompose(*args, **kwargs)
        if op in LINES:
            return run_on_lines(op, args, kwargs)
        if op in COMPOSED and (definition := dispatch.decomposition(op)) is not None:
            with self:
                return definition(*args, **kwargs)
        refuse_fused(op)
        return run_whole(op, args, kwargs)

    def _run_each(self, op: dispatch.Op, args: tuple, kwargs: dict) -> object:
        """Run an operator on lists for one of their elements after the other."""
        name = op.overloadpacket.__name__.removeprefix("_foreach_")
        each = getattr(torch.ops.aten, name)
        count = len(args[0])
        results = []
        with self:
            for i in range(count):
                own = (arg[i] if isinstance(arg, (list, tuple)) and len(arg) == count else arg for arg in args)
                results.append(each(*own, **kwargs))
        return None if name.endswith("_") else results

    def _run_foreign(self, op: dispatch.Op, args: tuple, kwargs: dict) -> object:
        if op.namespace in NAMESPACES:
            refuse_sums(op, args, kwargs)
        elif any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs))):
            raise UnsupportedOperator.for_operands(
                op,
                tensors_in((args, kwargs)),
                "vescale.dtensor.exact knows operators of torch only: call it on full_tensor()",
            )
        return op(*args, **kwargs)

    def _check(self, op: dispatch.Op, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                _check_mesh(op, tensor, self.num_blocks)
                _check_placements(op, tensor)


def _num_blocks_of_thread() -> int | None:
    return next((mode.num_blocks for mode in dispatch.dispatch_modes() if isinstance(mode, ExactMode)), None)


SOURCES.append(_num_blocks_of_thread)


def _is_outside(tensors: list[Tensor]) -> bool:
    """Return whether this rank is not in the mesh, where operators give shapes without values."""
    return any(isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None for tensor in tensors)


def _check_mesh(op: dispatch.Op, tensor: DTensor, num_blocks: int) -> None:
    sizes = tuple(tensor.device_mesh.shape)
    if any(num_blocks % size for size in sizes):
        raise UnsupportedOperator.for_operands(
            op,
            [tensor],
            f"inside of exact(num_blocks={num_blocks}) every axis of a mesh has a number of ranks that "
            f"divides {num_blocks}, got a mesh of shape {sizes}: pass a multiple of them as num_blocks",
        )


def _check_placements(op: dispatch.Op, tensor: DTensor) -> None:
    if is_exact_dtype(tensor):
        return
    for axis, placement in enumerate(dispatch.placements_of(tensor)):
        is_sum = placement.is_partial() and not any(placement.is_partial(way) for way in ("max", "min"))
        if is_sum and tensor.device_mesh.size(axis) > 1:
            raise UnsupportedOperator.for_operands(
                op,
                [tensor],
                "inside of vescale.dtensor.exact no values are sums over ranks that a backend adds: make "
                "them inside of the context, where sums are replicated, or redistribute them before it",
            )
