"""What each rank writes: every rank derives its own share from what all ranks hold.

Boxes that one rank holds are its fixed load. The others form groups with the same holders, which ``balance`` shares out
group by group, the smallest first. Groups that are alike, as those of a mesh are, are shared out alike: the work is
done once for all groups with boxes of the same sizes and holders with the same loads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .._format.boxes import Box
from .._format.layouts import Layout
from .balance import MIN_CUT_BYTES, Assignment, Part, Write, share_group
from .holdings import Held, num_bytes, unpacked

Holders = tuple[int, ...]


@dataclass
class RankPlan:
    """One rank's share of a save.

    Attributes:
        writes: boxes that the rank stores.
        replicas: ``(name, box)`` on this and other ranks, with values that must agree.
    """

    writes: list[Write] = field(default_factory=list)
    replicas: list[tuple[str, Box]] = field(default_factory=list)


def shares(held: Held, ranks: Collection[int], *, min_cut_bytes: int = MIN_CUT_BYTES) -> dict[int, RankPlan]:
    """Return the shares of some ranks; every rank gets the same result for a rank."""
    plans = {rank: RankPlan() for rank in ranks}
    sizes, layout_of = num_bytes(held), unpacked(held.layout_of).tolist()
    holders = [_holders(held.layouts[i]) for i in range(len(held.layouts))]
    weights = [0] * len(held.layouts)  # bytes per element, over all tensors of a layout
    for layout, size in zip(layout_of, sizes, strict=True):
        weights[layout] += size
    loads = [0.0] * held.num_ranks
    groups: dict[Holders, dict[int, list[Box]]] = {}
    single: list[dict[int, list[Box]]] = []  # by layout: boxes of the ranks asked for
    for layout, boxes in enumerate(holders):
        single.append({})
        for box, own in boxes.items():
            if len(own) > 1:
                groups.setdefault(own, {}).setdefault(layout, []).append(box)
                continue
            loads[own[0]] += box.num_elements * weights[layout]
            if own[0] in plans:
                single[-1].setdefault(own[0], []).append(box)
    for name, layout in zip(held.names, layout_of, strict=True):
        for rank, boxes_of_rank in single[layout].items():
            plans[rank].writes += [Write(name, box, box) for box in boxes_of_rank]
    done: dict[tuple, Assignment] = {}
    for own, by_layout in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        members = [(i, layout) for i, layout in enumerate(layout_of) if layout in by_layout]
        of_holders = tuple(loads[rank] for rank in own)
        key = of_holders, tuple((layout, tuple(box.sizes for box in boxes)) for layout, boxes in by_layout.items())
        if key not in done:
            items = [(box.sizes, sizes[i]) for i, layout in members for box in by_layout[layout]]
            done[key] = share_group(items, of_holders, min_cut_bytes=min_cut_bytes)
        for rank, num_bytes_of_rank in zip(own, done[key].num_bytes, strict=True):
            loads[rank] += num_bytes_of_rank
        if not plans.keys().isdisjoint(own):
            placed = [(held.names[i], box) for i, layout in members for box in by_layout[layout]]
            _add(plans, own, placed, done[key].parts)
    return plans


def _add(
    plans: Mapping[int, RankPlan],
    holders: Holders,
    boxes: Sequence[tuple[str, Box]],
    parts: Sequence[Sequence[Part]],
) -> None:
    """Add the boxes of a group, and their parts, to the plans of its holders."""
    for rank in plans.keys() & set(holders):
        plans[rank].replicas += boxes
    for (name, box), own in zip(boxes, parts, strict=True):
        for part in own:
            if holders[part.holder] in plans:
                cut = box if part.dim is None else box.rows(part.dim, part.first, part.last)
                plans[holders[part.holder]].writes.append(Write(name, box, cut))


def _holders(layout: Layout) -> dict[Box, Holders]:
    found: dict[Box, list[int]] = {}
    for rank, box in layout.pieces():
        found.setdefault(box, []).append(rank)
    return {box: tuple(sorted(own)) for box, own in sorted(found.items())}
