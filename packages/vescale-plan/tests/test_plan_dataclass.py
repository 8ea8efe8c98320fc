"""A plan that exists is valid; a plan that cannot work is refused with the field, the value and the way out."""

import dataclasses
import itertools

import pytest

from vescale.plan import Plan


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 0}, "Plan: dp must be an integer >= 1, got 0"),
        ({"tp": -2}, "Plan: tp must be an integer >= 1, got -2"),
        ({"pp": 1.0}, "Plan: pp must be an integer >= 1, got 1.0"),
        ({"dp": True}, "Plan: dp must be an integer >= 1, got True"),
        ({"num_microbatches": 0}, "Plan: num_microbatches must be an integer >= 1, got 0"),
        ({"bucket_bytes": 0}, "Plan: bucket_bytes must be an integer >= 1, got 0"),
        ({"zero": 4}, "Plan: zero must be one of 0, 1, 2, 3, got 4"),
        ({"zero": True}, "Plan: zero must be one of 0, 1, 2, 3, got True"),
        ({"schedule": "zbv"}, "Plan: schedule must be one of '1f1b', 'gpipe', got 'zbv'"),
        ({"device": "tpu"}, "Plan: device must be one of 'cpu', 'cuda', got 'tpu'"),
        ({"mode": "dynamic"}, "Plan: mode must be one of 'eager', 'static', 'compile', got 'dynamic'"),
        (
            {"mode": "static", "pp": 2, "num_microbatches": 4},
            "Plan: expected mode 'eager' for pp = 2 and num_microbatches = 4, got 'static'; use mode='eager', or "
            "pp=1 and num_microbatches=1",
        ),
        ({"sequence_parallel": 1}, "Plan: sequence_parallel must be True or False, got 1"),
        ({"sequence_parallel": True}, "expected tp > 1 for sequence_parallel, got tp = 1; set tp > 1"),
        ({"module_plan": ""}, "module_plan must be the name of a ready plan or None, got ''"),
        ({"axis_order": ("dp", "tp")}, "axis_order must hold 'pp', 'dp' and 'tp' once each, got ('dp', 'tp')"),
        (
            {"split": "balanced"},
            "split must be 'uniform', a list of FQNs or one list of FQNs per stage, got 'balanced'",
        ),
        ({"pp": 2, "split": [["a"], "b"]}, "split must be 'uniform', a list of FQNs or one list of FQNs per stage"),
        ({"pp": 2, "split": [["a"], ["b"], ["c"]]}, "split needs 2 lists for pp = 2, got 3"),
        ({"pp": 3, "split": ["layers.2"]}, "split needs 2 different FQNs for pp = 3"),
        ({"pp": 3, "split": ["layers.2", "layers.2"]}, "split needs 2 different FQNs for pp = 3"),
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
        "world size 6 is not dp*tp*pp = 2*2*2 = 8: start 8 processes, or choose degrees whose product is 6"
    )


def test_every_small_world_has_the_product_as_its_size():
    for dp, tp, pp in itertools.product(range(1, 5), repeat=3):
        plan = Plan(dp=dp, tp=tp, pp=pp)
        assert plan.world_size == dp * tp * pp
        for world in range(1, 65):
            if world == dp * tp * pp:
                plan.check_world(world)
            else:
                with pytest.raises(ValueError, match=f"world size {world} is not"):
                    plan.check_world(world)


def test_batch_is_checked_with_the_nearest_that_divide():
    plan = Plan(dp=2, num_microbatches=4)
    plan.check_batch(16)
    with pytest.raises(ValueError) as error:
        plan.check_batch(12)
    assert str(error.value) == "global batch 12 is not divisible by dp * num_microbatches = 2 * 4 = 8: use 8 or 16"
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
    with pytest.raises(ValueError, match="dp must be"):
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
