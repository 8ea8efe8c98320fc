"""Draw one random operator in pieces of bounded size, with the values and the end state of the whole draw.

Purpose: a rank that holds a shard of a tensor has to draw the values of the whole tensor, but must never hold it.

Algorithm. On CPU every in-place random operator of this file walks over a contiguous tensor serially, so value i
depends on the generator's state before the operator and on i alone, not on the number of elements. Calling the native
operator on consecutive flat pieces is therefore the whole draw, with one exception: `normal_` on 16 or more elements
works in blocks of 16 uniforms, and a last incomplete block is replaced by 16 new draws for the last 16 elements. So
the pieces of `normal_` are multiples of 16, and the last one, which takes the remainder, has at least 16 elements::

    numel = 1003, max_piece = 256      uniform_:  256 | 256 | 256 | 235
                                       normal_ :  256 | 256 | 256 | 235      (235 >= 16)
    numel = 1033, max_piece = 256      normal_ :  256 | 256 | 256 | 265      (9 are too few for a piece of their own)

`normal_` on fewer than 16 elements takes the scalar path, whose second Box-Muller value stays in the generator: one
piece.

Guarantee: concatenated pieces are bit for bit the whole draw, and the generator ends in the same state, its cached
Box-Muller value included. On other devices the elements of a piece depend on the launch geometry: one whole draw.

Source: ATen/native/cpu/DistributionTemplates.h (`normal_fill`, `cpu_serial_kernel`) of torch 2.11 to 2.13.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["MAX_PIECE", "NORMAL_BLOCK", "PIECEWISE_OPS", "Scratch", "draw_pieces", "piece_sizes"]

aten = torch.ops.aten
Op = type(aten.uniform_.default)

MAX_PIECE = 2**17
"""Elements drawn at a time: 0.5 MiB of float32, which stays in the cache until it is copied."""

NORMAL_BLOCK = 16
"""`normal_` transforms this many uniforms at a time."""

PIECEWISE_OPS = frozenset(
    {
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
    }
)
"""The in-place operators that `draw_pieces` takes. None of them reads what it overwrites."""


class Scratch:
    """Memory for pieces that one draw after the other uses.

    Without it each draw allocates and frees its own, which leaves holes in the process's memory when tensors that stay
    are allocated in between (measured with glibc: two thirds more resident memory for a model of 0.2 billion elements).
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return `numel` uninitialized elements; what `take` returned before for this dtype is given up."""
        memory = self._memory.get((dtype, device))
        if memory is None or memory.numel() < numel:
            memory = self._memory[dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]


def draw_pieces(
    op: Op,
    numel: int,
    dtype: torch.dtype,
    device: torch.device | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
    *,
    max_piece: int = MAX_PIECE,
    scratch: Scratch | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield `(start, piece)` of one in-place draw of `op` on a contiguous tensor of `numel` elements.

    Args:
        op: one of `PIECEWISE_OPS`.
        numel: number of elements of the whole tensor.
        dtype: element type of the tensor.
        device: where the tensor is; anything but the CPU is drawn as one piece.
        args: positional arguments of `op` after `self`, such as `(mean, std)`.
        kwargs: keyword arguments of `op` without `generator`.
        generator: the generator to advance; None means the default one of `device`.
        max_piece: elements held at a time (`normal_` may exceed it by 15, and never uses fewer than 16).
        scratch: memory to draw into, to be given again to the next draw.

    Yields:
        The flat index of the piece's first element, and the flat piece. The memory is used again for the next piece:
        copy what you keep before you ask for the next one.

    Note:
        The generator has the whole draw's end state only after the last piece: exhaust the iterator.

    Raises:
        NotImplementedError: `op` is not one of `PIECEWISE_OPS`.
        ValueError: `max_piece` is not positive.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> op = torch.ops.aten.normal_.default
        >>> pieces = draw_pieces(op, 100, torch.float32, "cpu", (0.0, 0.02), generator=generator, max_piece=32)
        >>> [(start, piece.numel()) for start, piece in pieces]
        [(0, 32), (32, 32), (64, 36)]
    """
    if op not in PIECEWISE_OPS:
        known = ", ".join(sorted(str(known) for known in PIECEWISE_OPS))
        raise NotImplementedError(f"{op} cannot be drawn in pieces; operators that can: {known}")
    if max_piece < 1:
        raise ValueError(f"max_piece must be at least 1 element, got {max_piece}")
    sizes = piece_sizes(op, numel, dtype, torch.device(device), max_piece)
    memory = (scratch or Scratch()).take(max(sizes), dtype, torch.device(device))
    start = 0
    for size in sizes:
        piece = memory[:size]
        op(piece, *args, generator=generator, **(kwargs or {}))
        yield start, piece
        start += size


def piece_sizes(op: Op, numel: int, dtype: torch.dtype, device: torch.device, max_piece: int) -> tuple[int, ...]:
    """Return the sizes of the consecutive pieces that together are one draw of `op` on `numel` elements.

    Example:
        >>> piece_sizes(torch.ops.aten.normal_.default, 40, torch.float32, torch.device("cpu"), 20)
        (16, 24)
    """
    if device.type != "cpu" or dtype.is_complex or numel == 0:
        return (numel,)  # an empty draw still runs the operator, which then checks its arguments
    if op is not aten.normal_.default:
        full, rest = divmod(numel, max_piece)
        return (max_piece,) * full + ((rest,) if rest else ())
    size = max(max_piece // NORMAL_BLOCK * NORMAL_BLOCK, NORMAL_BLOCK)
    full, rest = divmod(numel, size)
    if full == 0 or rest >= NORMAL_BLOCK:
        return (size,) * full + (rest,)
    return (size,) * (full - 1) + (size + rest,)
