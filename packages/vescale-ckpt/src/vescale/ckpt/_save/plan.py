"""Plan a save: assign each element of the state to exactly one rank that holds it.

Pure functions over integers and strings. ``plan_save`` refuses a state without one unambiguous value per element:

- a tensor with different metadata on two ranks;
- JSON leaves that differ between ranks;
- boxes that overlap without being equal, because one of the two values would be lost;
- boxes that no rank holds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .._errors import CheckpointError, format_ranks, format_some
from .._format.boxes import Box, describe_coverage_fault
from .._format.data_files import Checksums
from .._format.dtypes import ITEM_BYTES
from .._format.manifest import TensorMeta
from .balance import MIN_CUT_BYTES, HeldBox, Write, share_out


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
    """

    tensors: Mapping[str, Holding]
    leaves: Mapping[str, str]
    optimizers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a save.

    Attributes:
        writes: boxes that the rank stores.
        replicas: ``(name, box)`` on this and other ranks, with values that must agree.
    """

    writes: tuple[Write, ...]
    replicas: tuple[tuple[str, Box], ...]


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save.

    Attributes:
        tensors: every tensor of the state, by name, in name order.
        leaves: every JSON leaf as text, by name.
        ranks: one share per rank.
        optimizers: class names of optimizers by path.
    """

    tensors: Mapping[str, TensorMeta]
    leaves: Mapping[str, str]
    ranks: tuple[RankPlan, ...]
    optimizers: Mapping[str, str] = field(default_factory=dict)


def plan_save(inventories: Sequence[Inventory], *, min_cut_bytes: int = MIN_CUT_BYTES) -> SavePlan:
    """Return the plan of a save.

    Args:
        inventories: one per rank, in rank order.
        min_cut_bytes: minimum bytes of a part of a box.

    Raises:
        CheckpointError: an element of the state has no value or several; the text has tensor, box and ranks.
    """
    leaves = _merge_equal("plain values", [inventory.leaves for inventory in inventories])
    optimizers = _merge_equal("classes of an optimizer", [inventory.optimizers for inventory in inventories])
    tensors = _merge_metas(inventories)
    if both := sorted(leaves.keys() & tensors.keys()):
        raise CheckpointError(
            f"expected one kind per name, got a tensor on some ranks and a plain value on others: "
            f"{format_some(map(repr, both))}; rename one of them"
        )
    held = _merge_boxes(inventories, tensors)
    writes = share_out(held, world_size=len(inventories), min_cut_bytes=min_cut_bytes)
    replicas: list[list[tuple[str, Box]]] = [[] for _ in inventories]
    for item in held:
        if len(item.holders) > 1:
            for rank in item.holders:
                replicas[rank].append((item.name, item.box))
    shares = tuple(RankPlan(own, tuple(shared)) for own, shared in zip(writes, replicas, strict=True))
    return SavePlan(tensors, leaves, shares, optimizers)


def find_torn_replicas(sums: Sequence[Mapping[tuple[str, Box], Checksums]]) -> str | None:
    """Compare the checksums of replicated boxes between ranks.

    Args:
        sums: per rank, the checksums of each of its replicas.

    Returns:
        A text with the first boxes that differ and their ranks, or None.
    """
    ranks_of: dict[tuple[str, Box], dict[Checksums, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(sums):
        for key, crc in own.items():
            ranks_of[key][crc].append(rank)
    torn = [
        f"{name!r} {box} ({' differ from '.join(map(format_ranks, sides.values()))})"
        for (name, box), sides in sorted(ranks_of.items())
        if len(sides) > 1
    ]
    if not torn:
        return None
    return (
        f"expected equal replicas on all ranks, got differences in {format_some(torn)}; make them equal before saving "
        "(a gradient reduction or broadcast is missing), give values of one rank their own name, or pass "
        "check_replicas=False to store one of them"
    )


def _merge_equal(what: str, tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    ranks_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, table in enumerate(tables):
        for name, text in table.items():
            ranks_of[name][text].append(rank)
    for name, values in ranks_of.items():
        if len(values) > 1:
            found = " and ".join(f"{_shorten(text)} on {format_ranks(ranks)}" for text, ranks in values.items())
            raise CheckpointError(
                f"{name!r}: expected equal {what} on all ranks, got {found}; give values of one rank their own name"
            )
    return {name: next(iter(values)) for name, values in sorted(ranks_of.items())}


def _merge_metas(inventories: Sequence[Inventory]) -> dict[str, TensorMeta]:
    ranks_of: dict[str, dict[TensorMeta, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, inventory in enumerate(inventories):
        for name, holding in inventory.tensors.items():
            ranks_of[name][holding.meta].append(rank)
    for name, metas in ranks_of.items():
        for unknown in [meta for meta in metas if not meta.dtype]:
            if any(meta.dtype and meta.shape == unknown.shape for meta in metas):
                del metas[unknown]
        if not all(meta.dtype for meta in metas):
            raise CheckpointError(
                f"tensor {name!r}: expected a dtype, got no box on any rank; give the value a dtype attribute"
            )
        if len(metas) > 1:
            found = " and ".join(
                f"{meta.dtype} with global shape {meta.shape} on {format_ranks(ranks)}" for meta, ranks in metas.items()
            )
            raise CheckpointError(
                f"tensor {name!r}: expected one dtype and global shape, got {found}; rename one of them"
            )
    return {name: next(iter(metas)) for name, metas in sorted(ranks_of.items())}


def _merge_boxes(inventories: Sequence[Inventory], tensors: Mapping[str, TensorMeta]) -> list[HeldBox]:
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in tensors}
    for rank, inventory in enumerate(inventories):
        for name, holding in inventory.tensors.items():
            for box in holding.boxes:
                holders[name].setdefault(box, []).append(rank)
    held = []
    for name, meta in tensors.items():
        boxes = sorted(holders[name])
        if (fault := describe_coverage_fault(meta.shape, boxes)) is not None:
            raise CheckpointError(
                f"tensor {name!r}, global shape {meta.shape}: expected boxes that cover every element, equal where two "
                f"ranks hold the same element, but {fault}; the ranks hold {_list_holders(boxes, holders[name])}"
            )
        item_bytes = ITEM_BYTES[meta.dtype]
        held += [HeldBox(name, box, box.num_elements * item_bytes, tuple(holders[name][box])) for box in boxes]
    return held


def _list_holders(boxes: Sequence[Box], holders: Mapping[Box, Sequence[int]]) -> str:
    return format_some((f"{box} ({format_ranks(holders[box])})" for box in boxes), limit=8) or "no box"


def _shorten(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def rank_bytes(plan: SavePlan) -> list[int]:
    """Return the bytes that each rank writes."""
    return [
        sum(write.box.num_elements * ITEM_BYTES[plan.tensors[write.name].dtype] for write in share.writes)
        for share in plan.ranks
    ]
