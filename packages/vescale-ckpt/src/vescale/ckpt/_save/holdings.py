"""What the ranks hold, in a form that a job of any size can send: most of it is alike on most ranks.

A rank splits its `Inventory` into a **table** (names, dtypes, shapes, plain values) and its **boxes**. Ranks first
compare digests of their tables, and only one rank of each digest sends its table. Boxes are sent as few lists, with the
number of its list for each name: the shards of a model have as many lists as it has shapes.

``merge_held`` puts them together on one rank. Tensors that all ranks hold alike are looked at once: for each rank and
name there is one integer, the number of its list, and equal columns of that matrix are one class. The result, `Held`,
is small enough for every rank, which derives from it what it writes (``shares.py``).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._errors import CheckpointError, format_ranks, format_some
from .._format.boxes import Box, describe_coverage_fault
from .._format.dtypes import ITEM_BYTES
from .._format.layouts import Layout
from .._format.manifest import TensorMeta


@dataclass(frozen=True, slots=True)
class Holding:
    """The boxes of one tensor on one rank: distinct and not empty."""

    meta: TensorMeta
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Inventory:
    """The part of the state on one rank.

    Attributes:
        tensors: boxes by tensor name.
        leaves: JSON leaves by name, as text.
        optimizers: class names of optimizers by path.
        own: names that this rank alone has.
    """

    tensors: Mapping[str, Holding]
    leaves: Mapping[str, str]
    optimizers: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Table:
    """What the inventories of many ranks have in common; ``meta_of`` has an index into ``metas`` for each name."""

    names: tuple[str, ...]
    metas: tuple[TensorMeta, ...]
    meta_of: str
    leaves: Mapping[str, str]
    optimizers: Mapping[str, str]

    def digest(self) -> str:
        """Return a text that is equal for equal tables alone."""
        return digest_of([self._tensors(), dict(self.leaves), dict(self.optimizers)])

    def digest_with(self, boxes: Boxes) -> str:
        """Return a text that is equal for equal tensors in equal boxes alone, whatever the plain values."""
        own = [[name, each.meta.dtype, each.meta.shape, _numbers(each.boxes)] for name, each in boxes.own.items()]
        return digest_of([self._tensors(), [_numbers(each) for each in boxes.lists], boxes.list_of, own])

    def _tensors(self) -> list[Any]:
        return [self.names, [[meta.dtype, meta.shape] for meta in self.metas], self.meta_of]


@dataclass(frozen=True)
class Boxes:
    """The boxes of one rank.

    Attributes:
        lists: distinct lists of boxes.
        list_of: for each name of the table, the index of its list.
        own: tensors that are not in the table, as this rank alone has them.
    """

    lists: tuple[tuple[Box, ...], ...]
    list_of: str
    own: Mapping[str, Holding]


@dataclass(frozen=True)
class Held:
    """All tensors of a state, and which ranks hold which of their boxes.

    Attributes:
        names: of the tensors, in order.
        metas: distinct dtypes and global shapes.
        meta_of: for each name, an index into them.
        layouts: distinct layouts of boxes on ranks, in which a box may be on several.
        layout_of: for each name, an index into them.
        num_ranks: number of ranks.
    """

    names: tuple[str, ...]
    metas: tuple[TensorMeta, ...]
    meta_of: str
    layouts: tuple[Layout, ...]
    layout_of: str
    num_ranks: int

    def tensors(self) -> dict[str, TensorMeta]:
        """Return dtype and global shape by name."""
        return {name: self.metas[i] for name, i in zip(self.names, unpacked(self.meta_of).tolist(), strict=True)}


def packed(numbers: Iterable[int] | np.ndarray) -> str:
    """Return 64-bit integers as text."""
    return base64.b64encode(np.asarray(numbers, dtype="<i8").tobytes()).decode()


def unpacked(text: str) -> np.ndarray:
    """Return the integers of a text."""
    return np.frombuffer(base64.b64decode(text), dtype="<i8")


def digest_of(content: Any) -> str:
    """Return a text that is equal for equal content of JSON alone."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _numbers(boxes: Iterable[Box]) -> list[Any]:
    return [[box.offsets, box.sizes] for box in boxes]


def split(inventory: Inventory) -> tuple[Table, Boxes]:
    """Return what of an inventory other ranks may have, too, and the rest."""
    names = tuple(sorted(inventory.tensors.keys() - inventory.own))
    held = [inventory.tensors[name] for name in names]
    metas, meta_of = _distinct([holding.meta for holding in held])
    lists, list_of = _distinct([holding.boxes for holding in held])
    table = Table(names, metas, meta_of, dict(inventory.leaves), dict(inventory.optimizers))
    return table, Boxes(lists, list_of, {name: inventory.tensors[name] for name in sorted(inventory.own)})


def _distinct(items: Sequence) -> tuple[tuple, str]:
    index = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return tuple(index), packed([index[item] for item in items])


def merge_plain(tables: Sequence[Table], table_of: Sequence[int]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the JSON leaves, and the classes of optimizers, of all ranks.

    Args:
        tables: distinct ones.
        table_of: for each rank, the index of its table.

    Raises:
        CheckpointError: they differ between ranks; the text has the name and the ranks.
    """
    ranks = _ranks_by_table(tables, table_of)
    leaves = _merge_equal("plain values", [table.leaves for table in tables], ranks)
    return leaves, _merge_equal("classes of an optimizer", [table.optimizers for table in tables], ranks)


def merge_held(tables: Sequence[Table], table_of: Sequence[int], boxes: Sequence[Boxes]) -> Held:
    """Put what all ranks hold together.

    Args:
        tables: distinct ones.
        table_of: for each rank, the index of its table.
        boxes: of each rank.

    Raises:
        CheckpointError: an element of the state has no value or several; the text has tensor, box and ranks.
    """
    ranks = _ranks_by_table(tables, table_of)
    metas = _merge_metas(tables, ranks, boxes)
    names = tuple(metas)
    layouts: dict[tuple, Layout] = {}
    classes = _Classes(tables, ranks, boxes)
    keys = [(metas[name].shape, classes.of(name)) for name in names]
    for name, key in zip(names, keys, strict=True):
        if key not in layouts:
            layouts[key] = _layout(name, metas[name], classes.pairs(name))
    index = {key: number for number, key in enumerate(layouts)}
    distinct, meta_of = _distinct([metas[name] for name in names])
    layout_of = packed([index[key] for key in keys])
    return Held(names, distinct, meta_of, tuple(layouts.values()), layout_of, len(boxes))


def check_kinds(held: Held, leaves: Collection[str]) -> None:
    """Check that no name is a tensor on some ranks and a plain value on others.

    Raises:
        CheckpointError: one is.
    """
    if both := sorted(set(held.names).intersection(leaves)):
        raise CheckpointError(
            f"expected one kind per name, got a tensor on some ranks and a plain value on others: "
            f"{format_some(map(repr, both))}; rename one of them"
        )


def _ranks_by_table(tables: Sequence[Table], table_of: Sequence[int]) -> list[list[int]]:
    ranks: list[list[int]] = [[] for _ in tables]
    for rank, table in enumerate(table_of):
        ranks[table].append(rank)
    return ranks


class _Classes:
    """Which names are held alike: by the same lists of boxes on the same ranks."""

    def __init__(self, tables: Sequence[Table], ranks: Sequence[list[int]], boxes: Sequence[Boxes]) -> None:
        self._ranks = ranks
        self._lists: dict[tuple[Box, ...], int] = {}
        self._matrices: list[np.ndarray] = []
        self._of: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # table, class, column
        self._own: dict[str, list[tuple[int, Holding]]] = defaultdict(list)
        for number, (table, members) in enumerate(zip(tables, ranks, strict=True)):
            rows = [self._row(boxes[rank]) for rank in members]
            matrix = np.stack(rows) if table.names else np.empty((len(rows), 0), np.int64)
            self._matrices.append(matrix)
            if table.names:
                _, inverse = np.unique(matrix, axis=1, return_inverse=True)
                for column, (name, own) in enumerate(zip(table.names, inverse.reshape(-1).tolist(), strict=True)):
                    self._of[name].append((number, own, column))
        for rank, each in enumerate(boxes):
            for name, holding in each.own.items():
                self._own[name].append((rank, holding))

    def _row(self, boxes: Boxes) -> np.ndarray:
        known = np.array([self._lists.setdefault(own, len(self._lists)) for own in boxes.lists], dtype=np.int64)
        return known[unpacked(boxes.list_of)] if len(known) else np.empty(0, np.int64)

    def of(self, name: str) -> tuple:
        """Return a key that is equal for names that are held alike."""
        if name in self._own:
            return name, *self._of.get(name, ())
        return tuple((number, own) for number, own, _ in self._of[name])

    def pairs(self, name: str) -> Iterator[tuple[int, Box]]:
        """Yield the ranks that hold boxes of a tensor, with each box."""
        lists = list(self._lists)
        for number, _, column in self._of.get(name, ()):
            for rank, which in zip(self._ranks[number], self._matrices[number][:, column].tolist(), strict=True):
                yield from ((rank, box) for box in lists[which])
        for rank, holding in self._own.get(name, ()):
            yield from ((rank, box) for box in holding.boxes)


def _layout(name: str, meta: TensorMeta, pairs: Iterable[tuple[int, Box]]) -> Layout:
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in sorted(pairs):
        holders[box].append(rank)
    boxes = sorted(holders)
    if (fault := describe_coverage_fault(meta.shape, boxes)) is not None:
        listed = format_some((f"{box} ({format_ranks(holders[box])})" for box in boxes), limit=8) or "no box"
        raise CheckpointError(
            f"tensor {name!r}, global shape {meta.shape}: expected boxes that cover every element, equal where two "
            f"ranks hold the same element, but {fault}; the ranks hold {listed}"
        )
    return Layout.of(meta.shape, [(rank, box) for box in boxes for rank in holders[box]])


def _merge_equal(what: str, tables: Sequence[Mapping[str, str]], ranks: Sequence[list[int]]) -> dict[str, str]:
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, table in enumerate(tables):
        for name, text in table.items():
            found[name][text].append(number)
    for name, values in found.items():
        if len(values) > 1:
            got = " and ".join(f"{_shorten(text)} on {_of_tables(own, ranks)}" for text, own in values.items())
            raise CheckpointError(
                f"{name!r}: expected equal {what} on all ranks, got {got}; give values of one rank their own name, or "
                "put them into PerRank"
            )
    return {name: next(iter(values)) for name, values in sorted(found.items())}


def _merge_metas(tables: Sequence[Table], ranks: Sequence[list[int]], boxes: Sequence[Boxes]) -> dict[str, TensorMeta]:
    found: dict[str, dict[TensorMeta, list[int]]] = defaultdict(lambda: defaultdict(list))  # of ranks
    for number, table in enumerate(tables):
        for name, which in zip(table.names, unpacked(table.meta_of).tolist(), strict=True):
            found[name][table.metas[which]].append(number)
    own: dict[str, dict[TensorMeta, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, each in enumerate(boxes):
        for name, holding in each.own.items():
            own[name][holding.meta].append(rank)
    for name in own:
        found[name].update({meta: [] for meta in own[name] if meta not in found[name]})
    for name, metas in found.items():
        for unknown in [meta for meta in metas if not meta.dtype]:
            if any(meta.dtype and meta.shape == unknown.shape for meta in metas):
                del metas[unknown]
        if not all(meta.dtype for meta in metas):
            raise CheckpointError(
                f"tensor {name!r}: expected a dtype, got no box on any rank; give the value a dtype attribute"
            )
        if len(metas) > 1:
            got = " and ".join(
                f"{meta.dtype} with global shape {meta.shape} on "
                f"{format_ranks([*_ranks_of(numbers, ranks), *own[name].get(meta, ())])}"
                for meta, numbers in metas.items()
            )
            raise CheckpointError(
                f"tensor {name!r}: expected one dtype and global shape, got {got}; rename one of them"
            )
    return {name: next(iter(metas)) for name, metas in sorted(found.items())}


def _ranks_of(numbers: Iterable[int], ranks: Sequence[list[int]]) -> list[int]:
    return [rank for number in numbers for rank in ranks[number]]


def _of_tables(numbers: Iterable[int], ranks: Sequence[list[int]]) -> str:
    return format_ranks(_ranks_of(numbers, ranks))


def _shorten(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def num_bytes(held: Held) -> list[int]:
    """Return the bytes of an element of each tensor."""
    sizes = [ITEM_BYTES[meta.dtype] for meta in held.metas]
    return [sizes[i] for i in unpacked(held.meta_of).tolist()]
