"""Draw a text picture of which rank holds which elements of a DTensor.

The picture is computed from shape, mesh and placements alone: no communication, and the same on all ranks.

    explain(x)          DTensor of shape (5, 6), torch.float32, on mesh dp=2, tp=2 (cpu)
                        placements  dp: Shard(dim=0), tp: Shard(dim=1)
                        per rank    24 B to 36 B; 120 B on all ranks together

                               0:3      3:6
                            ┌────────┬────────┐
                       0:3  │ rank 0 │ rank 1 │
                            ├────────┼────────┤
                       3:5  │ rank 2 │ rank 3 │
                            └────────┴────────┘
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import DTensor, Partial, Replicate

from ._grid import draw, ranks_text
from ._holdings import Holding, boxes_text, holdings
from ._text import axis_names, bytes_text, mesh_text, placements_text, plural

__all__ = ["explain"]

WIDTH = 99
MAX_CELLS = 1024
MAX_ROWS = 64


def explain(tensor: DTensor) -> str:
    """Return a text picture of which rank holds which elements of ``tensor``.

    Tensors sharded along at most two dims are drawn as a grid with the index ranges at its edges. Others are listed in
    a table. Lines are shorter than 100 characters.

    Args:
        tensor: any DTensor; also on a rank outside of its mesh.

    Raises:
        TypeError: ``tensor`` is not a DTensor.

    Example:
        >>> print(debug.explain(distribute_tensor(torch.zeros(5, 6), mesh, [Shard(0)])))        # doctest: +SKIP
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"expected a DTensor, got {type(tensor).__name__}; a plain tensor lies whole on its rank")
    held = holdings(tensor.shape, tensor.device_mesh, tensor.placements)
    parts = [_header(tensor, held), _picture(tuple(tensor.shape), held, tensor), list(_notes(tensor, held))]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(tensor: DTensor, held: Sequence[Holding]) -> list[str]:
    mesh, size = tensor.device_mesh, tensor.element_size()
    counts = [h.num_elements for h in held]
    low, high, total = (bytes_text(n * size) for n in (min(counts), max(counts), sum(counts)))
    each = high if low == high else f"{low} to {high}"
    placements = _wrapped(placements_text(mesh, tensor.placements), "placements  ")
    return [
        f"DTensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on {mesh_text(mesh)}",
        *placements,
        f"per rank    {each}; {total} on all ranks together",
    ]


def _wrapped(text: str, prefix: str) -> list[str]:
    """Break a list of placements at its commas."""
    lines = [prefix]
    for word in text.split(", "):
        if len(lines[-1]) > len(prefix) and len(lines[-1]) + len(word) > WIDTH - 2:
            lines.append(" " * len(prefix))
        lines[-1] += (", " if len(lines[-1]) > len(prefix) else "") + word
    return lines


# ------------------------------------------------------------------------------------------------- picture


def _picture(shape: tuple[int, ...], held: Sequence[Holding], tensor: DTensor) -> list[str]:
    if not math.prod(shape):
        return []
    cut = [d for d, n in enumerate(shape) if any(box[1][d] != n for h in held for box in h.boxes)]
    dims = [0, 1] if len(shape) == 2 else ([0] if len(shape) == 1 else cut)
    if 1 <= len(dims) <= 2:
        for lines in _grids(shape, dims, held):
            if lines and max(map(len, lines)) <= WIDTH:
                return [*_title(shape, dims), *lines]
    return _table(held, tensor)


def _title(shape: tuple[int, ...], dims: Sequence[int]) -> list[str]:
    if len(shape) <= 2:
        return []
    axes = " and ".join(f"dim {d} {way}" for d, way in zip(dims, ("down", "across"), strict=False))
    return [f"{axes}; along the other dims every rank has all of its part", ""]


def _grids(shape: tuple[int, ...], dims: Sequence[int], held: Sequence[Holding]) -> Iterator[list[str]]:
    """Yield drawings from the best to the narrowest."""
    if len(dims) == 2:
        down, across = dims
        cuts = _cuts(shape[down], down, held), _cuts(shape[across], across, held)
        if _num_cells(*cuts) > MAX_CELLS:
            return
        owners = _owners(held, down, across, *cuts)
        for long in (True, False):
            yield draw(_ranges(cuts[0]), _ranges(cuts[1]), owners, long=long)
        return
    (dim,) = dims
    cuts = _cuts(shape[dim], dim, held)
    if len(cuts) > MAX_CELLS:
        return
    row = [_holders(held, {dim: start}) for start in cuts[:-1]]
    if len(shape) == 1:
        yield draw([""], _ranges(cuts), [row])
        yield draw([""], _ranges(cuts), [row], long=False)
    yield draw(_ranges(cuts), [""], [[cell] for cell in row])


def _num_cells(*cuts: Sequence[int]) -> int:
    return math.prod(len(c) - 1 for c in cuts)


def _cuts(size: int, dim: int, held: Sequence[Holding]) -> list[int]:
    """Return all indices of a dim at which a box begins or ends."""
    ends = {0, size}
    for offsets, sizes in (box for h in held for box in h.boxes):
        ends |= {offsets[dim], offsets[dim] + sizes[dim]}
    return sorted(ends)


def _ranges(cuts: Sequence[int]) -> list[str]:
    return [f"{start}:{stop}" for start, stop in itertools.pairwise(cuts)]


def _owners(
    held: Sequence[Holding], down: int, across: int, rows: Sequence[int], columns: Sequence[int]
) -> list[list[frozenset[int]]]:
    return [[_holders(held, {down: r, across: c}) for c in columns[:-1]] for r in rows[:-1]]


def _holders(held: Sequence[Holding], index: dict[int, int]) -> frozenset[int]:
    """Return the ranks that hold the elements at an index, given along some dims."""

    def covers(box) -> bool:
        return all(box[0][d] <= i < box[0][d] + box[1][d] for d, i in index.items())

    return frozenset(h.rank for h in held if any(map(covers, h.boxes)))


# ------------------------------------------------------------------------------------------------- table


def _table(held: Sequence[Holding], tensor: DTensor) -> list[str]:
    """List the boxes, ranks with the same ones in one line."""
    groups: dict[tuple, list[Holding]] = {}
    for h in held:
        groups.setdefault(h.boxes, []).append(h)
    lines = [("who", "holds", "bytes")]
    for boxes, members in list(groups.items())[:MAX_ROWS]:
        num_bytes = bytes_text(members[0].num_elements * tensor.element_size())
        who = ranks_text([h.rank for h in members])
        for limit in (3, 2, 1, 0):
            what = boxes_text(boxes, limit=limit).strip()
            if len(who) + len(what) + len(num_bytes) + 6 <= WIDTH:
                break
        lines.append((who, what, num_bytes))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    if sum(widths) + 4 > WIDTH:
        widths[0] = 0
    more = len(groups) - len(lines) + 1
    drawn = [f"{who.ljust(widths[0])}  {what.ljust(widths[1])}  {n.rjust(widths[2])}" for who, what, n in lines]
    return [*drawn, *([f"and {plural(more, 'more part')}"] if more else [])]


# ------------------------------------------------------------------------------------------------- notes


def _notes(tensor: DTensor, held: Sequence[Holding]) -> Iterator[str]:
    names = axis_names(tensor.device_mesh)
    sizes = tuple(tensor.device_mesh.shape)
    if not tensor.numel():
        yield "- the tensor has no elements"
        return
    axes = [(n, size, p) for n, size, p in zip(names, sizes, tensor.placements, strict=True) if size > 1]
    for name, size, placement in axes:
        if isinstance(placement, Partial):
            yield f"- these are parts: the {placement.reduce_op} over the {size} ranks of {name} gives the values"
    copies = {name: size for name, size, p in axes if isinstance(p, Replicate)}
    if copies:
        yield f"- {math.prod(copies.values())} copies of every element, along {', '.join(copies)}"
    empty = [h.rank for h in held if not h.num_elements]
    if empty:
        yield f"- {ranks_text(empty)} hold{'s' if len(empty) == 1 else ''} nothing"
    counts = {h.num_elements for h in held if h.num_elements}
    if len(counts) > 1:
        yield f"- uneven: {min(counts)} to {plural(max(counts), 'element')} on a rank that holds any"
    most = max(len(h.boxes) for h in held)
    if most > 1:
        yield f"- a rank's part is in up to {most} separate boxes"
