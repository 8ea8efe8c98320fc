"""A folder of ``torch.distributed.checkpoint`` (DCP): one process reads what it has, all know it by a listing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._errors import CheckpointError, format_some
from .._format.boxes import Box
from .._format.dtypes import dtype_name
from .._format.layouts import Layout
from .._format.manifest import Manifest, StoredFile, StoredTensor, TensorMeta, renamed_name
from .._load.plan import is_under
from .._save.holdings import packed, unpacked
from .._state.flat import find_objects
from .._state.optimizer import NamedOptimizer, counts_parameters
from .._typed_json import Size
from .dcp_blobs import DcpFile, read_values
from .dcp_metadata import METADATA_NAME, Contents, Item, Place, read_contents
from .dcp_names import Named, name_items
from .dcp_state import int_keyed

logger = logging.getLogger("vescale.ckpt")


def require_pickle(where: Path, *, allow: bool) -> None:
    """Check that the user allows the pickle of a folder.

    Raises:
        CheckpointError: the user does not.
    """
    if not allow:
        raise CheckpointError(
            f"{where}: expected allow_pickle=True, got False: {METADATA_NAME} of a DCP folder is a "
            "pickle; pass it if you trust the folder (classes other than DCP's own are refused)"
        )


@dataclass(frozen=True)
class Chunks:
    """A tensor of the folder; ``rows`` has the file, offset, length, offsets and sizes of each chunk."""

    dtype: str
    shape: tuple[Size, ...]
    rows: str


@dataclass(frozen=True)
class Listing:
    """What a folder has: sizes of files, tensors and JSON values, by our names."""

    files: Mapping[str, Size]
    tensors: Mapping[str, Chunks]
    leaves: Mapping[str, Any]
    saved_at: float


@dataclass(frozen=True)
class Reading:
    """What one process reads of a folder, to load it into a state.

    Attributes:
        where: the folder.
        state: what is loaded.
        rename: as for ``load``.
        ignore: as for ``load``.
        strict: whether a value that cannot be read is an error, unless it is ignored.
    """

    where: Path
    state: Any
    rename: Mapping[str, str]
    ignore: Sequence[str]
    strict: bool

    def listing(self) -> Listing:
        """Read the metadata and the values that are no tensors."""
        contents = read_contents(self.where)
        try:
            integers = set(int_keyed(self.state))
            named = name_items(
                contents.items,
                _values(self.where, contents),
                self._groups,
                lambda path: renamed_name(path, self.rename) in integers,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.where}: {error}") from None
        self._refuse(named)
        index = {file: number for number, file in enumerate(contents.files)}
        tensors = {name: _chunks(item, index) for name, item in named.tensors.items()}
        return Listing(contents.files, tensors, named.leaves, contents.saved_at)

    def _refuse(self, named: Named) -> None:
        faults = {
            name: text
            for name, text in named.faults.items()
            if not is_under(renamed_name(name, self.rename), self.ignore)
        }
        listed = format_some([f"{name!r}: {text}" for name, text in faults.items()])
        if faults and self.strict:
            roots = sorted(renamed_name(name, self.rename) for name in faults)
            raise CheckpointError(
                f"{self.where}: expected values that a state can hold, got others: {listed}; to skip them, pass "
                f"ignore={roots[:5]!r}"
            )
        if faults:
            logger.warning("%s: %d values cannot be read, skipped: %s", self.where, len(faults), listed)

    def _groups(self, path: str) -> list[list[str]] | None:
        """Return the parameters of each group of the optimizer that will be loaded from a path of the folder."""
        own = renamed_name(f"{path}/param_groups", self.rename).removesuffix("/param_groups")
        found = dict(find_objects(self.state)).get(own)
        if found is None or not counts_parameters(found.state_dict()):
            return None
        return NamedOptimizer.of(found, own, self.state).groups()


class Folder:
    """A folder by its listing: the manifest, and the place of each piece."""

    def __init__(self, where: Path, listing: Listing, rename: Mapping[str, str]) -> None:
        self._where, self._files = where, list(listing.files)
        self._tables = {
            name: unpacked(own.rows).reshape(-1, 3 + 2 * len(own.shape)) for name, own in listing.tensors.items()
        }
        layouts: dict[tuple, Layout] = {}
        tensors = {}
        for name, own in listing.tensors.items():
            files, offsets, sizes = _columns(self._tables[name], len(own.shape))
            key = own.shape, files.tobytes(), offsets.tobytes(), sizes.tobytes()
            if key not in layouts:
                layouts[key] = Layout.of_table(own.shape, files, offsets, sizes)
            tensors[name] = StoredTensor(TensorMeta(own.dtype, own.shape), layouts[key])
        files_of = {name: StoredFile(num_bytes, 0) for name, num_bytes in listing.files.items()}
        manifest = Manifest(max(1, len(files_of)), listing.saved_at, {}, listing.leaves, "", files_of, tensors)
        try:
            self.manifest = manifest.renamed(rename)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def check(self) -> None:
        """Check that the chunks of each tensor tile it.

        Raises:
            CheckpointError: they do not; the text names a tensor.
        """
        checked_layouts = set()
        for name, tensor in self.manifest.tensors.items():
            layout = tensor.layout
            if id(layout) in checked_layouts:
                continue
            checked_layouts.add(id(layout))
            inside = all(run.lies_in(layout.shape) for run in layout.runs)
            fault = layout.fault() if inside else "chunks outside of it"
            if fault is not None:
                raise CheckpointError(
                    f"{self._where}: expected chunks that tile tensor {name!r}, global shape {layout.shape}, got "
                    f"{fault}; use another checkpoint"
                )

    def open_file(self, file: str) -> DcpFile:
        """Open a data file."""
        number = self._files.index(file)
        return DcpFile(self._where / file, lambda name, box: self._place(number, name, box))

    def _place(self, number: int, name: str, box: Box) -> Place:
        table = self._tables[self.manifest.tensors[name].key or name]
        files, offsets, _ = _columns(table, len(box.offsets))
        (row,) = ((files == number) & (offsets == np.array(box.offsets, np.int64)).all(1)).nonzero()[0].tolist()
        return Place(self._files[number], int(table[row, 1]), int(table[row, 2]))


def _columns(table: np.ndarray, num_dims: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return files, offsets and sizes of chunks."""
    return table[:, 0], table[:, 3 : 3 + num_dims], table[:, 3 + num_dims :]


def _chunks(item: Item, index: Mapping[str, int]) -> Chunks:
    assert item.dtype is not None
    rows: list[int] = []
    for box, place in item.chunks:
        rows += [index[place.file], place.offset, place.length, *box.offsets, *box.sizes]
    return Chunks(dtype_name(item.dtype), item.shape, packed(rows))


def _values(where: Path, contents: Contents) -> dict[str, Any]:
    """Return what is stored under the keys that are no tensors, file by file."""
    by_file: dict[str, list[tuple[str, Place]]] = {}
    for item in contents.items:
        if item.place is not None:
            by_file.setdefault(item.place.file, []).append((item.key, item.place))
    found: dict[str, Any] = {}
    for file, own in by_file.items():
        values = read_values(where / file, [place for _, place in own])
        found.update(zip([key for key, _ in own], values, strict=True))
    return found
