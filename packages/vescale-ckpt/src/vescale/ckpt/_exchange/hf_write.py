"""Files to write: their headers, which follow from names, dtypes and shapes, and writes of a box into one."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from .._errors import CheckpointError
from .._format.boxes import Box
from .._format.data_files import BLOCK_BYTES, bytes_of, pack_files, resolved
from .._format.dtypes import ITEM_BYTES, SAFETENSORS_CODES
from .._format.manifest import TensorMeta
from .._format.safetensors_file import METADATA
from .._format.strided import Part
from .hf_files import INDEX, SINGLE, Region


@dataclass(frozen=True)
class NewFile:
    """A file to write.

    Attributes:
        name: of the complete file.
        header: its first bytes.
        num_bytes: its size.
        starts: the first byte of each tensor.
    """

    name: str
    header: bytes
    num_bytes: int
    starts: Mapping[str, int]


def plan_files(tensors: Mapping[str, TensorMeta], max_bytes: int) -> tuple[list[NewFile], str | None]:
    """Return the files of a folder, and the text of its index; one file needs none.

    Args:
        tensors: of the files, in order.
        max_bytes: of the tensors in a file, unless it has a single one.

    Raises:
        CheckpointError: a dtype that the format has not.
    """
    for name, meta in tensors.items():
        if meta.dtype not in SAFETENSORS_CODES:
            raise CheckpointError(
                f"tensor {name!r}: expected a dtype of {', '.join(SAFETENSORS_CODES)}, got {meta.dtype}; store real "
                "and imaginary parts"
            )
    keys, sizes = list(tensors), {name: _num_bytes(meta) for name, meta in tensors.items()}
    runs = pack_files([sizes[key] for key in keys], max_bytes=max_bytes) or [range(0)]
    files = []
    for number, run in enumerate(runs):
        name = SINGLE if len(runs) == 1 else f"model-{number + 1:05}-of-{len(runs):05}.safetensors"
        files.append(_new_file(name, {key: tensors[key] for key in keys[run.start : run.stop]}))
    if len(files) == 1:
        return files, None
    weight_map = {key: file.name for file in files for key in sorted(file.starts)}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    return files, json.dumps(index, indent=2) + "\n"


def final_names(files: list[NewFile]) -> list[str]:
    """Return the names of the files in the order in which they appear: what makes the folder complete is the last."""
    return [file.name for file in files] + ([INDEX] if len(files) > 1 else [])


def write_box(handle: int, values: torch.Tensor, region: Region, piece: Box, box: Box) -> None:
    """Write the values of ``box``, a part of the block ``piece`` at ``region``; the copy on the CPU is bounded."""
    starts = tuple(a - b for a, b in zip(box.offsets, piece.offsets, strict=True))
    for part, own in _cut(Part(starts, box.sizes, region.strides), values):
        host = resolved(own).cpu().contiguous()
        memory, size = bytes_of(host), host.element_size()
        at = 0
        for first, length in _runs(part):
            _write(handle, memory[at * size : (at + length) * size], region.start + first * size)
            at += length


def _new_file(name: str, tensors: Mapping[str, TensorMeta]) -> NewFile:
    # wide elements first: every tensor then starts at a multiple of its element size
    ordered = sorted(tensors, key=lambda key: -ITEM_BYTES[tensors[key].dtype])
    ends = list(itertools.accumulate((_num_bytes(tensors[key]) for key in ordered), initial=0))
    rows: dict[str, object] = {METADATA: {"format": "pt"}}
    for key, (start, end) in zip(ordered, itertools.pairwise(ends), strict=True):
        if key == METADATA:
            raise CheckpointError(f"expected another name than {METADATA!r}, which the format uses; rename it")
        meta = tensors[key]
        rows[key] = {"dtype": SAFETENSORS_CODES[meta.dtype], "shape": meta.shape, "data_offsets": [start, end]}
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % max(ITEM_BYTES.values()))
    header = len(text).to_bytes(8, "little") + text
    starts = {key: len(header) + end for key, end in zip(ordered, ends, strict=False)}
    return NewFile(name, header, len(header) + ends[-1], starts)


def _num_bytes(meta: TensorMeta) -> int:
    return Box.full(meta.shape).num_elements * ITEM_BYTES[meta.dtype]


def _cut(part: Part, values: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    if values.numel() * values.element_size() <= BLOCK_BYTES:
        yield part, values
        return
    for half, dim, start, size in part.halves():
        yield from _cut(half, values.narrow(dim, start, size))


def _runs(part: Part) -> Iterator[tuple[int, int]]:
    """Yield the first element and the length of runs without gaps that make up a part, in row-major order."""
    length, outer = 1, len(part.sizes)
    while outer and (part.sizes[outer - 1] == 1 or part.strides[outer - 1] == length):
        outer -= 1
        length *= part.sizes[outer]
    for index in itertools.product(*map(range, part.sizes[:outer])):
        yield part.first + sum(i * stride for i, stride in zip(index, part.strides, strict=False)), length


def _write(handle: int, data: memoryview, start: int) -> None:
    while data:
        count = os.pwrite(handle, data, start)
        data, start = data[count:], start + count
