"""A record on disk: a folder with one file per rank, of lines of JSON.

    {"vescale_record": 1, "vescale": "0.1.0", "torch": "2.13.0", "rank": 0, ...}     the header
    {"s": 0, "k": "output", "m": "layers.3.mlp", "c": 0, "t": "output", ...}         a part of a tensor
    {"step": 0, "exact": null, "complete": true}                                      the end of a step
    {"end": "closed", "missing": {...}, "silent": [...]}                             the last line

Ranks write what they hold and do not communicate, so a record of a run that hangs or dies is there up to that point.
Hashes and projections are packed as base64. Nothing in a record is executed: it is text and numbers.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .digest import NUM_BLOCKS, Digest

FORMAT = 1
_LAST_LINE = 4096
_KEYS = {
    "s": int,
    "k": str,
    "m": str,
    "c": int,
    "t": str,
    "i": int,
    "g": list,
    "o": list,
    "z": list,
    "d": str,
    "n": int,
}


class RecordError(ValueError):
    """A record cannot be read, or two records cannot be compared."""


@dataclass(frozen=True)
class Line:
    """A part of a tensor that a rank held when it was recorded.

    Attributes:
        step: of the training loop.
        kind: "input", "output", "output gradient", "gradient", "parameter" or "buffer".
        module: full name of the module, or of the parameter or buffer.
        call: of the module in the step (of the micro-batch, if there are such).
        tensor: place in the inputs or outputs.
        order: rises in the order in which the program ran on the rank.
        shape: of the global tensor under this reading, see ``reading``.
        offsets: of the part.
        sizes: of the part.
        dtype: name of the dtype.
        terms: how many terms the longest sum has of which an element is computed.
        digest: of the part; None where only values are stored.
        reading: "whole", or "rows" for a part of the rows of the global batch, "flat" for several rows for each of
            them; "mean" is a scalar that is a mean over the rows of this rank; "sum" is a term of a gradient that is a
            sum over parts of the batch.
        num_terms: of such a sum.
        is_assumed: nothing says that the part is the whole tensor.
        placements: as text.
        values: bytes of the part, if they were asked for.
    """

    step: int
    kind: str
    module: str
    call: int
    tensor: str
    order: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    terms: int
    digest: Digest
    reading: str = "whole"
    num_terms: int = 1
    is_assumed: bool = False
    placements: str = ""
    values: bytes | None = None

    def to_json(self) -> str:
        """Return the line."""
        packed = [
            _pack(f"<{NUM_BLOCKS}{letter}", each) for letter, each in zip("Qdd", _columns(self.digest), strict=True)
        ]
        fields: dict[str, Any] = {"s": self.step, "k": self.kind, "m": self.module, "c": self.call, "t": self.tensor}
        fields |= {"i": self.order, "g": self.shape, "o": self.offsets, "z": self.sizes, "d": self.dtype}
        fields |= {"n": self.terms, "h": packed[0], "p": packed[1], "q": packed[2]}
        if self.reading != "whole":
            fields["r"] = self.reading
        if self.num_terms > 1:
            fields["w"] = self.num_terms
        if self.is_assumed:
            fields["a"] = 1
        if self.placements:
            fields["l"] = self.placements
        if self.values is not None:
            fields["v"] = base64.b64encode(self.values).decode()
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Line:
        """Return a line from its fields.

        Raises:
            ValueError: a field is missing or has another type.
        """
        for key, kind in _KEYS.items():
            if not isinstance(fields.get(key), kind):
                raise ValueError(f"expected {kind.__name__} at {key!r}, got {fields.get(key)!r}")
        columns = [_unpack(f"<{NUM_BLOCKS}{letter}", fields.get(key)) for letter, key in zip("Qdd", "hpq", strict=True)]
        shape, offsets, sizes = (tuple(map(int, fields[key])) for key in "goz")
        values = fields.get("v")
        return cls(
            fields["s"],
            fields["k"],
            fields["m"],
            fields["c"],
            fields["t"],
            fields["i"],
            shape,
            offsets,
            sizes,
            fields["d"],
            fields["n"],
            Digest(*columns),
            str(fields.get("r", "whole")),
            int(fields.get("w", 1)),
            bool(fields.get("a")),
            str(fields.get("l", "")),
            None if values is None else base64.b64decode(values, validate=True),
        )


def _columns(digest: Digest) -> tuple[tuple[float, ...], ...]:
    return digest.hashes, digest.projections, digest.squares


def _pack(form: str, values: Iterable[float]) -> str:
    return base64.b64encode(struct.pack(form, *values)).decode()


def _unpack(form: str, text: object) -> tuple[Any, ...]:
    if not isinstance(text, str):
        raise ValueError(f"expected packed numbers, got {text!r}")
    try:
        return struct.unpack(form, base64.b64decode(text, validate=True))
    except struct.error as error:
        raise ValueError(f"expected {NUM_BLOCKS} packed numbers: {error}") from None


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


class Writer:
    """Writes the file of a rank, up to a number of bytes.

    Args:
        folder: of the record.
        header: versions, rank, plan.
        max_bytes: bound of the file, with room for the last line.

    Raises:
        ValueError: it has no room for the header.
    """

    def __init__(self, folder: str | os.PathLike[str], header: Mapping[str, Any], *, max_bytes: int) -> None:
        first = json.dumps({"vescale_record": FORMAT, **header})
        # names of modules may be in the last line once more, and texts about what is missing
        self._kept = len(first) + _LAST_LINE
        if max_bytes < len(first) + self._kept:
            raise ValueError(
                f"record: expected max_bytes of at least {len(first) + self._kept} for the names of the modules, got "
                f"{max_bytes}; a step takes about 500 bytes for each tensor"
            )
        self.path = Path(folder) / f"rank{header['rank']:05d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if header["rank"] == 0:
            for other in self.path.parent.glob("rank*.jsonl"):
                if int(other.stem.removeprefix("rank")) >= header["world"]:
                    other.unlink()  # of an earlier run on more ranks
        self._file = self.path.open("w", encoding="utf-8")
        self._left = max_bytes
        self.is_full = False
        self._write(first)
        self._file.flush()  # a run that dies in its first step has a record, too

    def _write(self, text: str) -> None:
        self._file.write(text + "\n")
        self._left -= len(text) + 1

    def step(self, number: int, lines: Iterable[Line], *, exact: int | None, is_complete: bool) -> None:
        """Write the lines of a step, all or, if they would exceed the bound, none from now on.

        Args:
            number: of the step.
            lines: of it.
            exact: number of blocks of the exact mode in which it ran, or None.
            is_complete: whether all of the step is there.
        """
        mark = json.dumps({"step": number, "exact": exact, "complete": is_complete})
        texts = [*(line.to_json() for line in lines), mark]
        if self.is_full or sum(map(len, texts)) + len(texts) > self._left - self._kept:
            self.is_full = True
            return
        for text in texts:
            self._write(text)
        self._file.flush()

    def close(self, end: str, missing: Mapping[str, int], silent: Iterable[str]) -> None:
        """Write the last line.

        Args:
            end: "closed", or the error of the run.
            missing: texts about what was not recorded, and how often.
            silent: names of modules without a recorded call.
        """
        end = "max_bytes" if self.is_full else end
        fields = {"end": end, "missing": dict(missing), "silent": list(silent)}
        text = json.dumps(fields)
        if len(text) >= self._left:
            total = sum(missing.values())
            text = json.dumps({"end": end[:200], "missing": {"what is missing has no room in max_bytes": total}})
        self._write(text)
        self._file.close()


@dataclass
class StepLines:
    """The lines of a rank in a step.

    Attributes:
        number: of the step.
        exact: number of blocks of the exact mode in which it ran, or None.
        is_complete: whether all of the step is there.
        lines: in the order of the program.
    """

    number: int
    exact: int | None = None
    is_complete: bool = False
    lines: list[Line] = field(default_factory=list)


class RankFile:
    """Reads the file of a rank, step by step.

    Attributes:
        header: versions, rank, plan.
        end: after the last step: "closed", "max_bytes", the error of the run, or "" if it ended without a word.
        missing: after the last step: texts about what was not recorded, and how often.
        silent: after the last step: names of modules without a recorded call.

    Raises:
        RecordError: it is no record of this format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header: dict[str, Any] = next(self._entries(), (1, {}))[1]
        self.end, self.missing, self.silent = "", dict[str, int](), list[str]()
        if self.header.get("vescale_record") != FORMAT:
            raise RecordError(
                f"{path}: expected a record of format {FORMAT} in line 1, got {self.header.get('vescale_record')!r}; "
                "record the run again with this version of vescale"
            )
        if not all(isinstance(self.header.get(key), int) for key in ("rank", "world")):
            raise RecordError(f"{path}: expected numbers as rank and world in line 1; record the run again")

    def steps(self) -> Iterator[StepLines]:
        """Yield the steps in their order.

        Raises:
            RecordError: a line has another form.
        """
        step = StepLines(-1)
        for number, fields in self._entries():
            if number == 1:
                continue
            try:
                if "end" in fields:
                    self.end, self.missing = str(fields["end"]), dict(fields.get("missing") or {})
                    self.silent = list(fields.get("silent") or [])
                elif "step" in fields:
                    exact = fields.get("exact")
                    yield StepLines(int(fields["step"]), exact, bool(fields.get("complete")), step.lines)
                    step = StepLines(-1)
                else:
                    step.lines.append(Line.of_json(fields))
            except (TypeError, ValueError) as error:
                raise RecordError(f"{self._path}: line {number}: {error}; record the run again") from None

    def _entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with self._path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                try:
                    fields = json.loads(text)
                except json.JSONDecodeError as error:
                    if not text.endswith("\n"):
                        return  # the run ended while it wrote this line
                    reason = f"{self._path}: line {number} is no JSON ({error}); record the run again"
                    raise RecordError(reason) from None
                if not isinstance(fields, dict):
                    reason = f"expected an object, got {text[:40]!r}; record the run again"
                    raise RecordError(f"{self._path}: line {number}: {reason}")
                yield number, fields


def open_record(folder: str | os.PathLike[str], name: str) -> list[RankFile]:
    """Return the files of a record, by rank.

    Args:
        folder: of the record.
        name: of the argument that it is, for errors.

    Raises:
        RecordError: there is no record, or files of ranks are missing.
    """
    paths = sorted(Path(folder).glob("rank*.jsonl")) if Path(folder).is_dir() else []
    if not paths:
        raise RecordError(
            f"compare: {name}: expected a folder with the files rank00000.jsonl, ... of a record, got "
            f"{os.fspath(folder)!r}; pass the folder that vescale.record got"
        )
    files = [RankFile(path) for path in paths]
    world, ranks = files[0].header["world"], [each.header["rank"] for each in files]
    if ranks != list(range(world)):
        raise RecordError(
            f"{os.fspath(folder)}: expected the files of ranks 0 to {world - 1}, got those of {ranks}; copy the files "
            "of all hosts into one folder"
        )
    return files
