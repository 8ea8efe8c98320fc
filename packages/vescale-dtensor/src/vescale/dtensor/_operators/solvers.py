"""Solvers on stacks of matrices: batch dims are aligned from the right, as in broadcasting.

    solve_triangular(A, B)      A (   4, 3, 3)    Shard(0)        matrix 0 of A belongs to B[:, 0]
                                B (5, 4, 3, 2)    Shard(1)
    solve_triangular(A, B)      A (3, 3)          Replicate       one matrix for all
                                B (   4, 3, 2)    Shard(0)

Stock DTensor shards all operands on the dim of one number, or leaves one operand whole whatever its batch dims are.
Where batches do not fit, the shards have other sizes, and torch raises an error about sizes that the program never had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch import dispatch
from .gather import gather

__all__ = ["SOLVERS", "align_batches"]

#: By operator: how many of the last dims of each operand belong to one matrix.
SOLVERS = {
    "_linalg_solve_ex": (2, 2),
    "cholesky_solve": (2, 2),
    "linalg_ldl_solve": (2, 1, 2),
    "linalg_lu_solve": (2, 1, 2),
    "linalg_solve_triangular": (2, 2),
    "lu_unpack": (2, 1),
    "ormqr": (2, 1, 2),
    "triangular_solve": (2, 2),
}

Layout = list[tuple[Placement, ...]]


def align_batches(
    op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision
) -> Callable[[], object] | None:
    """Return None if the operands of a solver fit in the placements that stock chose, else a function that runs it."""
    num_core = list(SOLVERS[op.overloadpacket.__name__])
    operands = args[: len(num_core)]
    if not all(isinstance(operand, DTensor) for operand in operands):
        return None
    if op.overloadpacket.__name__ == "_linalg_solve_ex" and _is_vector(*operands):
        num_core[1] = 1
    batches = [tuple(x.shape[: x.ndim - core]) for x, core in zip(operands, num_core, strict=True)]
    given = [dispatch.placements_of(operand) for operand in operands]
    needed = given if decision.needed is None else [spec.placements for spec in decision.needed[: len(operands)]]
    num_ranks = tuple(operands[0].device_mesh.shape)
    if needed == _aligned(batches, needed, num_ranks):
        return None
    wanted = _aligned(batches, given, num_ranks)
    if wanted == given:
        return functools.partial(gather, op, args, kwargs)

    def run() -> object:
        moved = [
            dispatch.wrap(dispatch.redistributed(x, to, for_op=op), x.device_mesh, to, x)
            for x, to in zip(operands, wanted, strict=True)
        ]
        return op(*moved, *args[len(operands) :], **kwargs)

    return run


def _is_vector(matrix: Tensor, other: Tensor) -> bool:
    return other.ndim == 1 or (other.ndim == matrix.ndim - 1 and other.shape == matrix.shape[:-1])


def _aligned(batches: Sequence[tuple[int, ...]], placements: Layout, num_ranks: Sequence[int]) -> Layout:
    """Return placements in which the operands fit: on each axis one batch dim, counted from the right, or whole.

    Partial operands stay so beside whole ones.
    """
    found: list[list[Placement]] = [[] for _ in batches]
    left = [list(batch) for batch in batches]
    for axis, size in enumerate(num_ranks):
        on_axis = [chosen[axis] for chosen in placements]
        places = [
            len(batch) - p.dim
            for p, batch in zip(on_axis, left, strict=True)
            if type(p) is Shard and p.dim < len(batch)
        ]
        place = places[-1] if places else 0
        dims = [len(batch) - place for batch in left]
        is_cut = [bool(place) and dim >= 0 and batch[dim] > 1 for dim, batch in zip(dims, left, strict=True)]
        fits = all(not cut or batch[dim] % size == 0 for cut, dim, batch in zip(is_cut, dims, left, strict=True))
        for index, (cut, dim, batch) in enumerate(zip(is_cut, dims, left, strict=True)):
            if place and fits and cut:
                found[index].append(Shard(dim))
                batch[dim] //= size
            else:
                is_sum = not place and on_axis[index].is_partial()
                found[index].append(on_axis[index] if is_sum else Replicate())
    return [tuple(each) for each in found]
