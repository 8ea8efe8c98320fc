"""Run one in-place random operator over the global tensor and keep this rank's elements: what every rule rests on.

On the CPU, spans of the draw (see ``_spans``) are taken in order:

* what no rank's box needs is skipped: by the same number of words of the generator where every element takes as many,
  which is cheaper than the operator, else by drawing it in scratch;
* what lies in one box, in the memory of the shard, is drawn there;
* the rest is drawn in scratch piece by piece and copied.

Scratch is at most `MAX_PIECE` elements (and one block). Values and end state are those of one call on the global
tensor; see ``_pieces`` for why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..._layout.boxes import flat_offset, index_from, overlaps
from ..._torch import dispatch as _torch
from ..cuda_replay import replay_fill
from ..global_position import Place
from .pieces import MAX_PIECE, NORMAL_BLOCK
from .spans import SKIP, Span, steps

__all__ = ["draw_into", "skip_words"]

aten = torch.ops.aten

NORMAL = aten.normal_.default

PAIRS_OF_WORDS = frozenset(
    {aten.bernoulli_.float, aten.exponential_.default, aten.geometric_.default, aten.cauchy_.default}
)
"""Operators that take two words of the generator for each element, whatever its dtype."""

SKIPPED_AT_A_TIME = 2**14


def draw_into(op: _torch.Op, local: Tensor, place: Place, args: tuple, kwargs: dict) -> None:
    """Fill ``local`` (what ``place`` says) with its part of the global draw of the in-place operator ``op``.

    Args:
        op: an in-place operator that does not read what it overwrites: one of ``_pieces.PIECEWISE_OPS``.
        local: the shard.
        place: where its elements lie in the global tensor.
        args: positional arguments of ``op`` after the tensor.
        kwargs: its keyword arguments, ``generator`` included.
    """
    if local.device.type != "cpu":
        if not _replayed(op, local, place, args, kwargs):
            _draw_whole(op, local, place, args, kwargs)
        return
    is_blocked = op is NORMAL and place.is_contiguous
    draw = _scalar_normal if op is NORMAL and not is_blocked else op
    spans = place.block_spans if is_blocked else place.spans
    if len(spans) == 1 and spans[0].target == 0 and draw is op and place.is_local and local.is_contiguous():
        op(local, *args, **kwargs)  # the rank holds everything, in the order in which it is drawn
        return
    if len(spans) == 1 and len(place.pieces) == 1 and draw is op and spans[0].stop <= MAX_PIECE:
        _draw_small(op, local, place, args, kwargs)
        return
    if not spans or spans[0].target == SKIP:  # say what is wrong with the arguments before the generator moves
        op(local.new_empty(1), *args, **(kwargs | {"generator": _trial_generator()}))
    _draw_spans(op, draw, local, place, spans, args, kwargs)


@functools.cache
def _trial_generator() -> torch.Generator:
    """Return a generator whose state means nothing."""
    return torch.Generator()


def _replayed(op: _torch.Op, local: Tensor, place: Place, args: tuple, kwargs: dict) -> bool:
    """Draw this rank's part by replaying windows of the stock kernel, where that is exact."""
    rest = dict(kwargs)
    generator = rest.pop("generator", None)
    options = {"dtype": local.dtype, "device": local.device, "args": args, "kwargs": rest, "generator": generator}
    return replay_fill(op, place.boxed_views(local), shape=place.shape, layout=place.order, **options)


def _draw_whole(op: _torch.Op, local: Tensor, place: Place, args: tuple, kwargs: dict) -> None:
    """Draw the whole tensor at once, as a device must whose element map depends on the length of the draw."""
    whole = torch.empty_permuted(place.shape, place.order, dtype=local.dtype, device=local.device)
    op(whole, *args, **kwargs)
    place.keep(whole, local)


def _draw_small(op: _torch.Op, local: Tensor, place: Place, args: tuple, kwargs: dict) -> None:
    """Draw a tensor that is no larger than a piece, of which one box is held."""
    whole = local.new_empty(place.memory_shape)
    op(whole, *args, **kwargs)
    (view,) = place.views(local)
    view.copy_(whole[place.memory_slices])


def _draw_spans(
    op: _torch.Op,
    draw: Callable[..., object],
    local: Tensor,
    place: Place,
    spans: tuple[Span, ...],
    args: tuple,
    kwargs: dict,
) -> None:
    views = place.views(local)
    block = 1 if spans is place.spans else NORMAL_BLOCK
    scratch: Tensor | None = None
    for span in spans:
        start, stop, target = span
        if target == SKIP and op in PAIRS_OF_WORDS:
            skip_words(2 * (stop - start), kwargs.get("generator"))
            continue
        if target >= 0 and views[target].is_contiguous():
            first = flat_offset(place.memory_shape, place.memory_boxes[target][0])
            draw(views[target].view(-1)[start - first : stop - first], *args, **kwargs)
            continue
        for begin, end in steps(place.memory_shape, span, block, MAX_PIECE):
            if scratch is None or scratch.numel() < end - begin:
                scratch = local.new_empty(end - begin)
            piece = scratch[: end - begin]
            draw(piece, *args, **kwargs)
            if target != SKIP:
                for mine, theirs in _common(place, views, begin, piece):
                    mine.copy_(theirs)


def _common(place: Place, views: list[Tensor], start: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(part of a view of the shard, part of the piece)`` for the elements that both hold."""
    shape, numel = place.memory_shape, piece.numel()
    for view, box in zip(views, place.memory_boxes, strict=True):
        for (offsets, sizes), common in overlaps(shape, box, start, start + numel):
            first = flat_offset(shape, offsets) - start
            values = piece[first : first + math.prod(sizes)].view(sizes)
            yield view[index_from(box[0], common)], values[index_from(offsets, common)]


def skip_words(count: int, generator: torch.Generator | None) -> None:
    """Advance the CPU generator by an even number of 32-bit words; a 64-bit integer takes two of them."""
    scratch = torch.empty(min(count // 2, SKIPPED_AT_A_TIME), dtype=torch.int64)
    for start in range(0, count // 2, SKIPPED_AT_A_TIME):
        scratch[: count // 2 - start].random_(generator=generator)


def _scalar_normal(flat: Tensor, *args: object, **kwargs: object) -> None:
    """Fill ``flat`` by the algorithm that `normal_` has for tensors that are not contiguous, in the order of memory.

    It draws pairs one after the other and leaves the second value of an incomplete pair in the generator, so that
    pieces of any size continue each other.
    """
    even = flat.numel() // 2 * 2
    if even:
        NORMAL(flat[:even].view(2, -1).t(), *args, **kwargs)
    if even < flat.numel():
        NORMAL(flat[even:], *args, **kwargs)
