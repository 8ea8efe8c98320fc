"""The records of a communication log: one frozen record per collective, and tables over them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

import torch

from ._source import SourceLine
from ._text import bytes_text, plural, text_table

__all__ = ["CommLog", "CommRecord"]


@dataclass(frozen=True)
class CommRecord:
    """One collective of this rank.

    Attributes:
        operator: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``,
            ``"send"``, ``"recv"``, ``"barrier"`` ...
        num_bytes: size of the inputs or of the outputs on this rank, the larger of both.
        dtype: of the first tensor, or None.
        shape: of the first input tensor.
        num_tensors: number of input tensors.
        axis: name of the mesh axis, ``"world"`` for the default group, or the ranks of another group.
        group_size: number of ranks that take part.
        module: path of the module, ``"(root)"`` for the model itself, the name of a parameter whose gradient is
            accumulated, or ``""``.
        phase: ``"forward"`` or ``"backward"``.
        source: the line of the program outside of torch and veScale, or None.
        implicit: whether it is part of an implicit redistribution of an operator's operands.
        cause: that operator, or ``""``.
    """

    operator: str
    num_bytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    num_tensors: int
    axis: str
    group_size: int
    module: str
    phase: str
    source: SourceLine | None
    implicit: bool
    cause: str

    @property
    def line(self) -> str:
        """File name and number of the source line: ``train.py:31``."""
        return self.source.short if self.source else ""

    def __str__(self) -> str:
        shape = f"{_cell(self.dtype)}{list(self.shape)}" if self.dtype else ""
        if self.num_tensors > 1:
            shape += f" and {self.num_tensors - 1} more"
        where = " ".join(filter(None, (self.phase, self.module, self.line)))
        implicit = f" IMPLICIT in {self.cause}" if self.implicit else ""
        what = " ".join(filter(None, (bytes_text(self.num_bytes), shape, where)))
        return f"{self.operator} over {self.axis} {what}{implicit}"


class CommLog(Sequence[CommRecord]):
    """The collectives of this rank in the order in which they were issued: a sequence of :class:`CommRecord`."""

    def __init__(self, records: Iterable[CommRecord] = ()):
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int | slice) -> CommRecord | CommLog:
        found = self._records[index]
        return CommLog(found) if isinstance(index, slice) else found

    def add(self, record: CommRecord) -> None:
        """Append a record."""
        self._records.append(record)

    @property
    def total_bytes(self) -> int:
        """Sum over all records."""
        return sum(record.num_bytes for record in self)

    def only(self, **wanted: object) -> CommLog:
        """Return the records whose fields have the wanted values.

        Raises:
            ValueError: a name that is no field.

        Example:
            >>> log.only(operator="all_reduce", axis="tp", implicit=True)           # doctest: +SKIP
        """
        _check(wanted)
        return CommLog(r for r in self if all(getattr(r, name) == value for name, value in wanted.items()))

    def summary(self, by: Sequence[str] = ("operator", "axis", "module")) -> str:
        """Return a table of counts and bytes, the most bytes first.

        Args:
            by: names of the fields of :class:`CommRecord` to group by; ``"line"`` is the source line.

        Raises:
            ValueError: a name that is no field.
        """
        _check(by)
        groups: dict[tuple, list[CommRecord]] = {}
        for record in self:
            groups.setdefault(tuple(getattr(record, name) for name in by), []).append(record)
        ordered = sorted(groups.items(), key=lambda item: -sum(r.num_bytes for r in item[1]))
        rows = [[*map(_cell, key), *_sums(records)] for key, records in ordered]
        rows.append(["total", *[""] * (len(by) - 1), *_sums(list(self))])
        return text_table([*by, "count", "implicit", "bytes"], rows, num_text=len(by))

    def to_csv(self, path: str | PathLike | None = None) -> str:
        """Return all records as comma-separated values with a header, and write them to ``path`` if it is given."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_FIELDS)
        for record in self:
            writer.writerow([_cell(getattr(record, name)) for name in _FIELDS])
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"CommLog({plural(len(self), 'collective')}, {bytes_text(self.total_bytes)})"


_FIELDS = tuple(field.name for field in fields(CommRecord))


def _check(names: Iterable[str]) -> None:
    unknown = [name for name in names if name not in (*_FIELDS, "line")]
    if unknown:
        raise ValueError(f"a record has no {', '.join(unknown)}; it has {', '.join(_FIELDS)}, line")


def _cell(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return "" if value is None else str(value)


def _sums(records: Sequence[CommRecord]) -> list[str]:
    implicit = sum(r.implicit for r in records)
    return [str(len(records)), str(implicit or ""), bytes_text(sum(r.num_bytes for r in records))]
