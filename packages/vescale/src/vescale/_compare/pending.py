"""The parts that one step has recorded, until it is known which rows of the global batch they are.

A tensor inside of a data-parallel model, or of a micro-batch, has several readings, and nothing says which is right::

    rows     its dim 0 is a part of the rows of the global batch         activations
    flat     its dim 0 is several for each of these rows                 tokens
    whole    it is a tensor of its own, equal on all ranks               position tables, masks, scalars

All that fit are recorded. A comparison takes the reading under which both runs have the same global shape. A scalar has
another one: a mean over the rows of this rank, as losses are. The gradient of a whole tensor is a sum over the parts of
the batch, of which each rank and micro-batch has a term.

The micro-batch of a call follows from the number of calls of its module in a step, which is known at the end of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from .digest import RowSums, block_digests, row_sums
from .file import Line, bytes_of
from .holdings import Holding


@dataclass(frozen=True)
class Rows:
    """Which rows of the global batch this rank has in a forward.

    Attributes:
        coord: of the rank on the data-parallel axis.
        num_ranks: of that axis.
        rows: of this rank.
        num_microbatches: into which they are divided, the first ones with one row more where they do not divide.
        ranks: of the data-parallel axis.
    """

    coord: int = 0
    num_ranks: int = 1
    rows: int = 0
    num_microbatches: int = 1
    ranks: tuple[int, ...] = ()

    def are_in(self, mesh: DeviceMesh | None) -> bool:
        """Whether a DTensor on the mesh has the rows of all ranks, not those of this one."""
        return mesh is not None and self.num_ranks > 1 and set(self.ranks) <= set(mesh.mesh.flatten().tolist())

    @property
    def is_spread(self) -> bool:
        """Whether a call has a part of the global batch."""
        return self.num_ranks * self.num_microbatches > 1 and self.rows > 0

    def of_microbatch(self, index: int) -> tuple[int, int]:
        """Return the first row of a micro-batch in the global batch, and its number of rows."""
        least, rest = divmod(self.rows, self.num_microbatches)
        return self.coord * self.rows + index * least + min(index, rest), least + (index < rest)


@dataclass
class Pending:
    """A tensor of a call, or of the state, on this rank.

    Attributes:
        kind: as in `Line`.
        module: full name.
        forward: number of the model's forward in the step.
        call: number of the module's call in that forward.
        tensor: place in inputs or outputs.
        order: place in the order of the program.
        held: what this rank holds.
        sums: of the rows of each part.
        terms: length of the longest sum.
        values: bytes of the parts, if asked for.
        rows: the rows of the forward; None for state.
    """

    kind: str
    module: str
    forward: int
    call: int
    tensor: str
    order: int
    held: Holding
    sums: list[RowSums]
    terms: int
    values: list[bytes] | None = None
    rows: Rows | None = None


@dataclass
class Step:
    """What one step has recorded.

    Attributes:
        number: of the step.
        pending: in the order of the program.
        missing: texts about what has no values, and how often.
        forwards: number of forwards of the model that have begun.
        calls: number of calls of each module in each forward.
    """

    number: int
    pending: list[Pending] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    forwards: int = 0
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(
        self,
        kind: str,
        module: str,
        held: Holding,
        *,
        call: tuple[int, int] = (0, 0),
        tensor: str = "",
        terms: int = 1,
        rows: Rows | None = None,
        factor: float = 1.0,
        with_values: bool = False,
    ) -> None:
        """Digest what this rank holds of a tensor."""
        if held.missing:
            self.missing[f"{kind} of {module or 'the model'} {held.missing}"] += 1
            return
        parts = [(offsets, part.detach() * factor if factor != 1 else part.detach()) for offsets, part in held.parts]
        sums = [row_sums(part, offsets, held.shape) for offsets, part in parts]
        values = [bytes_of(part) for _, part in parts] if with_values else None
        order = len(self.pending)
        self.pending.append(Pending(kind, module, *call, tensor, order, held, sums, terms, values, rows))

    def lines(self) -> list[Line]:
        """Return the lines of the step."""
        found = [
            (each, part, sums, index, reading)
            for each in self.pending
            for index, ((offsets, part), sums) in enumerate(zip(each.held.parts, each.sums, strict=True))
            for reading in self._readings(each, offsets)
        ]
        digests = block_digests([(sums, each.start, each.num_rows) for _, _, sums, _, each in found])
        return [
            Line(
                step=self.number,
                kind=each.kind,
                module=each.module,
                call=reading.call,
                tensor=each.tensor,
                order=each.order,
                shape=reading.shape,
                offsets=reading.offsets,
                sizes=tuple(part.shape),
                dtype=str(part.dtype).removeprefix("torch."),
                terms=each.terms,
                digest=digest,
                reading=reading.name,
                num_terms=reading.num_terms,
                is_assumed=each.held.is_assumed or reading.is_assumed,
                placements=each.held.placements + reading.text,
                values=None if each.values is None else each.values[index],
            )
            for (each, part, _, index, reading), digest in zip(found, digests, strict=True)
        ]

    def _readings(self, each: Pending, offsets: tuple[int, ...]) -> list[_Reading]:
        shape, rows = each.held.shape, each.rows
        whole = _Reading("whole", each.call, shape, offsets)
        if rows is None:
            return [whole]
        calls = self.calls[each.forward, each.module]
        per_microbatch = max(1, calls // rows.num_microbatches)
        microbatch, call = divmod(each.call, per_microbatch)
        call += each.forward * per_microbatch
        whole = _Reading("whole", call, shape, offsets, is_assumed=rows.is_spread)
        if rows.are_in(each.held.mesh) and rows.num_microbatches == 1:
            return [dataclasses.replace(whole, is_assumed=False)]
        if not rows.is_spread or calls % rows.num_microbatches or rows.are_in(each.held.mesh):
            return [whole]
        if each.kind == "output gradient":
            whole = _Reading("sum", call, shape, offsets, num_terms=rows.num_ranks * rows.num_microbatches)
        elif not shape:
            return [whole, *[_Reading("mean", call, shape, offsets)] * (rows.rows % rows.num_microbatches == 0)]
        if not shape:
            return [whole]
        first, num_rows = rows.of_microbatch(microbatch)
        factor, rest = divmod(shape[0], num_rows) if num_rows else (0, 1)
        if rest or not factor:
            return [whole]
        spread = (factor * rows.num_ranks * rows.rows, *shape[1:])
        text = f"rows {first}:{first + num_rows} of {rows.num_ranks * rows.rows}"
        return [
            whole,
            _Reading(
                "rows" if factor == 1 else "flat", call, spread, (factor * first + offsets[0], *offsets[1:]), text
            ),
        ]


@dataclass(frozen=True)
class _Reading:
    """How a part may lie in a global tensor."""

    name: str
    call: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    place: str = ""
    num_terms: int = 1
    is_assumed: bool = False

    @property
    def start(self) -> int:
        """The first row of the part."""
        return self.offsets[0] if self.offsets else 0

    @property
    def num_rows(self) -> int:
        """Rows of the global tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def text(self) -> str:
        """The rows, to be added to the placements."""
        return f"; {self.place}" if self.place else ""


def longest_sum(shapes: list[tuple[int, ...]]) -> int:
    """Return the largest dim of some shapes: an element of a result is a sum over at most one dim of its operands."""
    return max((size for shape in shapes for size in shape), default=1)


def num_elements(shapes: list[tuple[int, ...]]) -> int:
    """Return the largest number of elements of some shapes: of how many terms a scalar is a sum."""
    return max(map(math.prod, shapes), default=1)
