"""What packages on top of ``vescale.dtensor`` build on: sibling packages and third parties. Users need none of it.

Each section is one protocol, documented here once.

**Boxes.** A *box* is ``(offsets, sizes)``, a rectangle of the global tensor. `local_views` returns the boxes that a
rank holds of a DTensor, each with the view of the local tensor that stores it. `flat_range_boxes` cuts a flat range of
a row-major tensor into boxes. A tensor class that offers ``__boxes__()`` and ``__global_shape__()`` is checkpointed by
these boxes alone; no package needs to be imported for that.

**Groups of ranks.** `group_of_ranks` returns one process group per set of ranks. Only its members create it.

**Agreement between ranks.** `differing_texts` compares a text over a process group or mesh and returns the text of
every rank if any two differ. `describe_difference` turns that into one sentence, the same on every rank.

**Nested values.** `leaves`, `tensors_in` and `map_leaves` walk lists, tuples, dicts and, if asked to, dataclasses.

**Random operators in a call.** `random_position` returns the positions of the random streams: two positions are equal
if nothing was drawn between them. Contexts such as ``random.local_batch`` watch every operator on plain tensors.
`is_watched` and `is_watched_alone` return whether they do; `unwatched` and `watched` switch that off and on.
"""

from __future__ import annotations

from ._containers import leaves, map_leaves, tensors_in
from ._layout.agreement import describe_difference, differing_texts
from ._layout.boxes import Box, flat_range_boxes
from ._layout.groups import group_of_ranks
from ._layout.shards import local_views
from ._random.state import Position, random_position
from ._random.streams import is_watched, is_watched_alone, unwatched, watched

__all__ = [
    "Box",
    "Position",
    "describe_difference",
    "differing_texts",
    "flat_range_boxes",
    "group_of_ranks",
    "is_watched",
    "is_watched_alone",
    "leaves",
    "local_views",
    "map_leaves",
    "random_position",
    "tensors_in",
    "unwatched",
    "watched",
]
