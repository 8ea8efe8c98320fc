"""The memory model's stages and micro-batches in flight are those that the pipeline runs."""

import itertools

import pytest
from torch import nn

from vescale.pipe import Action, PipelinePlan, simulate, split_units
from vescale.plan._checks import ALL_SCHEDULES
from vescale.plan._schedules import microbatches_in_flight, rank_of_stage, stage_blocks, stages_per_rank

LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "auto")) for name in ALL_SCHEDULES]
)
def test_no_rank_keeps_more_than_the_memory_model_counts(schedule):
    excess = []
    # a search takes long
    sizes, multiples = ((2, 3), (1, 2)) if schedule == "auto" else ((2, 3, 4, 8), (1, 2, 3))
    for pp, times, stages in itertools.product(sizes, multiples, (2, 3) if schedule in LOOPED else (None,)):
        number = pp * times * (2 if schedule == "dual_pipe_v" else 1)
        plan = PipelinePlan(schedule, number, stages_per_rank=stages)
        v = stages_per_rank(schedule, stages)
        kept = simulate(plan.actions(pp)).peak_activations
        counted = [microbatches_in_flight(schedule, pp, number, rank, v) for rank in range(pp)]
        excess += [one - other for one, other in zip(counted, kept, strict=True)]
    assert min(excess) > -1e-9
    assert min(excess) < 1e-9  # of some rank it is what the model counts


@pytest.mark.parametrize("schedule", [name for name in ALL_SCHEDULES if name != "auto"])
def test_stages_lie_on_the_ranks_that_run_them(schedule):
    actions = PipelinePlan(schedule, 8).actions(4)
    found = {
        action.stage: rank for rank, row in enumerate(actions.ranks) for action in row if isinstance(action, Action)
    }
    assert found == {stage: rank_of_stage(stage, 4, schedule) for stage in found}
    assert len(found) == 4 * stages_per_rank(schedule)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("num_blocks", [5, 7, 12])
def test_blocks_lie_on_the_stages_of_the_uniform_split(num_blocks, num_stages):
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(num_blocks)), "head": nn.Linear(2, 2)}
    )
    split = split_units(model, PipelinePlan(), num_stages)
    found = [tuple(name for name in units if name != "head") for units in split.stages]
    expected = [tuple(f"layers.{block}" for block in blocks) for blocks in stage_blocks(num_blocks, num_stages)]
    assert found == expected
