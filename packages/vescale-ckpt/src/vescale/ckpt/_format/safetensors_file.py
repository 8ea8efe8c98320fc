"""The safetensors format: open a file, and read its header with no trust in what it says.

8 bytes of header length (little-endian), a JSON header with dtype, shape and byte range of every tensor, the bytes. The
ranges follow each other without gaps up to the end of the file; nothing is allocated before that is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from .._typed_json import JsonReader, Size
from .dtypes import ITEM_BYTES, SAFETENSORS_CODES
from .storage import open_to_read

MAX_HEADER_BYTES = 100_000_000  # of the safetensors format
METADATA = "__metadata__"
#: code of the format -> torch's name
DTYPES = {code: name for name, code in SAFETENSORS_CODES.items()}

#: Makes an error from what was expected and what was got.
Fault = Callable[[str], CheckpointError]


@dataclass(frozen=True)
class _Row:
    """A tensor in a header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"expected a dtype of {', '.join(DTYPES)}, got {self.dtype!r}")
        num_bytes = math.prod(self.shape) * ITEM_BYTES[DTYPES[self.dtype]]
        if len(self.data_offsets) != 2 or self.data_offsets[1] - self.data_offsets[0] != num_bytes:
            raise ValueError(f"expected a range of {num_bytes} bytes, got {list(self.data_offsets)}")


_ROWS: Any = Mapping[str, _Row]


@dataclass(frozen=True)
class InFile:
    """A tensor in a file: its code of the format, its shape, and the bytes of the file that it has."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def open_regular(path: Path, fault: Fault) -> tuple[Any, int]:
    """Open a regular file to read; return it and its size. A link is not followed.

    Raises:
        CheckpointError: it cannot be opened, or is of another kind.
    """
    try:
        return open_to_read(path)
    except OSError as error:
        raise fault(f"a data file, got {error.strerror or type(error).__name__}") from error


def read_at(file: Any, start: int, memory: memoryview) -> int:
    """Read from a position, until the memory is full or the file ends, and return the number of bytes."""
    file.seek(start)
    count = 0
    while count < len(memory) and (step := file.readinto(memory[count:])):
        count += step
    return count


def read_header(file: Any, num_bytes: int, fault: Fault) -> bytes:
    """Return the length and the text of the header of a file of ``num_bytes`` bytes.

    Raises:
        CheckpointError: the header is longer than the file.
    """
    length = int.from_bytes(file.read(8) or b"", "little")
    if length > min(MAX_HEADER_BYTES, num_bytes - 8):
        raise fault(f"a header inside the file, got one of {length} bytes")
    header = bytearray(8 + length)
    read_at(file, 0, memoryview(header))
    return bytes(header)


def parse_header(header: bytes, num_bytes: int, reader: JsonReader, fault: Fault) -> tuple[Any, dict[str, InFile]]:
    """Return the tree of the metadata, None if there is none, and the tensors of a file in the order of their bytes.

    Raises:
        CheckpointError: the header is not one of such a file.
    """
    try:
        tree = reader.parse(header[8:].decode())
    except UnicodeDecodeError as error:
        raise fault(f"a header of UTF-8 text, got {error}") from None
    metadata = tree.pop(METADATA, None) if isinstance(tree, dict) else None
    rows = reader.read(tree, _ROWS)
    tensors, end = {}, 0
    for key, row in sorted(rows.items(), key=lambda item: item[1].data_offsets):
        start, following = row.data_offsets
        if start != end:
            raise fault(f"tensors without gaps or overlaps, got {key!r} at byte {start} after {end}")
        tensors[key] = InFile(row.dtype, row.shape, len(header) + start, len(header) + following)
        end = following
    if len(header) + end != num_bytes:
        raise fault(f"{len(header) + end} bytes by the header, got {num_bytes}")
    return metadata, tensors
