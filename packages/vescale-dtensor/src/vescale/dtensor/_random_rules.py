"""Random operators on shards that draw exactly what stock torch draws on one device.

Algorithm ("draw and keep"): every rank walks the **global** draw from the same generator state, in bounded pieces, and
keeps the elements of its own box. The generator therefore ends where the single-device one ends, on every rank, without
communication. Why pieces may be drawn separately is a property of the stock CPU generator (mt19937): element ``i`` of a
contiguous fill does not depend on the length of the fill, except in the tail of ``normal_`` (see ``_pieces``).

Cost per rank: time O(global elements), scratch O(piece). On other devices one piece is the whole tensor, because their
element map depends on its length.

Operators fall into four families:

=============  ====================================================  ==================================================
fill           ``uniform_ normal_ bernoulli_(float) exponential_``…  values do not depend on the old contents
positional     ``bernoulli(p) bernoulli_(tensor) native_dropout``    one input element per random element
like           ``rand_like randn_like randint_like``                 a fill of a new tensor
factory        ``rand randn randint`` inside a local batch           a fill of a new tensor
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
from ._boxes import flat_offset, flat_range_boxes, intersect
from ._pieces import MAX_PIECE, draw_pieces
from ._place import BatchWindow, Place, place_of
from .errors import UnsupportedRandomOperator

__all__ = ["WINDOWS", "handlers"]

aten = torch.ops.aten

# The batch windows declared around the running code, innermost first (set by ``random.local_batch``).
WINDOWS: ContextVar[tuple[BatchWindow, ...]] = ContextVar("vescale_batch_windows", default=())

FILL = (
    aten.uniform_.default,
    aten.normal_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.cauchy_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)

# operator -> the fill that gives its values, and how its arguments become the fill's
LIKE: dict[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Callable[..., tuple]]] = {
    aten.rand_like.default: (aten.uniform_.default, lambda: (0.0, 1.0)),
    aten.randn_like.default: (aten.normal_.default, lambda: (0.0, 1.0)),
    aten.randint_like.default: (getattr(aten.random_, "from"), lambda high: (0, high)),
    aten.randint_like.low_dtype: (getattr(aten.random_, "from"), lambda low, high: (low, high)),
}

FACTORY: dict[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Callable[..., tuple]]] = {
    aten.rand.default: (aten.uniform_.default, lambda size: (size, 0.0, 1.0)),
    aten.randn.default: (aten.normal_.default, lambda size: (size, 0.0, 1.0)),
    aten.randint.default: (getattr(aten.random_, "from"), lambda high, size: (size, 0, high)),
    aten.randint.low: (getattr(aten.random_, "from"), lambda low, high, size: (size, low, high)),
}


@functools.cache
def handlers() -> dict[torch._ops.OpOverload, _torch.Handler]:
    """Return a handler ``f(op, args, kwargs)`` for every operator that consumes a generator."""
    table: dict[torch._ops.OpOverload, _torch.Handler] = dict.fromkeys(FILL, _fill)
    table.update(dict.fromkeys(LIKE, _like))
    table.update(dict.fromkeys(FACTORY, _factory))
    table[aten.bernoulli.default] = _bernoulli
    table[aten.bernoulli_.Tensor] = _bernoulli_tensor_
    table[aten.native_dropout.default] = _native_dropout
    for op in _random_operators():
        table.setdefault(op, _attention if "scaled_dot_product" in op.name() else _refuse)
    return table


@functools.cache
def _random_operators() -> tuple[torch._ops.OpOverload, ...]:
    """Return every ATen overload that torch tags as consuming a generator, and the ones it forgets to tag."""
    untagged = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise", "normal")
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if torch.Tag.nondeterministic_seeded in op.tags or name.removesuffix("_") in untagged:
                found.append(op)
    return tuple(found)


# ------------------------------------------------------------------------------------------------- fills


def _fill(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Tensor:
    tensor = args[0]
    _draw_into(op, _local(tensor), place_of(op, tensor, WINDOWS.get()), args[1:], kwargs)
    return tensor


def _like(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Tensor:
    tensor, *rest = args
    fill, to_fill = LIKE[op]
    # empty_like gives the memory format and placements that the stock operator gives its result
    options = {key: kwargs[key] for key in ("dtype", "device", "memory_format") if kwargs.get(key) is not None}
    return _fill(fill, (torch.empty_like(tensor, **options), *to_fill(*rest)), {"generator": kwargs.get("generator")})


def _factory(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Tensor:
    fill, to_fill = FACTORY[op]
    size, *rest = to_fill(*args)
    options = {key: value for key, value in kwargs.items() if key != "generator"}
    if options.get("dtype") is None and op.name().startswith("aten::randint"):
        options["dtype"] = torch.int64
    return _fill(fill, (torch.empty(size, **options), *rest), {"generator": kwargs.get("generator")})


def _draw_into(op: torch._ops.OpOverload, local: Tensor, place: Place, args: tuple, kwargs: dict) -> None:
    """Fill ``local`` (the box of ``place``) with its part of ``op``'s global draw."""
    if not place.is_row_major:
        whole = torch.empty_permuted(place.shape, place.layout, dtype=local.dtype, device=local.device)
        local.copy_(op(whole, *args, **kwargs)[place.slices])
        return
    rest = dict(kwargs)
    generator = rest.pop("generator", None)
    numel = math.prod(place.shape)
    for start, piece in draw_pieces(op, numel, local.dtype, local.device, args, rest, generator):
        for mine, theirs in _overlaps(place, start, piece):
            local[mine].copy_(theirs)


# ------------------------------------------------------------------------------------------------- positional


def _bernoulli(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Tensor:
    probabilities = args[0]
    (out,) = _positional(op, probabilities, lambda piece: (op(piece, *args[1:], **kwargs),), neutral=0.5)
    return out


def _bernoulli_tensor_(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Tensor:
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


def _native_dropout(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    return _positional(op, args[0], lambda piece: op(piece, *args[1:], **kwargs), neutral=0.0)


def _positional(
    op: torch._ops.OpOverload, tensor: Tensor, draw: Callable[[Tensor], tuple[Tensor, ...]], *, neutral: float
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
        outs = outs or tuple(torch.empty_like(local, dtype=d.dtype, memory_format=torch.contiguous_format) for d in drawn)
        for out, whole in zip(outs, drawn, strict=True):
            for mine, theirs in _overlaps(place, start, whole):
                out[mine].copy_(theirs)
    assert outs is not None
    return tuple(_torch.wrap_like(out, tensor) if isinstance(tensor, DTensor) else out for out in outs)


def _overlaps(place: Place, start: int, piece: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield ``(index into the local tensor, view of the piece)`` for the elements that both hold."""
    for rectangle in flat_range_boxes(place.shape, start, start + piece.numel()):
        common = intersect(rectangle, place.box)
        if common is None:
            continue
        first = flat_offset(place.shape, rectangle[0]) - start
        view = piece[first : first + math.prod(rectangle[1])].view(rectangle[1])
        yield _index(common, place.box[0]), view[_index(common, rectangle[0])]


def _index(box: tuple[tuple[int, ...], tuple[int, ...]], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - base, o - base + size) for o, size, base in zip(*box, origin, strict=True))


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


# ------------------------------------------------------------------------------------------------- refusals


def _refuse(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    tensor = next((a for a in _torch.tree_leaves((args, kwargs)) if isinstance(a, Tensor)), None)
    raise UnsupportedRandomOperator.for_tensor(op, tensor, "draw it on a plain tensor, or gather with full_tensor() first")


def _attention(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    """Fused attention: refuse dropout (its mask cannot be sliced), hand everything else to the stock rule."""
    names = [argument.name for argument in op._schema.arguments]
    dropout = kwargs.get("dropout_p", 0.0)
    if "dropout_p" in names and names.index("dropout_p") < len(args):
        dropout = args[names.index("dropout_p")]
    if dropout:
        raise UnsupportedRandomOperator.for_tensor(
            op, args[0], "use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) or eager attention for attention dropout"
        )
    return _torch.stock_dispatch(op, args, kwargs)
