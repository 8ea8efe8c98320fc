"""Protocols for packages on top of ``vescale.dtensor``, our own and those of third parties. Users need none of them.

Each section is one protocol, documented here once.

**Boxes.** A *box* is ``(offsets, sizes)``, a rectangle of the global tensor. `local_views` returns the boxes that a
rank holds of a DTensor, each with the view of the local tensor that stores it. `pieces` and `local_shape` compute the
same for any coordinate of a mesh from integers and placements. `flat_range_boxes` cuts a flat range of a row-major
tensor into boxes. `chunk` returns the part of a dim that one rank holds, by the rule of ``torch.chunk``. A tensor class
that offers ``__boxes__()`` and ``__global_shape__()`` is checkpointed by these boxes alone; no package needs to be
imported for that.

**Views of uneven shards.** A view that merges a dim with uneven shards and the dims after it is placed `BlockShard`.
It ``is_shard()``, but ``placement == Shard(dim)`` does not find it, and its parts have other sizes than `chunk` gives.

**Memory of shards.** `in_memory_order` returns a shard whose dims are in memory in a given order.

**Gradients of a parameter.** One `GradientReceiver` per parameter takes all its gradients, full or partial, from
autograd and from the local tensors that stand in for a DTensor. `attach_gradient_receiver` replaces the receiver;
`stand_in_for` delivers the gradients of a local leaf. ``vescale.dtensor._gradients`` has the picture and the
guarantees; ``vescale_testing.gradient_receivers`` checks that a receiver keeps them.

**Groups of ranks.** `group_of_ranks` returns one process group per set of ranks. Only its members create it.

**Agreement between ranks.** `differing_texts` compares a text over a process group or mesh and returns the text of
every rank if any two differ. `gather_texts` returns the texts in any case. `describe_difference` returns one sentence
about it, the same on every rank. A `Fact` is something that must be equal; `check_facts` compares facts by one
all-reduce and raises the same error on every rank.
`pair_of` and `is_equal` do it within a maximum that is reduced anyway, `raise_difference` raises the error. `Turns`
says when. `generator_fact`, `input_facts`, `module_facts` and `checksum` make facts.

**Lost ranks.** `Failures` waits for a collective. If it fails, the error names the collective and the lost ranks.
`waits_of` returns the waits for the collectives of a process group, `waits_over` those of the axes of a mesh:
`Waits.run` runs a function of torch.distributed, `Waits.wait` waits for a work. `name_group` says what errors call a
group.

**Exposed communication.** `on_wait` lets a `WaitMeter` measure the waits for collectives of this process. A package
that waits by other means than `Waits` does so inside `waiting`, if there are `METERS`.

**Arguments.** `checked` checks arguments of a public function by their annotations; `Condition`, `one_of` and the types
`Count`, `Size`, `NonNegative` and `FilePath` say which values an annotated type has.

**Nested values.** `leaves`, `tensors_in` and `map_leaves` walk lists, tuples, dicts and, if asked to, dataclasses.

**Random operators in a call.** `random_position` returns the positions of the random streams: two positions are equal
if nothing was drawn between them. Contexts such as ``random.local_batch`` intercept every operator on plain tensors.
`is_watched` and `is_watched_alone` return whether they do; `unwatched` and `watched` switch the interception off and
on. `on_draw` tells an observer of each random operator on DTensors. `PipelineDraws` is what ``vescale-pipe`` finds by
its entry point: a stage of a pipeline moves the generators past what other stages draw. `exchange_moves` puts the moves
of another rank in force, where several ranks live in one process.

**Repeated functions.** ``carriers`` lists functions that return what makes a context like the one around them, or None.
They are called where activation checkpointing runs a function, and backward repeats it in these contexts.

**Implicit redistributions.** `on_implicit_redistribution` tells an observer of each one that communicates.
`sequence_number` returns the number that the next autograd node of this thread gets.

**Exact mode.** `exact_num_blocks` returns the number of blocks of the :func:`vescale.dtensor.exact` around the running
code, or None. What computes on local tensors refuses it, or runs on DTensors instead. Inside of `one_addend`
collectives may add, as all ranks but one have ``-0.0``: data parallelism brings gradients to their places like that. A
dispatch mode that calls every operator with the operands it has got says so by ``_vescale_passes_on = True``, and may
be opened inside.

**Texts.** `bytes_text` and `text_table` format numbers of bytes and tables for reports.

**End of the process.** `wait_for_gloo_threads` prevents an abort by late threads of gloo. Importing ``vescale.dtensor``
registers it; a package that destroys process groups at exit calls it after that.
"""

from __future__ import annotations

from ._checked import CheckedInside, Condition, Count, FilePath, NonNegative, Size, checked, one_of
from ._containers import leaves, map_leaves, tensors_in
from ._exact_context import exact_num_blocks, one_addend
from ._exit import wait_for_gloo_threads
from ._gradients import (
    GradientReceiver,
    aligned_gradient,
    as_gradient,
    attach_gradient_receiver,
    detach_gradient_receiver,
    gets_several_gradients,
    gradient_receiver,
    has_gradient_hooks,
    stand_in_for,
)
from ._layout.agreement import describe_difference, differing_texts, gather_texts
from ._layout.boxes import Box, chunk, flat_range_boxes
from ._layout.groups import group_of_ranks
from ._layout.shards import Piece, local_shape, local_views, pieces
from ._lost_ranks import Failures, first_line
from ._operators.strict import on_implicit_redistribution
from ._placements.memory import in_memory_order
from ._placements.types import BlockShard
from ._random.global_position import in_batch_window
from ._random.pipeline import PipelineDraws
from ._random.rules import on_draw
from ._random.state import Position, exchange_moves, random_position
from ._random.streams import is_watched, is_watched_alone, unwatched, watched
from ._rank_checks import (
    Fact,
    Turns,
    check_facts,
    checksum,
    generator_fact,
    input_facts,
    is_equal,
    module_facts,
    pair_of,
    raise_difference,
)
from ._torch.debugging import sequence_number
from ._torch.recompute import carriers
from ._torch.waits import Waits, name_group, waits_of, waits_over
from ._waiting import METERS, WaitMeter, on_wait, waiting
from .debug._text import bytes_text, text_table

__all__ = [
    "METERS",
    "BlockShard",
    "Box",
    "CheckedInside",
    "Condition",
    "Count",
    "Fact",
    "Failures",
    "FilePath",
    "GradientReceiver",
    "NonNegative",
    "Piece",
    "PipelineDraws",
    "Position",
    "Size",
    "Turns",
    "WaitMeter",
    "Waits",
    "aligned_gradient",
    "as_gradient",
    "attach_gradient_receiver",
    "bytes_text",
    "carriers",
    "check_facts",
    "checked",
    "checksum",
    "chunk",
    "describe_difference",
    "detach_gradient_receiver",
    "differing_texts",
    "exact_num_blocks",
    "exchange_moves",
    "first_line",
    "flat_range_boxes",
    "gather_texts",
    "generator_fact",
    "gets_several_gradients",
    "gradient_receiver",
    "group_of_ranks",
    "has_gradient_hooks",
    "in_batch_window",
    "in_memory_order",
    "input_facts",
    "is_equal",
    "is_watched",
    "is_watched_alone",
    "leaves",
    "local_shape",
    "local_views",
    "map_leaves",
    "module_facts",
    "name_group",
    "on_draw",
    "on_implicit_redistribution",
    "on_wait",
    "one_addend",
    "one_of",
    "pair_of",
    "pieces",
    "raise_difference",
    "random_position",
    "sequence_number",
    "stand_in_for",
    "tensors_in",
    "text_table",
    "unwatched",
    "wait_for_gloo_threads",
    "waiting",
    "waits_of",
    "waits_over",
    "watched",
]
