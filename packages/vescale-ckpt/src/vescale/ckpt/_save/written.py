"""What ranks tell of the boxes that they wrote or hold: rows of integers, as there are many of them.

A row has the index of a tensor, one more number, and the box: its offsets and its sizes, with zeros after those of
tensors with fewer dims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .._errors import format_ranks, format_some
from .._format.boxes import Box
from .._format.layouts import Layout
from .holdings import Held, packed, unpacked


class Rows:
    """Rows for the tensors of a state."""

    def __init__(self, held: Held) -> None:
        self._names, self._metas = held.names, list(held.tensors().values())
        self._index = {name: number for number, name in enumerate(held.names)}
        self._num_dims = max((len(meta.shape) for meta in held.metas), default=0)

    def packed(self, rows: Iterable[tuple[str, int, Box]]) -> str:
        """Return rows as text: name, number and box of each."""
        numbers: list[int] = []
        for name, number, box in rows:
            rest = [0] * (self._num_dims - len(box.sizes))
            numbers += [self._index[name], number, *box.offsets, *rest, *box.sizes, *rest]
        return packed(numbers)

    def layouts(self, texts: Sequence[str], num_files: Sequence[int]) -> dict[str, Layout]:
        """Return the layout of every tensor from the pieces of each rank, whose numbers are those of its files."""
        tables = [self._table(text) for text in texts]
        first = 0
        for table, count in zip(tables, num_files, strict=True):
            table[:, 1] += first
            first += count
        table = np.concatenate(tables)
        table = table[np.argsort(table[:, 0], kind="stable")]
        ends = np.searchsorted(table[:, 0], np.arange(len(self._names) + 1))
        found: dict[tuple, Layout] = {}
        layouts = {}
        for number, (name, meta) in enumerate(zip(self._names, self._metas, strict=True)):
            own = table[ends[number] : ends[number + 1], 1:]
            key = meta.shape, own.tobytes()
            if key not in found:
                offsets, sizes = self._boxes(own[:, 1:], len(meta.shape))
                found[key] = Layout.of_table(meta.shape, own[:, 0], offsets, sizes)
            layouts[name] = found[key]
        return layouts

    def torn(self, texts: Sequence[str]) -> str | None:
        """Compare the fingerprints of replicas, the numbers of the rows of each rank; see `describe_torn`."""
        tables = [self._table(text) for text in texts]
        table = np.concatenate(tables)
        ranks = np.repeat(np.arange(len(tables)), [len(own) for own in tables])
        draw = np.random.Generator(np.random.PCG64(0))
        weights = np.asarray(draw.integers(1, 2**63, size=table.shape[1], dtype=np.uint64))
        weights[1] = 0  # that of the fingerprint
        place = (table.astype(np.uint64) * weights).sum(1, dtype=np.uint64)  # equal for equal boxes
        place_and_value = place * np.uint64(2**32 + 15) + table[:, 1].astype(np.uint64)
        if np.unique(place).size == np.unique(place_and_value).size:
            return None
        order = np.lexsort((table[:, 1], place))
        place, sums = place[order], table[order, 1]
        suspects = place[1:][(place[1:] == place[:-1]) & (sums[1:] != sums[:-1])]
        found: list[dict[tuple[str, Box], int]] = [{} for _ in tables]
        for i in order[np.isin(place, suspects)].tolist():
            name = self._names[table[i, 0]]
            (offsets,), (sizes,) = self._boxes(table[i : i + 1, 2:], len(self._metas[table[i, 0]].shape))
            found[ranks[i]][name, Box(tuple(offsets.tolist()), tuple(sizes.tolist()))] = int(table[i, 1])
        return describe_torn(found)

    def _table(self, text: str) -> np.ndarray:
        return unpacked(text).reshape(-1, 2 + 2 * self._num_dims).copy()

    def _boxes(self, table: np.ndarray, num_dims: int) -> tuple[np.ndarray, np.ndarray]:
        return table[:, :num_dims], table[:, self._num_dims : self._num_dims + num_dims]


def describe_torn(sums: Sequence[Mapping[tuple[str, Box], int]]) -> str | None:
    """Return a text with the first replicas that differ between ranks, by their fingerprints on each rank, or None."""
    ranks_of: dict[tuple[str, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(sums):
        for key, value in own.items():
            ranks_of[key][value].append(rank)
    torn = [
        f"{name!r} {box} ({' differ from '.join(map(format_ranks, sides.values()))})"
        for (name, box), sides in sorted(ranks_of.items())
        if len(sides) > 1
    ]
    if not torn:
        return None
    return (
        f"expected equal replicas on all ranks, got differences in {format_some(torn)}; make them equal before saving "
        "(a gradient reduction or broadcast is missing), or give values of one rank their own name"
    )
