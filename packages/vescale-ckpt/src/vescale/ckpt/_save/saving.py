"""The steps of a save in any format: what each rank does, what ranks send, and what the first rank decides.

    1. every rank lists what it holds        rank 0 makes the folder, and asks one rank for each table of names
    2. every rank sends its boxes            rank 0 puts them together, and tells all what they hold
    3. every rank derives and writes its     rank 0 compares replicas, and lets the files be complete
       share

Files, and what is said of them, are those of a `Writer`.

The plan of a save (what all ranks hold, and what this one writes) is kept for the next save of the same ranks in the
same format. A rank that holds what it held then takes its share out of the state at once, and sends its table if it was
asked for it then. If all ranks hold the same, by digests, there is no second round.

An asynchronous save copies the share of each rank, with a new plan in a round of its own, before the last round, which
a thread runs (``_background.py``). A failure in any round leaves what there was before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .._background import background_control, settle, start
from .._control import Control, tree_of
from .._errors import CheckpointError, require_same
from .._format.boxes import Box
from .._format.layouts import Layout
from .._state.flat import FlatState, flatten, leaves_as_text
from .._state.objects import Objects
from .fingerprints import fingerprint
from .holdings import Boxes, Held, Holding, Inventory, Table, check_kinds, digest_of, merge_held, merge_plain, split
from .shares import RankPlan, shares
from .written import Rows

Copies = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Taken:
    """A box that this rank stores, and its values."""

    name: str
    box: Box
    view: torch.Tensor


@dataclass
class Plan:
    """A plan, kept between saves.

    Attributes:
        digest: of what all ranks hold.
        mine: digest of what this rank holds.
        held: what all hold.
        on_cpu: whether all tensors of all ranks are on the CPU.
        own: what this rank writes.
        tells: whether this rank was asked for its table.
        is_complete: whether a save with this plan has been completed.
        layouts: of all tensors in the files, on the first rank, if the format keeps them.
    """

    digest: str
    mine: str
    held: Held
    on_cpu: bool
    own: RankPlan
    tells: bool = False
    is_complete: bool = False
    layouts: dict[str, Layout] | None = None


@dataclass(frozen=True)
class Merged:
    """What ranks told, on the first one.

    Attributes:
        leaves: JSON leaves of all ranks by name, as text.
        optimizers: classes of optimizers by path.
        tables: distinct ones, each with a rank that has it, and with what its writer told.
    """

    leaves: Mapping[str, str]
    optimizers: Mapping[str, str]
    tables: Sequence[tuple[int, Table, Any]]


class Writer(Protocol):
    """The files of one save in some format, on one rank; ``create``, ``plan``, ``commit``, ``discard`` act on rank 0.

    Attributes:
        path: for errors.
        names: the type of what ``describe`` returns.
        shared: the type of what ``plan`` returns.
        wrote: the type of what ``write`` returns.
    """

    path: Path
    names: Any
    shared: Any
    wrote: Any

    def arguments(self) -> Mapping[str, str]:
        """Return what must agree between ranks, by argument."""

    def create(self) -> None:
        """Make the folder."""

    def describe(self, flat: FlatState, objects: Objects) -> Any:
        """Return what one rank of each table tells beside it."""

    def plan(self, held: Held, merged: Merged) -> Any:
        """Return what all ranks need to know before they write."""

    def accept(self, shared: Any) -> None:
        """Take what ``plan`` returned; raise an error if the folder is not the one of the first rank."""

    def write(self, plan: Plan, taken: Sequence[Taken]) -> Any:
        """Write the files of this rank, and return what the first one needs to know of them."""

    def commit(self, plan: Plan, wrote: Sequence[Any]) -> None:
        """Let the files be complete."""

    def discard(self) -> None:
        """Remove what there is of the files, unless they are complete."""


@dataclass(frozen=True)
class Told:
    """A rank's table, and what its writer tells."""

    table: Table
    more: Any


@dataclass(frozen=True)
class Given:
    """What a rank was given, and digests of what it holds.

    Attributes:
        arguments: they must agree between ranks.
        on_cpu: whether all its tensors are on the CPU.
        table: digest of its table, and of what its writer tells.
        held: digest of its tensors and boxes.
        plan: digest of the plan that it has kept; empty if none.
        told: from a rank that was asked for it when the plan was made.
    """

    arguments: Mapping[str, str]
    on_cpu: bool
    table: str
    held: str
    plan: str
    told: Told | None


@dataclass(frozen=True)
class Asked:
    """What the first rank needs of a rank."""

    table: bool
    boxes: bool


@dataclass(frozen=True)
class Offer:
    """What a rank holds: the table of one rank of each digest, and boxes if there is no plan yet."""

    told: Told | None
    boxes: Boxes | None


@dataclass(frozen=True)
class Share:
    """From this each rank derives what it writes.

    Attributes:
        plan: digest of the plan.
        held: what all ranks hold; None if all have kept this plan.
        on_cpu: whether all tensors of all ranks are on the CPU.
        more: of the writer.
    """

    plan: str
    held: Held | None
    on_cpu: bool
    more: Any


@dataclass(frozen=True)
class Written:
    """The fingerprints of a rank's replicas, as `Rows`, and what its writer says of the files."""

    replicas: str
    more: Any


_plans: dict[tuple[type, tuple[int, ...]], Plan] = {}  # the last one of a format, of the ranks that saved


class Saving:
    """One save, step by step; ``choose``, ``plan``, ``commit`` and ``discard`` are for the first rank.

    Args:
        writer: of the files.
        state: to save.
        control: the ranks.
        check_replicas: whether to compare replicas.
        otherwise: what an error of replicas offers besides.
        copies: returns copies of what is stored, if the state changes before it is written.
    """

    def __init__(
        self,
        writer: Writer,
        state: dict[str, Any],
        control: Control,
        *,
        check_replicas: bool = True,
        otherwise: str = "",
        copies: Copies = list,
    ) -> None:
        self._writer, self._state, self._control = writer, state, control
        self._check_replicas, self._otherwise, self._copies = check_replicas, otherwise, copies
        self._key = type(writer), control.ranks
        self._known = _plans.get(self._key)
        self._flat = FlatState()
        self._taken: Sequence[Taken] | None = None
        self._tells = False
        told = _typed(Told, "more", writer.names) | None
        self._given, self._offer = _typed(Given, "told", told), _typed(Offer, "told", told)
        self._share, self._written = _typed(Share, "more", writer.shared), _typed(Written, "more", writer.wrote)

    # --- rounds ---

    def run(self, *, is_async: bool = False) -> None:
        """Save; or return when what this rank writes has been copied, and save in a thread."""
        with self._discards():
            share = self._agree()
            if not is_async:
                self._finish(self._control, share)
                return
            own = background_control(self._control)
            if self._taken is None:
                self._run_round(self._control, lambda: self.take(share), self._control.no_shares)

        def finish() -> None:
            with self._discards():
                self._finish(own, share)

        start(self._writer.path, finish)

    def _agree(self) -> Share:
        control = self._control
        found = self._run_round(control, self.begin, self.choose, result=self._given, share=Asked | self._share)
        if isinstance(found, Asked):
            asked, self._taken, self._tells = found, None, found.table
            found = self._run_round(
                control, lambda: self.offer(asked), self.plan, result=self._offer, share=self._share
            )
        share: Share = found
        return share

    def _finish(self, control: Control, share: Share) -> None:
        def write() -> Written:
            self.take(share)
            return self.write()

        self._run_round(control, write, self.commit, result=self._written)
        self._plan.is_complete = True

    def _run_round(self, control: Control, work: Callable, decide: Callable, **types: Any) -> Any:
        return control.run_round(work, decide, on_failure=self.discard, **types)

    @contextlib.contextmanager
    def _discards(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also an interrupt or a lost peer, which is not an error of all ranks
            self.discard()
            raise

    # --- round 1 ---

    def begin(self) -> Given:
        """Make the folder, and list what this rank holds; if that is what it held before, take its share."""
        settle()
        arguments = self._writer.arguments()
        if self._control.rank == 0:
            self._writer.create()
        objects = Objects(self._state, self._control.rank, self._control.size)
        self._flat = flatten(self._state, open_object=objects.open)
        tensors = {
            name: Holding(held.meta, tuple(box for box, _ in held.boxes)) for name, held in self._flat.tensors.items()
        }
        leaves = leaves_as_text(self._flat.leaves)
        table, self._boxes = split(Inventory(tensors, leaves, objects.optimizers, frozenset(self._flat.own)))
        self._told = Told(table, self._writer.describe(self._flat, objects))
        on_cpu = all(view.device.type == "cpu" for each in self._flat.tensors.values() for _, view in each.boxes)
        self._mine = digest_of([table.digest_with(self._boxes), on_cpu])
        known = self._known
        plan = known.digest if known is not None and known.is_complete and known.mine == self._mine else ""
        if known is not None and plan:
            self._take(known)
        told = self._told if known is not None and plan and known.tells else None
        names = digest_of([table.digest(), tree_of(self._told.more)])
        return Given(arguments, on_cpu, names, self._mine, plan, told)

    def choose(self, given: Sequence[Given]) -> list[Asked] | list[Share]:
        """Tell all that they have kept the plan; or ask for tables, and for boxes unless it is kept."""
        for argument in given[0].arguments:
            require_same(argument, [each.arguments[argument] for each in given])
        digests = [each.table for each in given]
        index = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        self._table_of = [index[digest] for digest in digests]
        self._digest = digest_of([each.held for each in given])
        self._on_cpu = all(each.on_cpu for each in given)
        is_new = {each.plan for each in given} != {self._digest}
        told = {self._table_of[rank]: (rank, each.told) for rank, each in enumerate(given) if each.told is not None}
        if not is_new and len(told) == len(index):
            return self._shares([told[number] for number in range(len(index))], [])
        return [Asked(self._table_of.index(table) == rank, is_new) for rank, table in enumerate(self._table_of)]

    # --- round 2 ---

    def offer(self, asked: Asked) -> Offer:
        """Return what the first rank needs."""
        return Offer(self._told if asked.table else None, self._boxes if asked.boxes else None)

    def plan(self, offers: Sequence[Offer]) -> list[Share]:
        """Put together what all ranks hold."""
        told = [(rank, offer.told) for rank, offer in enumerate(offers) if offer.told is not None]
        return self._shares(told, [offer.boxes for offer in offers if offer.boxes is not None])

    def _shares(self, told: Sequence[tuple[int, Told]], boxes: Sequence[Boxes]) -> list[Share]:
        tables = [each.table for _, each in told]
        leaves, optimizers = merge_plain(tables, self._table_of)
        held = merge_held(tables, self._table_of, boxes) if boxes else None
        all_held = held or self._plan.held
        check_kinds(all_held, leaves)
        merged = Merged(leaves, optimizers, [(rank, each.table, each.more) for rank, each in told])
        share = Share(self._digest, held, self._on_cpu, self._writer.plan(all_held, merged))
        return [share] * self._control.size

    # --- round 3 ---

    def take(self, share: Share) -> None:
        """Take what this rank writes, and the fingerprints of its replicas, out of the state; at most once."""
        self._writer.accept(share.more)
        if self._taken is None:
            if share.held is not None:
                rank = self._control.rank
                own = shares(share.held, [rank])[rank]
                self._known = _plans[self._key] = Plan(share.plan, self._mine, share.held, share.on_cpu, own)
            self._plan.tells = self._tells
            self._take(self._plan)
        self._flat, self._state = FlatState(), {}  # the state may change from now on

    def _take(self, plan: Plan) -> None:
        views = {(name, box): view for name, held in self._flat.tensors.items() for box, view in held.boxes}
        writes = plan.own.writes
        taken = self._copies([views[each.name, each.held][each.box.slices(inside=each.held)] for each in writes])
        self._taken = [Taken(each.name, each.box, view) for each, view in zip(writes, taken, strict=True)]
        replicas = plan.own.replicas if self._check_replicas else ()
        rows = ((name, fingerprint(views[name, box], on_cpu=plan.on_cpu), box) for name, box in replicas)
        self._replicas = Rows(plan.held).packed(rows)

    @property
    def _plan(self) -> Plan:
        assert self._known is not None, "boxes are asked for if there is no plan"
        return self._known

    def write(self) -> Written:
        """Write the files of this rank."""
        assert self._taken is not None, "the share is taken before"
        return Written(self._replicas, self._writer.write(self._plan, self._taken))

    def commit(self, written: Sequence[Written]) -> list[None]:
        """Compare replicas, and let the files be complete."""
        if torn := Rows(self._plan.held).torn([own.replicas for own in written]):
            raise CheckpointError(torn + self._otherwise)
        self._writer.commit(self._plan, [own.more for own in written])
        return [None] * len(written)

    def discard(self) -> None:
        """Remove what there is of the files, unless they are complete."""
        self._writer.discard()


@functools.cache
def _typed(kind: type, field: str, its_type: Any) -> Any:
    """Return the class of messages of a kind whose field has this type."""
    return dataclasses.make_dataclass(kind.__name__, [(field, its_type)], bases=(kind,), frozen=True)
