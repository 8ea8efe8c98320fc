"""Plan a save: from what every rank holds to what every rank writes, each element of the state exactly once.

Pure functions over integers and strings. ``plan_save`` refuses what would make a checkpoint wrong: a tensor that is
not the same kind on two ranks, JSON leaves that differ between ranks, boxes that overlap without being equal (one of
the two values would be lost), and boxes that nobody holds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._balance import MIN_CUT_BYTES, HeldBox, Write, share_out
from ._boxes import Box, describe_coverage_fault
from ._errors import CheckpointError, format_ranks, format_some
from ._formats import ITEM_BYTES
from ._manifest import TensorMeta


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of one tensor: distinct, non-empty boxes."""

    meta: TensorMeta
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Inventory:
    """What one rank holds of the state.

    Attributes:
        tensors: boxes by tensor name.
        leaves: JSON leaves by name, as text.
    """

    tensors: Mapping[str, Holding]
    leaves: Mapping[str, str]


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a save.

    Attributes:
        writes: the boxes it stores.
        replicas: ``(name, box)`` that it holds together with other ranks, whose values must agree.
    """

    writes: tuple[Write, ...]
    replicas: tuple[tuple[str, Box], ...]


@dataclass(frozen=True)
class SavePlan:
    """A whole save.

    Attributes:
        tensors: every tensor of the state, by name, in name order.
        leaves: every JSON leaf as text, by name.
        ranks: one share per rank.
    """

    tensors: Mapping[str, TensorMeta]
    leaves: Mapping[str, str]
    ranks: tuple[RankPlan, ...]


def plan_save(inventories: Sequence[Inventory], *, min_cut_bytes: int = MIN_CUT_BYTES) -> SavePlan:
    """Plan a save of what the ranks hold.

    Args:
        inventories: one per rank, in rank order.
        min_cut_bytes: no box is cut into parts smaller than this.

    Raises:
        CheckpointError: naming tensor, box and ranks, if the state cannot be stored whole and unambiguously.
    """
    leaves = _merge_leaves(inventories)
    tensors = _merge_metas(inventories)
    if both := sorted(leaves.keys() & tensors.keys()):
        raise CheckpointError(f"a tensor on some ranks and a plain value on others: {format_some(map(repr, both))}")
    held = _merge_boxes(inventories, tensors)
    writes = share_out(held, world_size=len(inventories), min_cut_bytes=min_cut_bytes)
    replicas: list[list[tuple[str, Box]]] = [[] for _ in inventories]
    for item in held:
        if len(item.holders) > 1:
            for rank in item.holders:
                replicas[rank].append((item.name, item.box))
    shares = tuple(RankPlan(own, tuple(shared)) for own, shared in zip(writes, replicas, strict=True))
    return SavePlan(tensors, leaves, shares)


def find_torn_replicas(sums: Sequence[Mapping[tuple[str, Box], int]]) -> str | None:
    """Compare the checksums of replicated boxes between ranks.

    Args:
        sums: per rank, the CRC-32 of each replica it holds.

    Returns:
        A text naming the first boxes whose holders differ and the ranks on each side, or None.
    """
    ranks_of: dict[tuple[str, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(sums):
        for place, crc in own.items():
            ranks_of[place][crc].append(rank)
    torn = [
        f"{name!r} {box} ({' differ from '.join(map(format_ranks, sides.values()))})"
        for (name, box), sides in sorted(ranks_of.items())
        if len(sides) > 1
    ]
    if not torn:
        return None
    return (
        f"replicas of the same value differ between ranks: {format_some(torn)}. Make them equal before saving (a "
        "missed gradient reduction or broadcast), give values that belong to one rank a name of their own, or pass "
        "check_replicas=False to store one of them"
    )


def _merge_leaves(inventories: Sequence[Inventory]) -> dict[str, str]:
    ranks_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, inventory in enumerate(inventories):
        for name, text in inventory.leaves.items():
            ranks_of[name][text].append(rank)
    for name, values in ranks_of.items():
        if len(values) > 1:
            said = " and ".join(f"{_shorten(text)} on {format_ranks(ranks)}" for text, ranks in values.items())
            raise CheckpointError(
                f"{name!r} is {said}: plain values must be equal on all ranks that have the name; give values that "
                "belong to one rank a name of their own"
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
            raise CheckpointError(f"tensor {name!r} has no box on any rank, so nothing says what dtype it has")
        if len(metas) > 1:
            said = " and ".join(
                f"{meta.dtype} with global shape {meta.shape} on {format_ranks(ranks)}" for meta, ranks in metas.items()
            )
            raise CheckpointError(f"tensor {name!r} is {said}: one name must be one tensor")
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
                f"tensor {name!r}, global shape {meta.shape}: {fault}. The ranks that save must hold every element, as "
                f"equal boxes where they hold it twice; they hold {_who_holds(boxes, holders[name])}"
            )
        item_bytes = ITEM_BYTES[meta.dtype]
        held += [HeldBox(name, box, box.num_elements * item_bytes, tuple(holders[name][box])) for box in boxes]
    return held


def _who_holds(boxes: Sequence[Box], holders: Mapping[Box, Sequence[int]]) -> str:
    return format_some((f"{box} ({format_ranks(holders[box])})" for box in boxes), limit=8) or "nothing of it"


def _shorten(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def rank_bytes(plan: SavePlan) -> list[int]:
    """Count the bytes that each rank writes."""
    return [
        sum(write.box.num_elements * ITEM_BYTES[plan.tensors[write.name].dtype] for write in share.writes)
        for share in plan.ranks
    ]
