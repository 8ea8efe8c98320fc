"""The manifest: the contents of a checkpoint, as frozen dataclasses and as the text of ``manifest.json``.

A checkpoint is a directory of safetensors files and one manifest with these keys:

    format, version    the name "vescale-checkpoint" and the version of this layout
    crc32              CRC-32 of all other keys, so that a changed offset or learning rate is detected
    world_size         number of ranks that saved
    saved_at           when the save ended, in seconds since 1970 by the clock of its first rank
    metadata           the JSON object of ``save(metadata=...)``
    leaves             name -> JSON value
    folder             name of the folder of the data files
    files              a list of data files: name, bytes, and the CRC-32 of the header
    optimizers         path of an optimizer -> name of its class
    layouts            a list of global shapes with the boxes of their pieces, and the file of each (``layouts.py``)
    tensors            name -> dtype, and the index of a layout

The pieces of a tensor tile its global shape exactly once; every read of a checkpoint checks this. Nothing is pickled.
The JSON dialect is Python's: ``Infinity`` and ``NaN`` are valid numbers.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import numpy as np

from .._errors import CheckpointError, format_some
from .._typed_json import AtLeast, JsonReader, Size
from .boxes import Box
from .dtypes import ITEM_BYTES
from .layouts import Layout, Run

FORMAT = "vescale-checkpoint"
VERSION = 3
MANIFEST_NAME = "manifest.json"
_LEAST_BYTES = 64  # of a piece and its row in a header, which needs more than a piece in memory
_OTHER = "use another checkpoint"
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
    """A tensor of a checkpoint.

    Attributes:
        meta: dtype and global shape.
        layout: where the pieces are that tile it.
        key: its name in the data files, if that is another one.
    """

    meta: TensorMeta
    layout: Layout
    key: str = ""


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

    def pieces(self, name: str, *, box: Box | None = None) -> Iterator[Piece]:
        """Yield the pieces of a tensor, or those that share elements with a box."""
        tensor, files = self.tensors[name], tuple(self.files)
        layout = tensor.layout
        for file, own in layout.overlaps(Box.full(layout.shape) if box is None else box):
            yield Piece(own, files[file], key_of(tensor.key or name, own, layout.shape))

    def renamed(self, prefixes: Mapping[str, str]) -> Manifest:
        """Return the manifest with other names: of the prefixes that a name begins with, the longest is replaced.

        Raises:
            CheckpointError: two values get one name, or a prefix is that of no name.
        """
        tables = (self.tensors, self.leaves, self.optimizers)
        new = {name: renamed_name(name, prefixes) for name in dict.fromkeys(itertools.chain(*tables))}
        if unused := [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in new)]:
            raise CheckpointError(
                f"expected beginnings of stored names in rename, got {format_some(map(repr, unused))}; the names are "
                f"{format_some(map(repr, new))}"
            )
        found: dict[str, str] = {}
        for name, own in new.items():
            if (other := found.setdefault(own, name)) != name:
                raise CheckpointError(
                    f"expected distinct names after rename, got {own!r} for {other!r} and {name!r}; rename one of them "
                    "to another name"
                )
        tensors = {new[name]: replace(tensor, key=tensor.key or name) for name, tensor in self.tensors.items()}
        leaves = {new[name]: value for name, value in self.leaves.items()}
        optimizers = {new[name]: kind for name, kind in self.optimizers.items()}
        return replace(self, tensors=tensors, leaves=leaves, optimizers=optimizers)


def renamed_name(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the longest prefix that it begins with replaced."""
    prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)


def key_of(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the name of a piece in its file: that of the tensor, with the box unless it is all of the tensor."""
    return name if box == Box.full(shape) else f"{name}{box}"


@dataclass(frozen=True)
class _FileText:
    """A data file in ``manifest.json``."""

    name: str
    bytes: Size
    header_crc32: str

    def __post_init__(self) -> None:
        _check_crc(self.header_crc32)
        if not re.fullmatch(r"[\w-][\w.-]*", self.name):
            raise ValueError(f"expected names of files in the checkpoint's folder, got {self.name!r}")


@dataclass(frozen=True)
class _TensorText:
    """A tensor in ``manifest.json``."""

    dtype: str
    layout: Size

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
    files: tuple[_FileText, ...]
    layouts: tuple[Layout, ...]
    tensors: Mapping[str, _TensorText]
    optimizers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_crc(self.crc32)
        if not FOLDER_NAME.fullmatch(self.folder):
            raise ValueError(f"expected the name of a folder such as 'save-1f0c22ab', got {self.folder!r}")
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("expected distinct names of files, got one twice")
        used = {tensor.layout for tensor in self.tensors.values()}
        if used != set(range(len(self.layouts))):
            raise ValueError(f"expected tensors of each of {len(self.layouts)} layouts, got {sorted(used)}")
        for layout in self.layouts:
            if not all(run.lies_in(layout.shape) for run in layout.runs):
                raise ValueError(f"expected boxes inside of the global shape {layout.shape}, got others")
            if not all(run.has_files(len(self.files)) for run in layout.runs):
                raise ValueError(f"expected boxes in the list of {len(self.files)} files, got others")


def _check_crc(text: str) -> None:
    if not re.fullmatch("[0-9a-f]{8}", text):
        raise ValueError(f"expected a checksum of 8 hexadecimal digits, got {text!r}")


def manifest_to_text(manifest: Manifest) -> str:
    """Return a manifest as JSON text with one tensor, layout, leaf or file per line."""
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
        CheckpointError: the text is not a manifest of a supported version, has a value of another type, or was changed
            after it was written. `check_pieces` checks more.
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
    return _from_body(body)


def folder_of(text: str) -> str | None:
    """Return the folder that a manifest names, or None if it names none; for saves beside this one.

    Raises:
        CheckpointError: it is not JSON.
    """
    tree = JsonReader(MANIFEST_NAME, "use another checkpoint", CheckpointError).parse(text)
    folder = tree.get("folder") if isinstance(tree, dict) else None
    return folder if isinstance(folder, str) and FOLDER_NAME.fullmatch(folder) else None


def _to_body(manifest: Manifest) -> dict[str, Any]:
    layouts: dict[Layout, int] = {}
    for tensor in manifest.tensors.values():
        layouts.setdefault(tensor.layout, len(layouts))
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": manifest.world_size,
        "saved_at": manifest.saved_at,
        "metadata": dict(manifest.metadata),
        "leaves": dict(manifest.leaves),
        "folder": manifest.folder,
        "files": [
            {"name": name, "bytes": file.num_bytes, "header_crc32": f"{file.header_crc32:08x}"}
            for name, file in manifest.files.items()
        ],
        "optimizers": dict(manifest.optimizers),
        "layouts": [_layout_to_json(layout) for layout in layouts],
        "tensors": {
            name: {"dtype": tensor.meta.dtype, "layout": layouts[tensor.layout]}
            for name, tensor in manifest.tensors.items()
        },
    }


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    return {"shape": layout.shape, "runs": [_run_to_json(run) for run in layout.runs]}


def _run_to_json(run: Run) -> dict[str, Any]:
    loops = [{"count": loop.count, "file": loop.file, "offsets": loop.offsets} for loop in run.loops]
    return {"file": run.file, "offsets": run.offsets, "sizes": run.sizes} | ({"loops": loops} if loops else {})


def _from_body(body: _Body) -> Manifest:
    tensors = {
        name: StoredTensor(TensorMeta(tensor.dtype, body.layouts[tensor.layout].shape), body.layouts[tensor.layout])
        for name, tensor in body.tensors.items()
    }
    files = {file.name: StoredFile(file.bytes, int(file.header_crc32, 16)) for file in body.files}
    return Manifest(
        body.world_size, body.saved_at, body.metadata, body.leaves, body.folder, files, tensors, body.optimizers
    )


def check_pieces(manifest: Manifest, where: str) -> None:
    """Check that pieces tile their tensors and fit in their files, whose sizes have been compared with those on disk.

    No more memory is allocated than these files have.

    Raises:
        CheckpointError: they do not; the text names a tensor.
    """
    tensor_of = {id(tensor.layout): (name, tensor.layout) for name, tensor in manifest.tensors.items()}
    most = sum(file.num_bytes for file in manifest.files.values()) // _LEAST_BYTES
    if (count := sum(layout.num_pieces for _, layout in tensor_of.values())) > most:
        raise CheckpointError(f"{where}: expected at most {most} pieces in its data files, got {count}; {_OTHER}")
    for name, layout in tensor_of.values():
        if (fault := layout.fault()) is not None:
            raise CheckpointError(
                f"{where}: expected pieces that tile tensor {name!r}, global shape {layout.shape}, got {fault}; "
                f"{_OTHER}"
            )
    sizes = [file.num_bytes for file in manifest.files.values()]
    left = np.array(sizes, dtype=np.float64)  # which holds larger numbers than 64-bit integers
    for name, tensor in manifest.tensors.items():
        for files, elements in tensor.layout.elements_by_file():
            np.subtract.at(left, files, float(elements * ITEM_BYTES[tensor.meta.dtype]))
            if (short := (left < 0).nonzero()[0]).size:
                file = tuple(manifest.files)[short[0]]
                raise CheckpointError(
                    f"{where}: expected pieces that fit in data file {file!r} of {sizes[short[0]]} bytes, got more "
                    f"with tensor {name!r}; {_OTHER}"
                )


def _dump_section(value: Any) -> str:
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _crc_of(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(canonical.encode()):08x}"
