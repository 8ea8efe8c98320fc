"""Layouts: where the pieces of tensors are, as a few rules in place of one row per piece.

Layouts of meshes repeat: the shards of a tensor have equal sizes, and lie at equal distances in the tensor and among
the files of the ranks. A `Run` says that for many pieces at once, with one loop for each mesh axis. A tensor of shape
(8, 6), sharded over a mesh of 2 x 2 ranks with one file each::

    Run(file=0, offsets=(0, 0), sizes=(4, 3), loops=((2, 1, (0, 3)), (2, 2, (4, 0))))

    file 0  [0:4, 0:3]      file 1  [0:4, 3:6]      twice: the next file, 3 columns further
    file 2  [4:8, 0:3]      file 3  [4:8, 3:6]      twice: 2 files and 4 rows further

Shards of other sizes, such as the last one of an uneven tensor, are runs of their own, so every layout has a form;
those of meshes have a short one. Tensors of one layout share it.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from .._typed_json import AtLeast, Size
from .boxes import Box, describe_coverage_fault

_PRIME = 2**31 - 1  # products of two residues fit in 64 bits
_DESCRIBED = 20_000  # boxes of a layout whose fault is looked for


@dataclass(frozen=True)
class Loop:
    """A repetition of a run's pieces.

    Attributes:
        count: how often they are there.
        file: the distance of their files.
        offsets: the distance of their offsets, per dim.
    """

    count: Annotated[int, AtLeast(1)]
    file: int
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Boxes of equal sizes at equal distances; the first loop is the innermost one.

    Attributes:
        file: index of the file of the first box.
        offsets: of the first box.
        sizes: of every box.
        loops: the repetitions.
    """

    file: Size
    offsets: tuple[Size, ...]
    sizes: tuple[Annotated[int, AtLeast(1)], ...]
    loops: tuple[Loop, ...] = ()

    @property
    def num_pieces(self) -> int:
        """Count the boxes."""
        return math.prod(loop.count for loop in self.loops)

    def span(self, first: int, steps: Sequence[int]) -> tuple[int, int]:
        """Return the lowest and the highest of numbers that begin with ``first`` and go on by a step in each loop."""
        reaches = [(loop.count - 1) * step for loop, step in zip(self.loops, steps, strict=True)]
        return first + sum(min(0, reach) for reach in reaches), first + sum(max(0, reach) for reach in reaches)

    def has_files(self, count: int) -> bool:
        """Return whether every index of a file is below ``count``."""
        lowest, highest = self.span(self.file, [loop.file for loop in self.loops])
        return lowest >= 0 and highest < count

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Return whether every box lies in a tensor of this shape."""
        lengths = {len(self.offsets), len(self.sizes), *(len(loop.offsets) for loop in self.loops)}
        if lengths != {len(shape)}:
            return False
        spans = [self.span(self.offsets[dim], [loop.offsets[dim] for loop in self.loops]) for dim in range(len(shape))]
        return all(
            lowest >= 0 and highest + size <= end
            for (lowest, highest), size, end in zip(spans, self.sizes, shape, strict=True)
        )

    def table(self) -> np.ndarray:
        """Return the file and the offsets of every box, ``[box, 1 + dim]``, as 64-bit integers."""
        rows = np.array([[self.file, *self.offsets]], dtype=np.int64)
        for loop in self.loops:
            step = np.array([loop.file, *loop.offsets], dtype=np.int64)
            rows = (np.arange(loop.count)[:, None, None] * step + rows).reshape(-1, len(step))
        return rows


@dataclass(frozen=True)
class Layout:
    """Boxes that tile a global shape, each in one of the files of a checkpoint.

    Attributes:
        shape: the global shape.
        runs: rules for the boxes, in the order of files.

    Example:
        >>> rows = [(rank, Box((4 * rank, 0), (4, 6))) for rank in range(1024)]
        >>> layout = Layout.of((4096, 6), rows)
        >>> layout.runs
        (Run(file=0, offsets=(0, 0), sizes=(4, 6), loops=(Loop(count=1024, file=1, offsets=(4, 0)),)),)
        >>> [(file, str(box)) for file, box in layout.overlaps(Box((6, 0), (3, 2)))]
        [(1, '[4:8, 0:6]'), (2, '[8:12, 0:6]')]
    """

    shape: tuple[Size, ...]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, shape: Sequence[int], pieces: Iterable[tuple[int, Box]]) -> Layout:
        """Return the layout of boxes, each with the index of its file."""
        rows = list(pieces)
        table = np.array([[file, *box.offsets, *box.sizes] for file, box in rows], dtype=np.int64)
        table = table.reshape(len(rows), 1 + 2 * len(shape))
        return cls.of_table(shape, table[:, 0], table[:, 1 : 1 + len(shape)], table[:, 1 + len(shape) :])

    @classmethod
    def of_table(cls, shape: Sequence[int], files: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> Layout:
        """Return the layout of boxes, given the file of each, ``[box]``, its offsets and its sizes, ``[box, dim]``."""
        order = np.lexsort((*sizes.T[::-1], *offsets.T[::-1], files))
        rows = _first_loops(np.column_stack([files, offsets])[order], sizes[order])
        while True:  # each round finds one more loop
            merged = list(_merged(rows))
            if len(merged) == len(rows):
                return cls(tuple(shape), tuple(rows))
            rows = merged

    @property
    def num_pieces(self) -> int:
        """Count the boxes."""
        return sum(run.num_pieces for run in self.runs)

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The file, the offsets and the ends of every box."""
        width = 1 + len(self.shape)
        rows = [run.table() for run in self.runs]
        sizes = [np.broadcast_to(np.array(run.sizes, dtype=np.int64), (len(own), width - 1))
                 for run, own in zip(self.runs, rows, strict=True)]  # fmt: skip
        table = np.concatenate([np.empty((0, width), np.int64), *rows])
        return table[:, 0], table[:, 1:], table[:, 1:] + np.concatenate([np.empty((0, width - 1), np.int64), *sizes])

    def pieces(self) -> Iterator[tuple[int, Box]]:
        """Yield every box with the index of its file."""
        return self.overlaps(Box.full(self.shape))

    def overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the boxes that share elements with a box, each with the index of its file."""
        files, starts, ends = self._tables
        is_common = ((starts < np.array(box.offsets) + np.array(box.sizes)) & (ends > np.array(box.offsets))).all(1)
        for i in is_common.nonzero()[0].tolist():
            offsets = tuple(starts[i].tolist())
            yield int(files[i]), Box(offsets, tuple((ends[i] - starts[i]).tolist()))

    def elements_by_file(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield indices of files, some of them several times, and the number of elements in each box there."""
        return ((run.table()[:, 0], math.prod(run.sizes)) for run in self.runs)

    def fault(self) -> str | None:
        """Return how the boxes, which lie in the shape, fail to tile it; None if they do.

        Each index of a dim gets a random weight. The boxes tile the shape if their weights, the products of the sums of
        weights over their sides, add up to that of the shape. If they do not, the sums are equal by chance only: with a
        probability of 2**-58, by the lemma of Schwartz and Zippel over the prime 2**31 - 1, twice.
        """
        if all(self._weights_add_up() for _ in range(2)):
            return None
        if self.num_pieces > _DESCRIBED:
            return "boxes that overlap or leave a gap"
        return describe_coverage_fault(self.shape, sorted(box for _, box in self.pieces()))

    def _weights_add_up(self) -> bool:
        _, starts, ends = self._tables
        found, expected = np.ones(len(starts), np.int64), 1
        draw = np.random.Generator(np.random.PCG64(secrets.randbits(128)))
        for dim, size in enumerate(self.shape):
            edges, places = np.unique(np.concatenate([[0, size], starts[:, dim], ends[:, dim]]), return_inverse=True)
            sums = draw.integers(_PRIME, size=len(edges), dtype=np.int64)[places.reshape(-1)]  # of weights before edges
            count = len(starts)
            found = found * ((sums[2 + count :] - sums[2 : 2 + count]) % _PRIME) % _PRIME
            expected = expected * int((sums[1] - sums[0]) % _PRIME) % _PRIME
        return int(found.sum()) % _PRIME == expected


def _first_loops(starts: np.ndarray, sizes: np.ndarray) -> list[Run]:
    """Return runs of at most one loop; as `_merged`, for rows of arrays."""
    steps = np.diff(starts, axis=0)
    is_alike = (np.diff(sizes, axis=0) == 0).all(1)
    is_other = (np.diff(steps, axis=0) != 0).any(1) | ~is_alike[1:] if len(steps) else np.empty(0, bool)
    ends = [*(1 + is_other.nonzero()[0]).tolist(), len(starts) - 1]  # rows after which the step changes
    runs, first, place = [], 0, 0
    while first < len(starts):
        file, *offsets = starts[first].tolist()
        run = Run(file, tuple(offsets), tuple(sizes[first].tolist()))
        last = first
        if first + 1 < len(starts) and is_alike[first]:
            while ends[place] <= first:
                place += 1
            last = ends[place]
            file_step, *offset_steps = steps[first].tolist()
            run = replace(run, loops=(Loop(last - first + 1, file_step, tuple(offset_steps)),))
        runs.append(run)
        first = last + 1
    return runs


def _merged(rows: Sequence[Run]) -> Iterator[Run]:
    """Join neighbors that differ in their start alone, by equal distances, as long as they do."""
    first = 0
    while first < len(rows):
        step, end = None, first + 1
        while end < len(rows) and _is_alike(rows[first], rows[end]):
            distance = _distance(rows[end - 1], rows[end])
            if step not in (None, distance):
                break
            step, end = distance, end + 1
        run = rows[first]
        loops = run.loops if step is None else (*run.loops, Loop(end - first, *step))
        yield Run(run.file, run.offsets, run.sizes, loops)
        first = end


def _is_alike(one: Run, other: Run) -> bool:
    return one.sizes == other.sizes and one.loops == other.loops


def _distance(one: Run, other: Run) -> tuple[int, tuple[int, ...]]:
    return other.file - one.file, tuple(b - a for a, b in zip(one.offsets, other.offsets, strict=True))
