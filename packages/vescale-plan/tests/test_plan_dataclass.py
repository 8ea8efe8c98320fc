"""A plan that exists is valid; a plan that cannot work is refused with the field, the value and the way out."""

import dataclasses
import itertools

import pytest

from vescale.plan import Plan


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 0}, "Plan: expected an integer >= 1 for dp, got 0"),
        ({"tp": -2}, "Plan: expected an integer >= 1 for tp, got -2"),
        ({"pp": 1.0}, "Plan: expected an integer >= 1 for pp, got 1.0"),
        ({"dp": True}, "Plan: expected an integer >= 1 for dp, got True"),
        ({"num_microbatches": 0}, "Plan: expected an integer >= 1 for num_microbatches, got 0"),
        ({"bucket_bytes": 0}, "Plan: expected an integer >= 1 for bucket_bytes, got 0"),
        ({"zero": 4}, "Plan: expected one of 0, 1, 2, 3 for zero, got 4"),
        ({"zero": True}, "Plan: expected one of 0, 1, 2, 3 for zero, got True"),
        ({"schedule": "zbv"}, "Plan: expected one of '1f1b', 'gpipe', 'zb_h1', 'zb_h2', 'zb_v', "),
        (
            {"schedule": "zb_v", "stages_per_rank": 2},
            "expected stages_per_rank=None for schedule 'zb_v'",
        ),
        ({"schedule": "auto", "stages_per_rank": 0}, "Plan: expected an integer >= 1 for stages_per_rank, got 0"),
        (
            {"pp": 2, "schedule": "looped_bfs", "stages_per_rank": 3, "split": ["a"]},
            "expected 5 different FQNs in split for pp = 2 and 3 stages per rank, got ['a']",
        ),
        (
            {"pp": 2, "schedule": "zb_v", "split": [["a"], ["b"]]},
            "expected 4 lists in split for pp = 2 and 2 stages",
        ),
        ({"device": "tpu"}, "Plan: expected one of 'cpu', 'cuda' for device, got 'tpu'"),
        ({"mode": "dynamic"}, "Plan: expected one of 'eager', 'static', 'compile' for mode, got 'dynamic'"),
        ({"sequence_parallel": 1}, "Plan: expected True or False for sequence_parallel, got 1"),
        ({"sequence_parallel": True}, "expected tp > 1 for sequence_parallel, got tp = 1; set tp > 1"),
        ({"module_plan": ""}, "expected the name of a ready plan or None for module_plan, got ''"),
        ({"axis_order": ("dp", "tp")}, "expected 'pp', 'dp' and 'tp' once each in axis_order, got ('dp', 'tp')"),
        (
            {"split": "balanced"},
            "expected 'uniform', a list of FQNs or one list of FQNs per stage for split, got 'balanced'",
        ),
        ({"pp": 2, "split": [["a"], "b"]}, "expected 'uniform', a list of FQNs or one list of FQNs per stage"),
        ({"pp": 2, "split": [["a"], ["b"], ["c"]]}, "expected 2 lists in split for pp = 2, got 3; write one"),
        ({"pp": 3, "split": ["layers.2"]}, "expected 2 different FQNs in split for pp = 3"),
        ({"pp": 3, "split": ["layers.2", "layers.2"]}, "expected 2 different FQNs in split for pp = 3"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError) as error:
        Plan(**fields)
    assert message in str(error.value)


def test_world_size_is_checked_with_the_way_out():
    plan = Plan(dp=2, tp=2, pp=2)
    plan.check_world(8)
    with pytest.raises(ValueError) as error:
        plan.check_world(6)
    assert str(error.value) == (
        "Plan: expected dp * tp * pp = 2 * 2 * 2 = 8 processes, got 6; start 8 (torchrun --nproc-per-node 8), "
        "or choose degrees with the product 6"
    )


def test_every_small_world_has_the_product_as_its_size():
    for dp, tp, pp in itertools.product(range(1, 5), repeat=3):
        plan = Plan(dp=dp, tp=tp, pp=pp)
        assert plan.world_size == dp * tp * pp
        for world in range(1, 65):
            if world == dp * tp * pp:
                plan.check_world(world)
            else:
                with pytest.raises(ValueError, match=f"processes, got {world};"):
                    plan.check_world(world)


def test_batch_is_checked_with_the_nearest_that_divide():
    plan = Plan(dp=2, num_microbatches=4)
    plan.check_batch(16)
    with pytest.raises(ValueError) as error:
        plan.check_batch(12)
    assert str(error.value) == (
        "expected a multiple of dp * num_microbatches = 2 * 4 = 8 as the global batch size, got 12; use 8 or 16"
    )
    with pytest.raises(ValueError, match=r"use 8$"):
        plan.check_batch(3)


def test_mesh_shape_follows_the_axis_order():
    assert Plan(dp=2, tp=3, pp=4).mesh_shape == (4, 2, 3)
    assert Plan(dp=2, tp=3, pp=4, axis_order=("tp", "dp", "pp")).mesh_shape == (3, 2, 4)


def test_plan_is_frozen_and_replaceable():
    plan = Plan(dp=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dp = 4
    assert dataclasses.replace(plan, dp=4).world_size == 4
    with pytest.raises(ValueError, match="expected an integer >= 1 for dp"):
        dataclasses.replace(plan, dp=0)


def test_plan_prints_what_runs():
    text = str(Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=4, sequence_parallel=True, module_plan="mixtral"))
    assert text == (
        "Plan: 8 processes on cpu = pp 2 x dp 2 x tp 2\n"
        "  dp 2    ZeRO-1, buckets of 25.00 MiB\n"
        "  tp 2    module plan mixtral, eager mode, sequence parallel\n"
        "  pp 2    1f1b, 4 micro-batches, split uniform, bubble 20.0%"
    )
    assert "1 process on cpu" in str(Plan())


def test_plan_written_by_hand_says_that_there_is_no_table():
    assert "written by hand and has no table" in Plan(dp=2).explain()
