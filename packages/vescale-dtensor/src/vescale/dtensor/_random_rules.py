"""Random operators on shards that draw exactly what stock torch draws on one device.

Algorithm ("draw and keep"): every rank walks the **global** draw from the same generator state, in bounded pieces, and
keeps the elements of its own box. The generator therefore ends where the single-device one ends, on every rank, without
communication. Why pieces may be drawn separately is a property of the stock CPU generator (mt19937): element ``i`` of a
contiguous fill does not depend on the length of the fill, except in the tail of ``normal_`` (see ``_pieces``).

Cost per rank: time O(global elements), scratch O(piece). Two cases draw the whole tensor at once: one that is not
row-major in memory, and devices other than the CPU, whose element map depends on the length.

Operators fall into four families:

=============  ====================================================  ==================================================
fill           ``uniform_ normal_ bernoulli_(float) exponential_``…  values do not depend on the old contents
positional     ``bernoulli(p) bernoulli_(tensor) native_dropout``    one input element per random element
like           ``rand_like randn_like randint_like``                 a fill of a new tensor
factory        ``rand randn randint normal`` inside a local batch    a fill of a new tensor
=============  ====================================================  ==================================================

Every other operator that consumes the generator is refused, see :class:`UnsupportedRandomOperator`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch
from ._attention import refuse_dropout
from ._boxes import flat_offset, index_from, overlaps
from ._composite import decompose
from ._pieces import MAX_PIECE, PIECEWISE_OPS, draw_pieces
from ._place import BatchWindow, Place, place_of
from .errors import UnsupportedRandomOperator

__all__ = ["WINDOWS", "handle", "handlers", "is_enabled"]

aten = torch.ops.aten

# The batch windows declared around the running code, innermost first (set by ``random.local_batch``).
WINDOWS: ContextVar[tuple[BatchWindow, ...]] = ContextVar("vescale_batch_windows", default=())

RANDOM_FROM = getattr(aten.random_, "from")

# operator -> the fill that gives its values, and how its positional arguments become the fill's
Recipe = tuple[_torch.Op, Callable[..., tuple]]

LIKE: dict[str, Recipe] = {
    "rand_like": (aten.uniform_.default, lambda: (0.0, 1.0)),
    "rand_like.generator": (aten.uniform_.default, lambda: (0.0, 1.0)),
    "randn_like": (aten.normal_.default, lambda: (0.0, 1.0)),
    "randn_like.generator": (aten.normal_.default, lambda: (0.0, 1.0)),
    "randint_like": (RANDOM_FROM, lambda high: (0, high)),
    "randint_like.generator": (RANDOM_FROM, lambda high: (0, high)),
    "randint_like.low_dtype": (RANDOM_FROM, lambda low, high: (low, high)),
    "randint_like.low_generator_dtype": (RANDOM_FROM, lambda low, high: (low, high)),
}

# the same, with the size in front
FACTORY: dict[str, Recipe] = {
    "rand": (aten.uniform_.default, lambda size: (size, 0.0, 1.0)),
    "rand.generator": (aten.uniform_.default, lambda size: (size, 0.0, 1.0)),
    "randn": (aten.normal_.default, lambda size: (size, 0.0, 1.0)),
    "randn.generator": (aten.normal_.default, lambda size: (size, 0.0, 1.0)),
    "normal.float_float": (aten.normal_.default, lambda mean, std, size: (size, mean, std)),
    "randint": (RANDOM_FROM, lambda high, size: (size, 0, high)),
    "randint.generator": (RANDOM_FROM, lambda high, size: (size, 0, high)),
    "randint.low": (RANDOM_FROM, lambda low, high, size: (size, low, high)),
    "randint.low_generator": (RANDOM_FROM, lambda low, high, size: (size, low, high)),
}


@functools.cache
def handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return a handler ``f(op, args, kwargs)`` for every ATen operator that consumes a generator."""
    table: dict[_torch.Op, _torch.Handler] = dict.fromkeys(PIECEWISE_OPS, _fill)
    for recipes, handler in ((LIKE, _like), (FACTORY, _factory)):
        for name, recipe in recipes.items():
            if (op := _torch.overload(name)) is not None:
                table[op] = functools.partial(handler, recipe)
    table[aten.bernoulli.default] = _bernoulli
    table[aten.bernoulli_.Tensor] = _bernoulli_tensor_
    table[aten.native_dropout.default] = _native_dropout
    for op in filter(_torch.is_random, _torch.operators()):
        table.setdefault(op, _other(op))
    return table


def _other(op: _torch.Op) -> _torch.Handler:
    """Return the handler of a random operator that is in no family."""
    if _torch.is_composite(op):
        return decompose
    return _attention if "dropout_p" in _torch.argument_names(op) else _refuse


def handle(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run a random operator by its rule; one without a rule (of another library) is refused."""
    return handlers().get(op, _refuse)(op, args, kwargs)


def is_enabled() -> bool:
    """Tell whether the rules are installed, as they are outside :func:`vescale.dtensor.disabled`."""
    return _torch.handler_table().get(aten.uniform_.default) is _fill


# ------------------------------------------------------------------------------------------------- fills


def _fill(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    tensor = args[0]
    _draw_into(op, _local(tensor), place_of(op, tensor, WINDOWS.get()), args[1:], kwargs)
    return tensor


def _like(recipe: Recipe, _op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    fill, to_fill = recipe
    tensor, *rest = args
    # empty_like gives the memory format and placements that the stock operator gives its result
    new = torch.empty_like(tensor, **_options(kwargs))
    return _fill(fill, (new, *to_fill(*rest)), {"generator": kwargs.get("generator")})


def _factory(recipe: Recipe, _op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    fill, to_fill = recipe
    size, *rest = to_fill(*args)
    options = _options(kwargs)
    if fill is RANDOM_FROM:
        options.setdefault("dtype", torch.int64)
    return _fill(fill, (torch.empty(size, **options), *rest), {"generator": kwargs.get("generator")})


def _options(kwargs: dict) -> dict:
    return {key: value for key, value in kwargs.items() if key != "generator" and value is not None}


def _draw_into(op: _torch.Op, local: Tensor, place: Place, args: tuple, kwargs: dict) -> None:
    """Fill ``local`` (the box of ``place``) with its part of ``op``'s global draw."""
    if not place.is_row_major:
        whole = torch.empty_permuted(place.shape, place.layout, dtype=local.dtype, device=local.device)
        op(whole, *args, **kwargs)
        if local.numel():
            local.copy_(whole[place.slices])
        return
    rest = dict(kwargs)
    generator = rest.pop("generator", None)
    numel = math.prod(place.shape)
    for start, piece in draw_pieces(op, numel, local.dtype, local.device, args, rest, generator):
        for mine, theirs in _overlaps(place, start, piece):
            local[mine].copy_(theirs)


# ------------------------------------------------------------------------------------------------- positional


def _bernoulli(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    probabilities = args[0]
    (out,) = _positional(op, probabilities, lambda piece: (op(piece, *args[1:], **kwargs),), neutral=0.5)
    return out


def _bernoulli_tensor_(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    tensor, probabilities = args[:2]
    same = tensor.shape == probabilities.shape and type(tensor) is type(probabilities)
    if not same or (isinstance(tensor, DTensor) and tensor.placements != probabilities.placements):
        raise UnsupportedRandomOperator.for_tensor(
            op, tensor, "give the probabilities the shape and the placements of the result"
        )

    def draw(piece: Tensor) -> tuple[Tensor]:
        return (op(torch.empty_like(piece, dtype=tensor.dtype), piece, *args[2:], **kwargs),)

    (drawn,) = _positional(op, probabilities, draw, neutral=0.5)
    _local(tensor).copy_(_local(drawn))
    return tensor


def _native_dropout(op: _torch.Op, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    return _positional(op, args[0], lambda piece: op(piece, *args[1:], **kwargs), neutral=0.0)


def _positional(
    op: _torch.Op, tensor: Tensor, draw: Callable[[Tensor], tuple[Tensor, ...]], *, neutral: float
) -> tuple[Tensor, ...]:
    """Run ``draw`` over the global tensor in pieces, this rank's elements real and the others ``neutral``."""
    place, local = place_of(op, tensor, WINDOWS.get()), _local(tensor)
    if not place.is_row_major:
        raise UnsupportedRandomOperator.for_tensor(op, tensor, "call .contiguous() first")
    outs: tuple[Tensor, ...] | None = None
    numel = math.prod(place.shape)
    size = MAX_PIECE if local.device.type == "cpu" else max(numel, 1)
    for start in range(0, max(numel, 1), size):
        piece = local.new_full((min(size, numel - start),), neutral)
        for mine, theirs in _overlaps(place, start, piece):
            theirs.copy_(local[mine])
        drawn = draw(piece)
        outs = outs or tuple(
            torch.empty_like(local, dtype=d.dtype, memory_format=torch.contiguous_format) for d in drawn
        )
        for out, whole in zip(outs, drawn, strict=True):
            for mine, theirs in _overlaps(place, start, whole):
                out[mine].copy_(theirs)
    assert outs is not None
    if not isinstance(tensor, DTensor):
        return outs
    return tuple(_torch.wrap(out, tensor.device_mesh, tensor.placements, tensor) for out in outs)


def _overlaps(place: Place, start: int, piece: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield ``(index into the local tensor, view of the piece)`` for the elements that both hold."""
    for (offsets, sizes), common in overlaps(place.shape, place.box, start, start + piece.numel()):
        first = flat_offset(place.shape, offsets) - start
        view = piece[first : first + math.prod(sizes)].view(sizes)
        yield index_from(place.box[0], common), view[index_from(offsets, common)]


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


# ------------------------------------------------------------------------------------------------- other operators


def _refuse(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    tensor = next((a for a in _torch.tree_leaves((args, kwargs)) if isinstance(a, Tensor)), None)
    if isinstance(tensor, DTensor):
        way_out = "draw it on a plain tensor, or gather with full_tensor() first"
    else:
        way_out = "draw it outside random.local_batch, or as a part of a draw that has the batch in front"
    raise UnsupportedRandomOperator.for_tensor(op, tensor, way_out)


def _attention(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Hand fused attention to the stock rule, which draws nothing without dropout."""
    refuse_dropout(op, args, kwargs)
    return _torch.stock_dispatch(op, args, kwargs)
