"""The manifest: the contents of a checkpoint, as frozen dataclasses and as the text of ``manifest.json``.

A checkpoint is a directory of safetensors files and one manifest with these keys:

    format, version    the name "vescale-checkpoint" and the version of this layout
    crc32              CRC-32 of all other keys, so that a changed offset or learning rate is detected
    world_size         number of ranks that saved
    saved_at           when the save ended, in seconds since 1970 by the clock of its first rank
    metadata           the JSON object of ``save(metadata=...)``
    leaves             name -> JSON value
    folder             name of the folder of the data files
    files              data file -> bytes, and the CRC-32 of its header
    optimizers         path of an optimizer -> name of its class
    tensors            name -> dtype, global shape, pieces; a piece is a box (offsets, sizes) with its file and its key
                       in the file

The pieces of a tensor tile its global shape exactly once; every read of a manifest checks this. Nothing is pickled. The
JSON dialect is Python's: ``Infinity`` and ``NaN`` are valid numbers.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from .._errors import CheckpointError
from .._typed_json import AtLeast, JsonReader, Size
from .boxes import Box, describe_coverage_fault
from .dtypes import ITEM_BYTES

FORMAT = "vescale-checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"
FOLDER_NAME = re.compile("save-[0-9a-f]{8}")

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The global metadata of a tensor.

    Attributes:
        dtype: torch's name without the prefix, such as ``"bfloat16"``. It is empty for a tensor without a dtype on a
            rank that holds none of its elements, but never in a manifest.
        shape: global shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored box of one tensor.

    Attributes:
        box: the box in the global tensor.
        file: name of the safetensors file, in the checkpoint's folder of data files.
        key: name of the tensor in that file.
    """

    box: Box
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file of a checkpoint.

    Attributes:
        num_bytes: its size.
        header_crc32: CRC-32 of its header, which has the checksums of the data.
    """

    num_bytes: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its metadata and the pieces that tile it."""

    meta: TensorMeta
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        world_size: number of ranks that saved.
        saved_at: when the save ended, in seconds since 1970 by the clock of its first rank.
        metadata: the JSON object of ``save(metadata=...)``.
        leaves: JSON values by name, such as ``"optimizer/param_groups"``.
        folder: name of the folder of the data files, in the checkpoint's directory.
        files: data files by name.
        tensors: stored tensors by name, such as ``"model/embed.weight"``.
        optimizers: class names by path, such as ``{"optimizer": "AdamW"}``.
    """

    world_size: int
    saved_at: float
    metadata: Mapping[str, Json]
    leaves: Mapping[str, Json]
    folder: str
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    optimizers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _PieceText:
    """A piece in ``manifest.json``."""

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]
    file: str
    key: str

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"expected as many offsets as sizes, got {self.offsets} and {self.sizes}")


@dataclass(frozen=True)
class _FileText:
    """A data file in ``manifest.json``."""

    bytes: Size
    header_crc32: str

    def __post_init__(self) -> None:
        _check_crc(self.header_crc32)


@dataclass(frozen=True)
class _TensorText:
    """A tensor in ``manifest.json``."""

    dtype: str
    shape: tuple[Size, ...]
    pieces: tuple[_PieceText, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"expected a dtype of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")


@dataclass(frozen=True)
class _Body:
    """The keys of ``manifest.json``."""

    format: str
    version: int
    crc32: str
    world_size: Annotated[int, AtLeast(1)]
    saved_at: float
    metadata: Mapping[str, Any]
    leaves: Mapping[str, Any]
    folder: str
    files: Mapping[str, _FileText]
    tensors: Mapping[str, _TensorText]
    optimizers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_crc(self.crc32)
        if not FOLDER_NAME.fullmatch(self.folder):
            raise ValueError(f"expected the name of a folder such as 'save-1f0c22ab', got {self.folder!r}")
        for name in self.files:
            if not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(f"expected names of files in the checkpoint's folder, got {name!r}")


def _check_crc(text: str) -> None:
    if not re.fullmatch("[0-9a-f]{8}", text):
        raise ValueError(f"expected a checksum of 8 hexadecimal digits, got {text!r}")


def manifest_to_text(manifest: Manifest) -> str:
    """Return a manifest as JSON text with one tensor, leaf or file per line."""
    body = _to_body(manifest)
    sections = [f"{json.dumps(key)}: {_dump_section(value)}" for key, value in body.items()]
    sections.insert(2, f'"crc32": "{_crc_of(body)}"')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def manifest_from_text(text: str, *, where: str) -> Manifest:
    """Parse and check a manifest.

    Args:
        text: contents of ``manifest.json``.
        where: the checkpoint's path, for messages.

    Raises:
        CheckpointError: the text is not a manifest of a supported version, has a value of another type, was changed
            after it was written, or has a tensor that its pieces do not tile.
    """
    reader = JsonReader(
        f"{where}: {MANIFEST_NAME}", "it was cut or changed, so use another checkpoint", CheckpointError
    )
    tree = reader.parse(text)
    reader.expect(tree, "format", FORMAT, fix="pass a directory of vescale.ckpt.save")
    reader.expect(tree, "version", VERSION, fix="load it with the vescale-ckpt release that wrote it")
    body = reader.read(tree, _Body)
    try:
        found = _crc_of({key: value for key, value in tree.items() if key != "crc32"})
    except RecursionError:
        raise CheckpointError(
            f"{where}: {MANIFEST_NAME}: expected fewer levels of lists and objects; it was changed, so use another "
            "checkpoint"
        ) from None
    if body.crc32 != found:
        raise CheckpointError(
            f"{where}: expected checksum {body.crc32} of {MANIFEST_NAME}, got {found}; it was changed after the save, "
            "so use another checkpoint"
        )
    manifest = _from_body(body)
    _check_pieces(manifest, where)
    return manifest


def folder_of(text: str) -> str | None:
    """Return the folder that a manifest names, or None if it names none; for saves beside this one.

    Raises:
        CheckpointError: it is not JSON.
    """
    tree = JsonReader(MANIFEST_NAME, "use another checkpoint", CheckpointError).parse(text)
    folder = tree.get("folder") if isinstance(tree, dict) else None
    return folder if isinstance(folder, str) and FOLDER_NAME.fullmatch(folder) else None


def _to_body(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": manifest.world_size,
        "saved_at": manifest.saved_at,
        "metadata": dict(manifest.metadata),
        "leaves": dict(manifest.leaves),
        "folder": manifest.folder,
        "files": {
            name: {"bytes": file.num_bytes, "header_crc32": f"{file.header_crc32:08x}"}
            for name, file in manifest.files.items()
        },
        "optimizers": dict(manifest.optimizers),
        "tensors": {name: _tensor_to_json(tensor) for name, tensor in manifest.tensors.items()},
    }


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    pieces = [
        {
            "offsets": list(piece.box.offsets),
            "sizes": list(piece.box.sizes),
            "file": piece.file,
            "key": piece.key,
        }
        for piece in tensor.pieces
    ]
    return {"dtype": tensor.meta.dtype, "shape": list(tensor.meta.shape), "pieces": pieces}


def _from_body(body: _Body) -> Manifest:
    tensors = {name: _tensor_from_json(tensor) for name, tensor in body.tensors.items()}
    files = {name: StoredFile(file.bytes, int(file.header_crc32, 16)) for name, file in body.files.items()}
    return Manifest(
        body.world_size, body.saved_at, body.metadata, body.leaves, body.folder, files, tensors, body.optimizers
    )


def _tensor_from_json(tensor: _TensorText) -> StoredTensor:
    pieces = tuple(Piece(Box(p.offsets, p.sizes), p.file, p.key) for p in tensor.pieces)
    return StoredTensor(TensorMeta(tensor.dtype, tensor.shape), pieces)


def _check_pieces(manifest: Manifest, where: str) -> None:
    """Check that pieces tile their tensors, and that their files are large enough: nothing is allocated before."""
    left = {name: file.num_bytes for name, file in manifest.files.items()}
    for name, tensor in manifest.tensors.items():
        fault = describe_coverage_fault(tensor.meta.shape, [piece.box for piece in tensor.pieces])
        if fault is not None:
            raise CheckpointError(
                f"{where}: expected pieces that tile tensor {name!r}, global shape {tensor.meta.shape}, got {fault}; "
                "use another checkpoint"
            )
        for piece in tensor.pieces:
            if piece.file not in manifest.files:
                raise CheckpointError(
                    f"{where}: expected the file of tensor {name!r} in the list of files, got {piece.file!r}; "
                    "use another checkpoint"
                )
            left[piece.file] -= piece.box.num_elements * ITEM_BYTES[tensor.meta.dtype]
            if left[piece.file] < 0:
                raise CheckpointError(
                    f"{where}: expected pieces that fit in data file {piece.file!r} of "
                    f"{manifest.files[piece.file].num_bytes} bytes, got more with tensor {name!r}; use another "
                    "checkpoint"
                )


def _dump_section(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _crc_of(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(canonical.encode()):08x}"
