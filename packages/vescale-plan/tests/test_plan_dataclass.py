"""A plan that exists is valid; a plan that cannot work is refused with the field, the value and the way out."""

import dataclasses
import itertools
import re

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
        ({"cp": 2}, "expected cp=1, since context parallelism does not exist yet, got cp=2; shard activations"),
        (
            {"tp": 4, "etp": 2},
            "expected etp = 1 (whole experts) or etp = tp = 4 (matrices sharded over tp), got",
        ),
        (
            {"dp": 6, "ep": 4},
            "expected dp that dp_replicate * ep = 1 * 4 = 4 divides, got dp = 6; replicas and ranks that spread "
            "experts are data-parallel ranks: use dp = 8, or other degrees",
        ),
        ({"dp": 4, "ep": 2, "dp_replicate": 4, "zero": 1}, "dp_replicate * ep = 4 * 2 = 8 divides, got dp = 4"),
        (
            {"dp": 4, "dp_replicate": 2},
            "expected zero=1, 2 or 3 for dp_replicate=2, which replicates shards, got",
        ),
        ({"granularity": {"w": "rows"}}, "expected zero=1, 2 or 3 for granularity={'w': 'rows'}, which says where"),
        (
            {"offload": True},
            "expected zero=3 for offload=True, which keeps shards of parameters in host memory",
        ),
        ({"units": ["layers"], "zero": 2}, "expected zero=3 for units=['layers'], which names modules"),
        ({"reshard_after_forward": False}, "expected zero=3 for reshard_after_forward=False, which says when"),
        (
            {"units": "layers", "zero": 3},
            "None, or names of modules and regular expressions, as a list, for units",
        ),
        ({"units": ["("], "zero": 3}, "expected regular expressions in units, got '(' (missing ), unterminated"),
        (
            {"zero": 3, "granularity": ["rows"]},
            "expected None or a dict from names of parameters for granularity, got",
        ),
        (
            {"zero": 3, "granularity": {"w": "row"}},
            "expected 'tensor', 'rows', 'expert', ('dim0', rows) or a number of elements for granularity['w'], got",
        ),
        ({"zero": 3, "granularity": {"w": ("dim0", 0)}}, "for granularity['w'], got ('dim0', 0); choose one of them"),
        ({"zero": 3, "granularity": {"w": ("dim1", 2)}}, "for granularity['w'], got ('dim1', 2)"),
        ({"zero": 3, "granularity": {"w": (5,)}}, "for granularity['w'], got (5,)"),
        ({"recompute": 0}, "Plan: expected an integer >= 1 for recompute, got 0"),
        (
            {"recompute": True},
            "a number k for every k-th block, or a list of names of modules and regular",
        ),
        ({"recompute": "layers"}, "for recompute, got 'layers'; write"),
        ({"recompute": []}, "for recompute, got no name; use None for no recomputation"),
        ({"recompute": ["["]}, "expected regular expressions in recompute, got '['"),
        ({"param_dtype": "int8"}, "expected one of None, 'float64', 'float32', 'bfloat16', 'float16' for param_dtype"),
        ({"autocast": "float32"}, "expected one of None, 'bfloat16', 'float16' for autocast, got 'float32'"),
        ({"reduction": "tree"}, "expected one of 'backend', 'ordered' for reduction, got 'tree'"),
        ({"random_stream": "mt"}, "expected one of 'torch', 'philox' for random_stream, got 'mt'"),
        ({"exact": 0}, "Plan: expected an integer >= 1 for exact, got 0"),
        (
            {"exact": 8, "dp": 3},
            "expected exact to be a multiple of dp = 3, whose ranks hold whole blocks, got exact=8; use exact=9",
        ),
        ({"exact": 8, "tp": 16}, "expected exact to be a multiple of tp = 16"),
        ({"exact": 8, "reduce_dtype": "float32"}, "expected reduce_dtype=None for exact=8, got 'float32'"),
        ({"exact": 8, "zero": 3, "offload": True}, "expected offload=False for exact=8, got True"),
        (
            {"clip_grad_norm": 0},
            "expected a positive number or None for clip_grad_norm, got 0; leave it out",
        ),
        ({"clip_grad_norm": float("inf")}, "expected a positive number or None for clip_grad_norm, got inf"),
        ({"clip_grad_norm": True}, "expected a positive number or None for clip_grad_norm, got True"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError) as error:
        Plan(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("zeros", "did you mean 'zero'?"),
        ("sequence_paralel", "did you mean 'sequence_parallel'?"),
        ("color", "leave it out, or use one of dp, tp, pp, "),
    ],
)
def test_a_field_that_does_not_exist_is_refused_with_the_nearest(name, fix):
    with pytest.raises(TypeError, match=re.escape(f"Plan: expected the name of an argument, got {name!r}; {fix}")):
        Plan(**{name: 2})


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


def test_plan_prints_only_what_it_says():
    plan = Plan(
        dp=8,
        tp=2,
        ep=2,
        etp=2,
        zero=3,
        dp_replicate=2,
        mode="static",
        recompute=2,
        reduction="ordered",
        param_dtype="bfloat16",
        master_dtype="float32",
        autocast="bfloat16",
        clip_grad_norm=1,
        units=[r"layers\.\d+"],
        granularity={".*": ["dim0", 4]},
        reshard_after_forward=False,
        offload=True,
        random_stream="philox",
    )
    assert str(plan).splitlines()[1:] == [
        "  dp 8    ZeRO-3, buckets of 25.00 MiB, 2 replicas of the shards, ordered sums, offloaded to host memory, "
        r"parameters kept after forward, units layers\.\d+, .* cut by ('dim0', 4)",
        "  tp 2    module plan auto, static mode, full activations",
        "  pp 1    1f1b, 1 micro-batches, split uniform, bubble 0.0%",
        "  ep 2    experts over these data-parallel ranks, each sharded over tp 2",
        "  numbers parameters bfloat16, masters float32, autocast bfloat16, gradients clipped to norm 1",
        "  recompute every 2. block",
        "  random stream philox",
    ]
    assert "  recompute a, b" in str(Plan(recompute=["a", "b"]))
    assert "  recompute every block" in str(Plan(recompute=1))
    assert "  exact mode of 8 blocks" in str(Plan(exact=8))


def test_diff_has_a_line_for_each_field_that_differs():
    plan = Plan(dp=2, zero=1)
    assert plan.diff(Plan(dp=2, zero=1)) == ""
    for field in dataclasses.fields(Plan):
        if field.name in EXAMPLES:
            other = dataclasses.replace(plan, **EXAMPLES[field.name])
            lines = plan.diff(other).splitlines()
            assert [line.split(":")[0] for line in lines] == [name for name in ORDER if name in EXAMPLES[field.name]]
    assert plan.diff(Plan(dp=4, zero=1)) == "dp: 2 -> 4"


ORDER = [field.name for field in dataclasses.fields(Plan)]
#: For each field another value than the default, with what it needs besides.
EXAMPLES = {
    "dp": {"dp": 4},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "ep": {"ep": 2},
    "etp": {"tp": 2, "etp": 2},
    "zero": {"zero": 2},
    "dp_replicate": {"dp_replicate": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "schedule": {"schedule": "gpipe"},
    "num_microbatches": {"num_microbatches": 2},
    "stages_per_rank": {"schedule": "auto", "stages_per_rank": 2},
    "split": {"pp": 2, "split": ("layers.1",)},
    "module_plan": {"module_plan": "llama"},
    "mode": {"mode": "static"},
    "recompute": {"recompute": (r"layers\.\d+",)},
    "reduction": {"reduction": "ordered"},
    "param_dtype": {"param_dtype": "bfloat16"},
    "grad_dtype": {"grad_dtype": "float32"},
    "reduce_dtype": {"reduce_dtype": "float32"},
    "master_dtype": {"master_dtype": "float32"},
    "state_dtype": {"state_dtype": "bfloat16"},
    "autocast": {"autocast": "float16"},
    "clip_grad_norm": {"clip_grad_norm": 0.5},
    "bucket_bytes": {"bucket_bytes": 1},
    "units": {"zero": 3, "units": ("layers",)},
    "granularity": {"granularity": {"a": "rows", "b": ("dim0", 2), "c": 128}},
    "reshard_after_forward": {"zero": 3, "reshard_after_forward": False},
    "offload": {"zero": 3, "offload": True},
    "random_stream": {"random_stream": "philox"},
    "exact": {"exact": 8},
    "device": {"device": "cuda"},
    "axis_order": {"axis_order": ("dp", "pp", "tp")},
    "limit_bytes": {"limit_bytes": 2**30},
}
#: Fields without another valid value, and those that generate_plan fills.
OTHERS = {"cp", "memory", "table"}


def test_every_field_survives_json_and_has_an_example():
    assert set(ORDER) == {*EXAMPLES, *OTHERS}, "a new field needs an example"
    for fields in EXAMPLES.values():
        plan = dataclasses.replace(Plan(dp=2, zero=1), **fields)
        found = Plan.from_json(plan.to_json())
        assert found == plan
        assert hash(found) == hash(plan)
        assert repr(found) == repr(plan)


def test_a_plan_does_not_change_with_what_it_was_made_of():
    granularity, units = {"a": "rows"}, ["layers"]
    plan = Plan(zero=3, granularity=granularity, units=units)
    granularity["b"], units[0] = "tensor", "blocks"
    assert (plan.granularity, plan.units) == ({"a": "rows"}, ("layers",))


def test_plan_written_by_hand_says_that_there_is_no_table():
    assert "written by hand and has no table" in Plan(dp=2).explain()
