"""The search: exhaustive over small worlds, the first in the order of preference that fits, precise refusals."""

import dataclasses
import itertools
import math

import pytest
from torch import nn

from vescale.plan import (
    Cluster,
    Constraints,
    NoPlanFitsError,
    Plan,
    StateBytes,
    estimate_memory,
    generate_plan,
    profile,
)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 128,
}
GIB = 2**30


@pytest.fixture
def small(build_mixtral):
    """Profile of a small Mixtral: 6 blocks, 4 heads, 2 key/value heads, 4 experts."""
    return profile(build_mixtral(**SMALL))


def run(**kwargs):
    return Constraints(**{"global_batch_size": 24, "sequence_length": 32, **kwargs})


def test_the_table_has_every_factorization(small):
    for devices in range(1, 33):
        divisors = [degree for degree in range(1, devices + 1) if devices % degree == 0]
        expected = {each for each in itertools.product(divisors, repeat=3) if math.prod(each) == devices}
        table = generate_plan(small, Cluster(devices, memory_bytes=GIB), run(global_batch_size=devices)).table
        assert len(table) == len(set(table))
        assert {(row.layout.dp, row.layout.tp, row.layout.pp) for row in table} == expected


@pytest.mark.parametrize("memory_kib", [1000, 1500, 2000, 3000, 10**6])
def test_small_worlds_exhaustively(small, memory_kib):
    """Every plan obeys every rule and fits; where none is found, no layout that obeys the rules fits."""
    for devices in range(1, 33):
        cluster = Cluster(devices, memory_bytes=memory_kib * 1024, device="cpu")
        try:
            plan = generate_plan(small, cluster, run())
        except NoPlanFitsError as error:
            fitting = [row for row in error.table if row.verdict != "refused"]
            if fitting:
                pytest.fail(f"refused although {fitting[0].layout} fits")
            continue
        plan.check_world(devices)
        plan.check_batch(24)
        assert (4 % plan.tp, 4 % (plan.tp * plan.ep)) == (0, 0)
        assert plan.pp <= 6
        assert plan.sequence_parallel == (plan.tp > 1)
        assert max(stage.total for stage in plan.memory) <= plan.limit_bytes == int(0.9 * cluster.memory_bytes)
        assert plan.memory == estimate_memory(small, plan.layout, global_batch_size=24, sequence_length=32)
        assert [row.layout for row in plan.table if row.verdict == "chosen"] == [plan.layout]
        before = itertools.takewhile(lambda row: row.verdict != "chosen", plan.table)
        assert all(row.verdict == "refused" and row.reason for row in before)
        assert all(row.bytes_per_rank <= plan.limit_bytes for row in plan.table if row.verdict == "fits")


def test_some_memory_limits_are_refused_and_some_are_not(small):
    """Or the test above would say nothing."""
    generate_plan(small, Cluster(8, memory_bytes=2000 * 1024), run())
    with pytest.raises(NoPlanFitsError):
        generate_plan(small, Cluster(8, memory_bytes=50 * 1024), run())


def test_search_is_deterministic(small):
    cluster = Cluster(16, memory_bytes=2000 * 1024)
    assert generate_plan(small, cluster, run()).to_json() == generate_plan(small, cluster, run()).to_json()


def test_order_of_preference(small):
    """Enough memory: pure data parallel. Less: the table's order is host, bubble, tp * pp, tp, ZeRO, micro-batches."""
    plan = generate_plan(small, Cluster(8, memory_bytes=GIB, devices_per_host=8), run())
    assert (plan.dp, plan.tp, plan.pp, plan.zero, plan.num_microbatches) == (8, 1, 1, 0, 1)
    layouts = [row.layout for row in plan.table if row.bytes_per_rank is not None]
    keys = [(it.bubble > 0.25, it.tp * it.pp, it.tp, it.zero, it.num_microbatches) for it in layouts]
    assert keys == sorted(keys)
    assert len({it.zero for it in layouts}) == 4


def test_tensor_parallel_across_hosts_comes_last(small):
    plan = generate_plan(small, Cluster(2, memory_bytes=GIB, devices_per_host=1), run())
    assert [row.layout.tp for row in plan.table][-1] == 2
    assert plan.tp == 1


def test_pipelines_take_the_most_micro_batches(small):
    plan = generate_plan(small, Cluster(2, memory_bytes=GIB), run(pp=2))
    assert (plan.pp, plan.num_microbatches) == (2, 24)
    assert generate_plan(small, Cluster(2, memory_bytes=GIB), run(pp=2, max_microbatches=7)).num_microbatches == 6


def test_accumulation_is_tried_when_the_batch_is_too_large(small):
    """One device, activations decide: the fewest micro-batches that fit."""
    roomy = generate_plan(small, Cluster(1, memory_bytes=100 * GIB), run(sequence_length=4096))
    bytes_of = {row.layout.num_microbatches: row.bytes_per_rank for row in roomy.table}
    limit = (bytes_of[3] + bytes_of[4]) // 2
    tight = generate_plan(small, Cluster(1, memory_bytes=limit), run(sequence_length=4096, memory_fraction=1.0))
    assert (roomy.num_microbatches, tight.num_microbatches) == (1, 4)


@pytest.mark.parametrize(
    "fixed",
    [
        {"dp": 2},
        {"tp": 2},
        {"pp": 2},
        {"dp": 2, "tp": 2, "pp": 2},
        {"zero": 2},
        {"zero": 3},
        {"num_microbatches": 3, "dp": 4},
    ],
)
def test_fixed_choices_are_kept(small, fixed):
    plan = generate_plan(small, Cluster(8, memory_bytes=GIB), run(**fixed))
    assert {name: getattr(plan, name) for name in fixed} == fixed


def test_sequence_parallelism_follows_the_sequence(small):
    cluster = Cluster(2, memory_bytes=GIB)
    assert generate_plan(small, cluster, run(tp=2)).sequence_parallel
    assert not generate_plan(small, cluster, run(tp=2, sequence_length=33)).sequence_parallel
    assert not generate_plan(small, cluster, run(tp=2, sequence_parallel=False)).sequence_parallel
    with pytest.raises(NoPlanFitsError, match="sequence length 33 is not divisible by tp = 2"):
        generate_plan(small, cluster, run(tp=2, sequence_length=33, sequence_parallel=True))


@pytest.mark.parametrize(
    ("change", "fixed", "reason"),
    [
        ({}, {"tp": 8}, "4 attention heads are not divisible by tp = 8"),
        ({"heads": 8, "kv_heads": 3}, {"tp": 8}, "3 key/value heads do not divide 8 heads, so tp = 8 has no copies"),
        ({"heads": 8, "kv_heads": 8}, {"tp": 8}, "4 experts are not divisible by tp = 8"),
        ({"heads": 8, "kv_heads": 8, "experts": 0, "ffn": 100}, {"tp": 8}, "100 feed-forward size are not divisible"),
        ({"heads": 0, "kv_heads": 0}, {"tp": 2}, "no attention heads found: give them with dataclasses.replace"),
        ({"refusals": {"tp": "there is no module plan for it"}}, {"tp": 2}, "there is no module plan for it"),
        ({"refusals": {"pp": "it has no stages"}}, {"pp": 2}, "it has no stages"),
        ({"refusals": {"zero": "it has tied weights"}}, {"dp": 8, "zero": 1}, "it has tied weights"),
        ({}, {"pp": 8}, "6 blocks cannot fill 8 stages"),
        ({}, {"dp": 8, "global_batch_size": 12}, "global batch 12 is not divisible by dp = 8"),
        ({}, {"dp": 4, "num_microbatches": 4}, "global batch 24 is not divisible by dp * micro-batches = 16"),
    ],
)
def test_refusals_say_why(small, change, fixed, reason):
    with pytest.raises(NoPlanFitsError) as error:
        generate_plan(dataclasses.replace(small, **change), Cluster(8, memory_bytes=GIB), run(**fixed))
    assert reason in str(error.value)
    assert reason in error.value.explain()


def test_tensor_parallelism_is_asked_for_degrees_that_are_needed(small):
    """A function says which parameters a degree shards, and what it lacks; heads of the profile do not matter then."""
    asked = []

    def under(tp):
        asked.append(tp)
        if tp == 2:
            return dataclasses.replace(small, refusals={"tp": "odd"})
        whole = tuple(dataclasses.replace(info, sharded=False) for info in small.parameters)
        return dataclasses.replace(small, parameters=whole, refusals={"sequence_parallel": "no ready plan"})

    cluster = Cluster(8, memory_bytes=GIB)
    roomy = generate_plan(small, cluster, run(), tensor_parallel=under)
    assert (roomy.tp, asked) == (1, [])
    assert {row.verdict for row in roomy.table if row.layout.tp > 1} == {"open"}
    assert Plan.from_json(roomy.to_json()) == roomy
    with pytest.raises(NoPlanFitsError, match="odd"):
        generate_plan(small, cluster, run(tp=2), tensor_parallel=under)
    replicated = generate_plan(small, cluster, run(tp=8), tensor_parallel=under)
    assert (replicated.sequence_parallel, asked) == (False, [2, 8])
    assert replicated.memory[0].parameters == generate_plan(small, cluster, run(dp=8, zero=0)).memory[0].parameters
    with pytest.raises(NoPlanFitsError, match="no ready plan"):
        generate_plan(small, cluster, run(tp=8, sequence_parallel=True), tensor_parallel=under)


def test_tensor_parallelism_may_be_known_for_all_degrees(small):
    cluster = Cluster(8, memory_bytes=GIB)
    plan = generate_plan(small, cluster, run(), tensor_parallel={2: small, 8: small})
    reasons = {row.layout.tp: row.reason for row in plan.table}
    assert reasons[4] == "no profile was given for tp = 4"
    assert {row.verdict for row in plan.table if row.layout.tp == 2} >= {"fits"}
    assert "open" not in {row.verdict for row in plan.table}


def test_tied_parameters_of_two_stages(build_mixtral):
    """The head has the embedding's weight: first and last stage share it, but not with ZeRO 3."""
    tied = profile(build_mixtral(tied=True, **SMALL))
    assert generate_plan(tied, Cluster(2, memory_bytes=GIB), run(pp=2)).pp == 2
    assert generate_plan(tied, Cluster(2, memory_bytes=GIB), run(zero=3)).pp == 1
    with pytest.raises(NoPlanFitsError, match=r"model\.embed_tokens\.weight is tied .* cannot share with zero = 3"):
        generate_plan(tied, Cluster(2, memory_bytes=GIB), run(pp=2, zero=3))


def test_impossible_product_is_refused(small):
    with pytest.raises(NoPlanFitsError, match=r"expected degrees with the product 8, .*, got dp=3; leave one of them"):
        generate_plan(small, Cluster(8, memory_bytes=GIB), run(dp=3))


def test_nearest_miss_is_named_with_its_bytes(small):
    with pytest.raises(NoPlanFitsError) as error:
        generate_plan(small, Cluster(4, memory_bytes=100 * 1024), run())
    nearest = min((row for row in error.value.table if row.bytes_per_rank), key=lambda row: row.bytes_per_rank)
    text = str(error.value)
    assert text.startswith(
        "expected a plan for 4 cuda devices with at most 90.00 KiB per rank (0.9 of 100.00 KiB), got "
    )
    assert str(nearest.layout) in text
    assert nearest.reason in text
    assert "over the limit; use more devices, a smaller batch or sequence, or fewer fixed choices" in text


def test_model_without_tensor_parallelism():
    """No blocks and no heads: dp is all that is left, and the table says why."""
    plan = generate_plan(nn.Linear(64, 64), Cluster(4, memory_bytes=GIB), run())
    assert (plan.dp, plan.tp, plan.pp) == (4, 1, 1)
    assert "0 blocks cannot fill 2 stages" in plan.explain()


def test_state_bytes_decide_what_fits(small):
    """Master copies make a plan need more: ZeRO-1 where ZeRO-0 was enough."""
    light = generate_plan(small, Cluster(4, memory_bytes=GIB), run(dp=4))
    limit = max(stage.total for stage in light.memory)
    cluster = Cluster(4, memory_bytes=limit)
    heavy = run(dp=4, memory_fraction=1.0, state_bytes=StateBytes(2, 2, 12))
    assert generate_plan(small, cluster, run(dp=4, memory_fraction=1.0)).zero == 0
    assert generate_plan(small, cluster, heavy).zero > 0


def test_table_shows_the_chosen_row_even_if_it_is_short(small):
    plan = generate_plan(small, Cluster(8, memory_bytes=2000 * 1024), run())
    rows = plan.explain(max_rows=2).splitlines()
    assert any(row.endswith("chosen") for row in rows)
    assert any("rows more" in row for row in rows)
    assert isinstance(plan, Plan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0, memory_bytes=1), "Cluster: expected an integer >= 1 for num_devices, got 0"),
        (lambda: Cluster(1, memory_bytes=1.5), "Cluster: expected an integer >= 1 for memory_bytes, got 1.5"),
        (
            lambda: Cluster(1, memory_bytes=1, device="gpu"),
            "Cluster: expected one of 'cpu', 'cuda' for device, got 'gpu'",
        ),
        (lambda: run(global_batch_size=0), "Constraints: expected an integer >= 1 for global_batch_size, got 0"),
        (lambda: run(tp=0), "Constraints: expected an integer >= 1 for tp, got 0"),
        (lambda: run(zero=4), "Constraints: expected one of 0, 1, 2, 3 for zero, got 4"),
        (lambda: run(schedule="zb"), "Constraints: expected one of '1f1b', 'gpipe', 'zb_h1', 'zb_h2',"),
        (lambda: run(memory_fraction=1.5), "Constraints: expected a number in (0, 1] for memory_fraction, got 1.5"),
        (lambda: run(sequence_parallel=2), "Constraints: expected True or False for sequence_parallel, got 2"),
    ],
)
def test_bad_clusters_and_constraints_are_refused(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
