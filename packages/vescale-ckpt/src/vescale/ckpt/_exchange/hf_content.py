"""What is where in the files of a folder, in the form in which ranks send it: a table of integers for each tensor.

A row is a block of a tensor: the index of its file, the byte of its first value, its offsets and sizes, and the stride
of each dim in the file, in elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._format.boxes import Box
from .._format.dtypes import ITEM_BYTES
from .._format.layouts import Layout
from .._format.manifest import Manifest, StoredFile, StoredTensor, TensorMeta, key_of
from .._save.holdings import packed, unpacked
from .._typed_json import Size
from .hf_files import Region
from .hf_links import Link


@dataclass(frozen=True)
class Content:
    """What a folder holds of a module.

    Attributes:
        files: bytes of each file, by name.
        tensors: dtypes and shapes, by the module's names.
        tables: the rows of each.
    """

    files: Mapping[str, Size]
    tensors: Mapping[str, TensorMeta]
    tables: Mapping[str, str]

    @classmethod
    def of(
        cls,
        files: Mapping[str, int],
        tensors: Mapping[str, TensorMeta],
        links: Iterable[Link],
        places: Mapping[str, tuple[int, int]],
    ) -> Content:
        """Return the content by links; ``places`` has the index of the file and the first byte of tensors of files."""
        rows: dict[str, list[int]] = {name: [] for name in tensors}
        for link in links:
            if link.box.num_elements:
                file, start = places[link.key]
                start += link.first * ITEM_BYTES[tensors[link.name].dtype]
                rows[link.name] += [file, start, *link.box.offsets, *link.box.sizes, *link.strides]
        return cls(dict(files), dict(tensors), {name: packed(own) for name, own in rows.items()})

    def with_ties(self, ties: Mapping[str, str]) -> Content:
        """Return the content with more names, each for the values of one that is there."""
        tensors = {name: self.tensors[other] for name, other in ties.items()}
        tables = {name: self.tables[other] for name, other in ties.items()}
        return Content(self.files, {**self.tensors, **tensors}, {**self.tables, **tables})

    def manifest(self) -> Manifest:
        """Return the manifest of a checkpoint with this content."""
        tensors = {}
        for name, meta in self.tensors.items():
            dims = len(meta.shape)
            table = unpacked(self.tables[name]).reshape(-1, 2 + 3 * dims)
            layout = Layout.of_table(meta.shape, table[:, 0], table[:, 2 : 2 + dims], table[:, 2 + dims : 2 + 2 * dims])
            tensors[name] = StoredTensor(meta, layout)
        files = {name: StoredFile(num_bytes, 0) for name, num_bytes in self.files.items()}
        return Manifest(1, 0.0, {}, {}, ".", files, tensors)

    def regions(self) -> dict[str, dict[str, Region]]:
        """Return where blocks are, by file and by the key of a piece of the manifest."""
        names = tuple(self.files)
        found: dict[str, dict[str, Region]] = defaultdict(dict)
        for name, meta in self.tensors.items():
            dims = len(meta.shape)
            for row in unpacked(self.tables[name]).reshape(-1, 2 + 3 * dims).tolist():
                file, start, rest = names[row[0]], row[1], row[2:]
                box = Box(tuple(rest[:dims]), tuple(rest[dims : 2 * dims]))
                found[file][key_of(name, box, meta.shape)] = Region(start, tuple(rest[2 * dims :]))
        return found
