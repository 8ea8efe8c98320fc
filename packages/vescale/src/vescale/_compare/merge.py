"""The files of all ranks as digests of global tensors.

    lines of one tensor in one reading        by box
      rank 0, rank 1: rows 0:4                replicas: equal bits are expected, and one of them counts
      rank 2, rank 3: rows 4:8                the sum of the digests of all boxes is that of the tensor

A mean or a sum over parts of the batch has no bits of one process. Projections are linear: those of the parts add up.

A reading whose boxes do not cover its global shape is not one of this tensor. Replicas that differ are a fault in
themselves, unless nothing says that a plain tensor is the same on all ranks: then the reading is dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .digest import NUM_BLOCKS, Digest
from .file import Line, RankFile, StepLines

Key = tuple[str, str, int, str]
"""Kind, module, call, and place of a tensor in a step."""


@dataclass(frozen=True)
class Whole:
    """A global tensor under one reading.

    Attributes:
        reading: as in `Line`.
        shape: of the tensor.
        digest: of the tensor.
        dtype: name of the dtype.
        terms: length of the longest sum of which an element is computed.
        placements: of the first rank.
        conflict: ranks whose replicas differ, as a text, or "".
        is_assumed: as in `Line`.
        lines: with the values of parts, if they were asked for.
    """

    reading: str
    shape: tuple[int, ...]
    digest: Digest
    dtype: str
    terms: int
    placements: str
    conflict: str
    is_assumed: bool
    lines: tuple[Line, ...]

    @property
    def has_bits(self) -> bool:
        """Whether the hashes are those of the tensor: not of a mean or a sum over parts of the batch."""
        return self.reading in ("rows", "flat", "whole")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def values(self) -> Tensor | None:
        """Return the values, if all parts have them."""
        if any(line.values is None for line in self.lines) or not self.has_bits:
            return None
        dtype = getattr(torch, self.dtype)
        found = torch.zeros(self.shape, dtype=dtype)
        for line in self.lines:
            part = torch.frombuffer(bytearray(line.values or b""), dtype=dtype).reshape(line.sizes)
            found[tuple(slice(o, o + s) for o, s in zip(line.offsets, line.sizes, strict=True))] = part
        return found


@dataclass
class MergedStep:
    """A step of a run on all ranks.

    Attributes:
        number: of the step.
        exact: number of blocks of exact mode, or None.
        is_complete: whether all of it was recorded, on every rank.
        tensors: the readings of each tensor, in the order of the program.
        incomplete: tensors of which some part is missing.
    """

    number: int
    exact: int | None
    is_complete: bool
    tensors: dict[Key, list[Whole]]
    incomplete: list[Key]


def merged_steps(files: Sequence[RankFile]) -> Iterator[MergedStep]:
    """Yield the steps that any rank has; a step that not every rank has is not complete."""
    streams = [file.steps() for file in files]
    current: list[StepLines | None] = [next(stream, None) for stream in streams]
    while any(step is not None for step in current):
        number = min(step.number for step in current if step is not None)
        here = [step if step is not None and step.number == number else None for step in current]
        yield _merged(number, here, [file.header.get("coords", {}).get("pp", 0) for file in files])
        current = [
            next(stream, None) if mine is not None else step
            for stream, mine, step in zip(streams, here, current, strict=True)
        ]


def _merged(number: int, steps: Sequence[StepLines | None], stages: Sequence[int]) -> MergedStep:
    lines: dict[Key, list[tuple[int, Line]]] = {}
    order: dict[Key, tuple[int, int, int]] = {}
    for rank, step in enumerate(steps):
        for line in step.lines if step is not None else ():
            key = (line.kind, line.module, line.call, line.tensor)
            lines.setdefault(key, []).append((rank, line))
            order[key] = min(order.get(key, (9, 0, 0)), _place(line, stages[rank]))
    tensors: dict[Key, list[Whole]] = {}
    incomplete = []
    for key in sorted(order, key=order.__getitem__):
        by_reading: dict[str, list[tuple[int, Line]]] = {}
        for rank, line in lines[key]:
            by_reading.setdefault(line.reading, []).append((rank, line))
        found = [whole for reading, each in by_reading.items() if (whole := _whole(reading, each)) is not None]
        if found:
            tensors[key] = found
        else:
            incomplete.append(key)
    present = [step for step in steps if step is not None]
    is_complete = len(present) == len(steps) and all(step.is_complete for step in present)
    return MergedStep(number, present[0].exact, is_complete, tensors, incomplete)


def _place(line: Line, stage: int) -> tuple[int, int, int]:
    """Return where in the program a line is: stage by stage in forward, and back in backward."""
    if line.kind.startswith("initial"):
        return 0, 0, line.order
    if line.kind in ("input", "output"):
        return 1, stage, line.order
    return (2, -stage, line.order) if line.kind == "output gradient" else (3, -stage, line.order)


def _whole(reading: str, lines: list[tuple[int, Line]]) -> Whole | None:
    first = lines[0][1]
    if any(line.shape != first.shape or line.dtype != first.dtype for _, line in lines):
        return None
    boxes: dict[tuple, list[tuple[int, Line]]] = {}
    for rank, line in lines:
        boxes.setdefault((line.offsets, line.sizes), []).append((rank, line))
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(first.shape):
        return None
    if reading in ("mean", "sum"):
        return _combined(reading, [[line for _, line in box] for box in boxes.values()])
    conflict = next(filter(None, map(_conflict, boxes.values())), "")
    is_assumed = any(line.is_assumed for _, line in lines)
    if conflict and is_assumed:
        return None
    kept = tuple(box[0][1] for box in boxes.values())
    total = functools.reduce(lambda a, b: a + b, (line.digest for line in kept))
    terms = max(line.terms for _, line in lines)
    return Whole(reading, first.shape, total, first.dtype, terms, first.placements, conflict, is_assumed, kept)


def _conflict(replicas: list[tuple[int, Line]]) -> str:
    rank, first = replicas[0]
    for other, line in replicas[1:]:
        if line.digest.hashes != first.digest.hashes:
            of = "two micro-batches" if other == rank else f"ranks {rank} and {other}"
            box = ", ".join(f"{o}:{o + s}" for o, s in zip(first.offsets, first.sizes, strict=True))
            return f"{of} hold different values of [{box}] (norms {first.digest.norm:.6g} and {line.digest.norm:.6g})"
    return ""


def _combined(reading: str, boxes: list[list[Line]]) -> Whole | None:
    """Return a mean or a sum of terms, of each of which equally many ranks have a replica."""
    first = boxes[0][0]
    if any(len(box) % line.num_terms for box in boxes for line in box):
        return None  # some terms were not recorded
    totals = [
        sum(line.digest.projections[block] * line.num_terms / len(box) for box in boxes for line in box)
        for block in range(NUM_BLOCKS)
    ]
    digest = Digest((0,) * NUM_BLOCKS, tuple(totals), tuple(total * total for total in totals))
    terms = max(line.terms for box in boxes for line in box) * max(map(len, boxes))
    text = f"{reading} over parts of the batch"
    return Whole(reading, first.shape, digest, first.dtype, terms, text, "", is_assumed=False, lines=(first,))
