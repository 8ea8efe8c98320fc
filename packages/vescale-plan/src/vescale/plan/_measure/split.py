"""Follow through operators which dim of a tensor tensor parallelism splits.

Memory that is split is described in a way that views leave alone. Let x be a dense tensor with elements of a dim d
spread over ranks, and ``inner = stride(d) * size(d)``: the element at offset o of the memory is on the rank

    (o mod inner) * ranks // inner

so one number describes every view of the memory. In a view the split dim is that with the largest stride below
``inner``.

Rules, for operands that are split or whole:

    product of matrices       whole x parameter             the parameter is split by columns, and so is the result
                              split by rows x columns of    the parameter is split by rows; the result is a sum over
                              the same dim                  ranks, whole
    normalization over        the split dim                 not possible on a part: the parameter that made the split is
                                                            better replicated (`Split.unsplittable`), the result whole
    elementwise, copies, ...  any split operand             the same dim of the result, counted from the last
    sums                      the split dim                 whole
    other operators           -                             whole

Elements are only counted, so a wrong guess changes an estimate and no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
PRODUCTS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten._grouped_mm: (0, 1),
}
_NORMS = (aten.native_layer_norm, aten._fused_rms_norm)
_SOFTMAX = (aten._softmax, aten._log_softmax)
_OVER_DIM = (*_SOFTMAX, aten.mean, aten.var, aten.var_mean, aten.std, aten.linalg_vector_norm, aten.topk, aten.sort)
_SUMS = (aten.sum, aten.amax, aten.amin, aten.logsumexp, aten.argmax, aten.prod)
# place of the dims among the arguments, where it is not 1
_PLACES = {aten.topk: 2, aten.linalg_vector_norm: 2}


@dataclass(eq=False)
class Memory:
    """One allocation, and how ranks share it.

    Attributes:
        num_bytes: its size.
        inner: see above; 0 if it is whole on each rank.
        kind: see `KINDS`.
        sources: names of the parameters that the split comes from.
        parameter: name, if it holds a parameter.
        is_gathered: whether a split matrix multiplies it: sequence parallelism keeps it whole.
    """

    num_bytes: int
    inner: int = 0
    kind: str = "sequence"
    sources: frozenset[str] = frozenset()
    parameter: str = ""
    is_gathered: bool = False


@dataclass
class Split:
    """What is known of parameters, and found out about them.

    Attributes:
        splittable: names of parameters that tensor parallelism may split.
        unsplittable: those whose split a normalization cannot use.
        found: those that a product has split.
    """

    splittable: frozenset[str]
    unsplittable: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)


def dim_of(tensor: Tensor, memory: Memory | None) -> int | None:
    """Return the split dim of a view, counted from the last as -1, -2, ...; None if it is whole."""
    if memory is None or not memory.inner:
        return None
    best, best_stride = None, 0
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and best_stride < stride < memory.inner:
            best, best_stride = dim - tensor.dim(), stride
    return best


def inner_of(tensor: Tensor, dim: int | None) -> int:
    """Return the number that describes a split of a new tensor along a dim counted from the last."""
    return 0 if dim is None else tensor.stride(dim) * tensor.shape[dim]


def dim_after(
    operator: Any, args: Sequence[Any], result: Tensor, operands: Sequence[tuple[Tensor, Memory | None]], split: Split
) -> tuple[int | None, frozenset[str]]:
    """Return the split dim of an operator's new result, and the parameters that the split comes from."""
    packet = operator.overloadpacket
    if packet in PRODUCTS:
        left, right = (args[place] for place in PRODUCTS[packet])
        memories = {id(tensor): memory for tensor, memory in operands}
        return _product((left, memories.get(id(left))), (right, memories.get(id(right))), split)
    for tensor, memory in operands:
        dim = dim_of(tensor, memory)
        if dim is None or memory is None:
            continue
        if _is_over(packet, args, tensor, dim):
            if memory.kind != "vocabulary" or packet not in _SOFTMAX:
                split.unsplittable |= memory.sources
                return None, frozenset()
        elif packet in _SUMS:
            return _after_sum(packet, args, tensor, dim), memory.sources
        if -dim <= result.dim() and result.shape[dim] == tensor.shape[dim]:
            return dim, memory.sources
    return None, frozenset()


def _product(
    left: tuple[Tensor, Memory | None], right: tuple[Tensor, Memory | None], split: Split
) -> tuple[int | None, frozenset[str]]:
    (a, of_a), (b, of_b) = left, right
    along, sources = dim_of(a, of_a), of_a.sources if of_a else frozenset()
    if of_b is not None and of_b.parameter in split.splittable and not of_b.inner:
        if along not in (None, -1) or of_b.parameter in split.unsplittable:
            return None if along == -1 else along, sources
        split.found.add(of_b.parameter)
        of_b.inner, of_b.sources = inner_of(b, -2 if along == -1 else -1), frozenset({of_b.parameter})
    other = dim_of(b, of_b)
    if other == -1:
        if of_a is not None and of_b is not None and of_b.parameter and along is None:
            of_a.is_gathered = True
        return -1, of_b.sources if of_b else frozenset()
    if along == -1 or (along is None and other == -2):
        return None, frozenset()
    found = along if along is not None else other
    return found, sources | (of_b.sources if of_b else frozenset())


def _is_over(packet: Any, args: Sequence[Any], tensor: Tensor, dim: int) -> bool:
    """Return whether an operator normalizes, or selects, over a dim."""
    if packet in _NORMS:
        return args[0] is tensor and len(args[1]) >= -dim  # args[1]: sizes of the normalized dims
    return packet in _OVER_DIM and dim in _dims(packet, args, tensor)


def _dims(packet: Any, args: Sequence[Any], tensor: Tensor) -> set[int]:
    """Return the dims of a reduction, counted from the last; all if it names none."""
    place = _PLACES.get(packet, 1)
    given = args[place] if len(args) > place else (-1 if packet in (aten.topk, aten.sort) else None)
    dims = [given] if isinstance(given, int) else list(given or range(tensor.dim()))
    return {dim - tensor.dim() if dim >= 0 else dim for dim in dims}


def _after_sum(packet: Any, args: Sequence[Any], tensor: Tensor, dim: int) -> int | None:
    dims = _dims(packet, args, tensor)
    if dim in dims:
        return None
    keeps = any(arg is True for arg in args[2:])
    return dim if keeps else dim + sum(each > dim for each in dims)
