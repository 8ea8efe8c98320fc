"""Compare two checkpoints by names and global tensors, whatever layouts they were saved under."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .._checked import FilePath, checked
from .._format.boxes import Box
from .._format.data_files import BLOCK_BYTES, DataFile
from .._format.dtypes import ITEM_BYTES
from .._format.inspect import manifest_at
from .._format.manifest import Manifest, Piece, StoredTensor
from .._format.storage import place_of
from .plan import plan_load

_MOST_OPEN = 8  # files of a checkpoint; an open one keeps its header and one block


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints.

    Attributes:
        name: of the tensor or plain value.
        text: what the first has, and what the second has.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@checked
def diff(path: FilePath, other: FilePath) -> list[Difference]:
    """Compare two checkpoints: tensors bit for bit, plain values, classes of optimizers.

    Layouts do not count: checkpoints of the same state from 1 rank and from 8 ranks are equal. Not a collective; call
    it in one process. All bytes are read and compared with their checksums; memory is bounded.

    Args:
        path: directory that ``save`` made.
        other: another one.

    Returns:
        The differences, by name; empty if there are none.

    Raises:
        CheckpointError: one of them is not a complete checkpoint, or its bytes were changed.

    Example:
        >>> save("runs/step-10", {"weight": torch.zeros(2), "step": 10}, overwrite=True)
        >>> save("runs/step-11", {"weight": torch.ones(2), "step": 11}, overwrite=True)
        >>> for difference in diff("runs/step-10", "runs/step-11"):
        ...     print(difference)
        step: 10 and 11
        weight: 2 of 2 elements differ, by at most 1
    """
    return list(differences(place_of(path), place_of(other), lambda _: None))


def differences(path: Path, other: Path, progress: Callable[[int], None]) -> Iterator[Difference]:
    """Yield the differences; ``progress`` is told of bytes of tensors that were compared."""
    left, right = Stored(path), Stored(other)
    with left, right:
        yield from _plain_differences(left.manifest, right.manifest)
        ours, theirs = left.manifest.tensors, right.manifest.tensors
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                yield Difference(name, _only(name in ours, _described(ours.get(name) or theirs[name])))
            elif ours[name].meta != theirs[name].meta:
                yield Difference(name, f"{_described(ours[name])} and {_described(theirs[name])}")
            elif (text := _values_differ(name, left, right, progress)) is not None:
                yield Difference(name, text)


def _plain_differences(left: Manifest, right: Manifest) -> Iterator[Difference]:
    ours = {**left.leaves, **{f"{path} (optimizer)": kind for path, kind in left.optimizers.items()}}
    theirs = {**right.leaves, **{f"{path} (optimizer)": kind for path, kind in right.optimizers.items()}}
    for name in sorted({*ours, *theirs}):
        texts = [json.dumps(table[name], sort_keys=True) for table in (ours, theirs) if name in table]
        if len(texts) == 1:
            yield Difference(name, _only(name in ours, _short(texts[0])))
        elif texts[0] != texts[1]:
            yield Difference(name, f"{_short(texts[0])} and {_short(texts[1])}")


def _values_differ(name: str, left: Stored, right: Stored, progress: Callable[[int], None]) -> str | None:
    """Return how the values of a tensor differ, or None if all of their bits are equal."""
    meta, count, largest = left.manifest.tensors[name].meta, 0, 0.0
    total, limit = 0, BLOCK_BYTES // ITEM_BYTES[meta.dtype]
    pieces = {piece.box: piece for piece in left.manifest.pieces(name)}
    for reads in plan_load({name: list(pieces)}, right.manifest).values():
        for read in reads:
            for box in cut(read.box, limit):
                mine, theirs = left.values(name, pieces[read.into], box), right.values(name, read.piece, box)
                size = mine.element_size()
                bits = (each.view(-1).view(torch.uint8).view(-1, size) for each in (mine, theirs))
                differs = torch.ne(*bits).any(1)
                if number := int(differs.sum()):
                    count += number
                    apart = _numbers(mine)[differs] - _numbers(theirs)[differs]
                    largest = max(largest, float(apart.abs().nan_to_num(nan=float("inf")).max()))
                total += mine.numel()
                progress(mine.numel() * size)
    if not count:
        return None
    return f"{count} of {total} elements differ, by at most {largest:.6g}"


def _numbers(values: torch.Tensor) -> torch.Tensor:
    flat = values.view(-1)
    return flat.to(torch.complex128 if values.is_complex() else torch.float64)


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into parts of at most ``limit`` elements, along its first dims."""
    if box.num_elements <= limit:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    half = box.sizes[dim] // 2
    yield from cut(box.rows(dim, 0, half), limit)
    yield from cut(box.rows(dim, half, box.sizes[dim]), limit)


class Stored:
    """A checkpoint whose values are read box by box."""

    def __init__(self, where: Path) -> None:
        self.manifest = manifest_at(where)
        self._where = where
        self._open: OrderedDict[str, DataFile] = OrderedDict()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.__exit__(*error)

    def values(self, name: str, piece: Piece, box: Box) -> torch.Tensor:
        """Return the values of a box in a piece."""
        dtype = self.manifest.tensors[name].meta.dtype
        values = torch.empty(box.sizes, dtype=getattr(torch, dtype))
        self._file(piece.file).fill(values, piece, box, name=name, dtype=dtype)
        return values

    def _file(self, name: str) -> DataFile:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.popitem(last=False)[1].__exit__()
            self._open[name] = DataFile(self._where / self.manifest.folder / name, self.manifest.files[name])
        self._open.move_to_end(name)
        return self._open[name]


def _only(is_first: bool, what: str) -> str:
    return f"{what} in the first only" if is_first else f"{what} in the second only"


def _described(tensor: StoredTensor) -> str:
    return f"{tensor.meta.dtype} {list(tensor.meta.shape)}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
