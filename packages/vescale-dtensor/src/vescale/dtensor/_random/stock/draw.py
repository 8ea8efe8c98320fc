"""Draw and keep: run an in-place random operator over the global tensor and keep the elements of this rank.

Every rule of the stream "torch" ends here. On the CPU a draw is cut into spans (see ``spans``), taken in order:

* a span outside all boxes of the rank is skipped: by the same number of words of the generator, where every element
  takes as many of them, else by drawing it in scratch;
* a span inside one box, contiguous in the local tensor, is drawn there;
* any other span is drawn in scratch, piece by piece, and the elements of the boxes are copied.

Why pieces are exact: every in-place CPU kernel in `PIECEWISE_OPS` walks a contiguous tensor serially, so element ``i``
depends on the state of the generator before the operator and on ``i``, but not on the number of elements. The exception
is `normal_` on 16 or more elements. It works in blocks of 16 uniforms, and 16 new uniforms replace the last 16 elements
where the last block is incomplete. Its pieces are therefore multiples of 16, and the last one has at least 16 elements.
With fewer than 16 elements, or not contiguous, `normal_` takes a scalar path that keeps the second value of a
Box-Muller pair in the generator.

Guarantee: the values and the end state of the generator (with that second value) are those of one call on the global
tensor. Scratch is at most `MAX_PIECE` elements and one block. On other devices, an element depends on the launch
geometry: the windows of the stock kernel are replayed (see ``cuda_replay``), or the full tensor is drawn and cut.

Source: ATen/native/cpu/DistributionTemplates.h (`normal_fill`, `cpu_serial_kernel`) of torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..._layout.boxes import flat_offset, index_from, overlaps
from ..._torch.debugging import without_modes
from ..._torch.dispatch import Op
from ..cuda_replay import replay_fill
from ..global_position import GlobalPosition
from .spans import SKIP, Span, spans, steps

__all__ = ["MAX_PIECE", "NORMAL_BLOCK", "PIECEWISE_OPS", "Scratch", "draw_into", "skip_words"]

aten = torch.ops.aten

NORMAL = aten.normal_.default

PAIRS_OF_WORDS = frozenset(
    {aten.bernoulli_.float, aten.exponential_.default, aten.geometric_.default, aten.cauchy_.default}
)
"""Operators that take two words of the generator for each element of any dtype."""

PIECEWISE_OPS = PAIRS_OF_WORDS | {
    aten.uniform_.default,
    aten.normal_.default,
    aten.log_normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
}
"""The operators that `draw_into` takes. None of them reads the values that it overwrites."""

MAX_PIECE = 2**17
"""Elements drawn at a time: 0.5 MiB of float32, which stay in the cache until they are copied."""

NORMAL_BLOCK = 16
"""`normal_` transforms this many uniforms at a time."""

SKIPPED_AT_A_TIME = 2**14


class Scratch:
    """Memory for pieces that consecutive draws share.

    Without it each draw allocates and frees its own, which leaves holes in the process's memory when tensors that stay
    are allocated in between (measured with glibc: two thirds more resident memory for a model of 0.2 billion elements).
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return ``numel`` uninitialized elements of the dtype and device of ``like``; earlier ones are given up."""
        key = like.dtype, like.device
        memory = self._memory.get(key)
        if memory is None or memory.numel() < numel:
            memory = self._memory[key] = like.new_empty(numel)
        return memory[:numel]


def draw_into(
    op: Op,
    local: Tensor,
    position: GlobalPosition,
    args: tuple,
    kwargs: dict,
    scratch: Scratch | None = None,
) -> None:
    """Fill ``local`` with its part of the global draw of the in-place operator ``op``.

    Args:
        op: one of `PIECEWISE_OPS`.
        local: the local tensor.
        position: the global position of its elements; without boxes, only the generator advances.
        args: positional arguments of ``op`` after the tensor.
        kwargs: its keyword arguments, ``generator`` included.
        scratch: memory to share with other draws.
    """
    if local.device.type != "cpu":
        if not _replayed(op, local, position, args, kwargs):
            _draw_full(op, local, position, args, kwargs)
        return
    is_blocked = op is NORMAL and position.is_contiguous
    draw = _scalar_normal if op is NORMAL and not is_blocked else op
    block = NORMAL_BLOCK if is_blocked else 1
    cut = _spans_of(position, block)
    if len(cut) == 1 and cut[0].target == 0 and draw is op and position.is_local and local.is_contiguous():
        op(local, *args, **kwargs)  # the rank holds everything, in the order in which it is drawn
        return
    if len(cut) == 1 and len(position.pieces) == 1 and draw is op and cut[0].stop <= MAX_PIECE:
        _draw_small(op, local, position, args, kwargs)
        return
    if not cut or cut[0].target == SKIP:  # check the arguments before the generator moves
        trial = local.new_empty(min(1, math.prod(position.shape)))  # without elements a kernel takes any dtype
        with without_modes():  # it is no operator of the program, in which a pipeline allows no own generators
            op(trial, *args, **(kwargs | {"generator": _trial_generator()}))
    _draw_spans(op, draw, local, position, cut, block, args, kwargs, scratch or Scratch())


@functools.lru_cache(maxsize=4096)
def _spans_of(position: GlobalPosition, block: int) -> tuple[Span, ...]:
    return spans(position.memory_shape, position.memory_boxes, block)


@functools.cache
def _trial_generator() -> torch.Generator:
    """Return a generator whose state is never used."""
    return torch.Generator()


def _replayed(op: Op, local: Tensor, position: GlobalPosition, args: tuple, kwargs: dict) -> bool:
    """Draw this rank's part by replaying windows of the stock kernel, where that is exact."""
    rest = dict(kwargs)
    generator = rest.pop("generator", None)
    options = {"dtype": local.dtype, "device": local.device, "args": args, "kwargs": rest, "generator": generator}
    return replay_fill(op, position.boxed_views(local), shape=position.shape, layout=position.order, **options)


def _draw_full(op: Op, local: Tensor, position: GlobalPosition, args: tuple, kwargs: dict) -> None:
    """Draw the full tensor at once: on this device the map of elements depends on the length of the draw."""
    full = torch.empty_permuted(position.shape, position.order, dtype=local.dtype, device=local.device)
    op(full, *args, **kwargs)
    position.keep(full, local)


def _draw_small(op: Op, local: Tensor, position: GlobalPosition, args: tuple, kwargs: dict) -> None:
    """Draw a tensor that is not larger than a piece; this rank holds one box of it."""
    full = local.new_empty(position.memory_shape)
    op(full, *args, **kwargs)
    (view,) = position.views(local)
    view.copy_(full[position.memory_slices])


def _draw_spans(
    op: Op,
    draw: Callable[..., object],
    local: Tensor,
    position: GlobalPosition,
    cut: tuple[Span, ...],
    block: int,
    args: tuple,
    kwargs: dict,
    scratch: Scratch,
) -> None:
    views = position.views(local)
    for span in cut:
        start, stop, target = span
        if target == SKIP and op in PAIRS_OF_WORDS:
            skip_words(2 * (stop - start), kwargs.get("generator"))
            continue
        if target >= 0 and views[target].is_contiguous():
            first = flat_offset(position.memory_shape, position.memory_boxes[target][0])
            draw(views[target].view(-1)[start - first : stop - first], *args, **kwargs)
            continue
        for begin, end in steps(position.memory_shape, span, block, MAX_PIECE):
            piece = scratch.take(end - begin, local)
            draw(piece, *args, **kwargs)
            if target != SKIP:
                for mine, theirs in _common(position, views, begin, piece):
                    mine.copy_(theirs)


def _common(
    position: GlobalPosition, views: list[Tensor], start: int, piece: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(part of a view of the local tensor, part of the piece)`` for the elements that both hold."""
    shape, numel = position.memory_shape, piece.numel()
    for view, box in zip(views, position.memory_boxes, strict=True):
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
