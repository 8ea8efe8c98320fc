"""Derived plans are the ready plans of the families that have one: the same shards, and no more bytes."""

import itertools

import pytest
import torch

from vescale.dmodule import describe, parallelize_module, plans
from vescale.dtensor import debug, init_device_mesh
from vescale_testing import keep_float64, ranks

TOKENS = {"input_ids": torch.ones(4, 8, dtype=torch.int64)}


def bytes_of_a_step(model, plan, mesh):
    ids = torch.randint(0, 255, (4, 8), generator=torch.Generator().manual_seed(1))
    model = parallelize_module(model, mesh, plan)
    with debug.comm_log(model) as log, keep_float64():
        model(input_ids=ids, labels=ids).loss.backward()
    return log.total_bytes


def check(build, families, degree, sequence_parallel=False):
    pairs = {}
    for family in families:
        derived = plans.derive(build(family), TOKENS, degree=degree, sequence_parallel=sequence_parallel)
        ready = plans.plan_for(build(family), degree=degree, sequence_parallel=sequence_parallel)
        layouts = [describe(build(family), {"tp": degree}, plan) for plan in (derived.plan, ready)]
        assert layouts[0] == layouts[1], family
        pairs[family] = derived.plan, ready

    def on_a_rank():
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
        for family, both in pairs.items():
            derived, ready = (bytes_of_a_step(build(family), plan, mesh) for plan in both)
            assert 0 < derived <= ready, family

    ranks(degree, timeout=900)(on_a_rank)()


def test_norms_over_all_heads_and_heads_merged_with_queries(build):
    check(build, ["olmo2", "phi3"], 2)


def test_fewer_heads_than_ranks(build):
    check(build, ["qwen2"], 4)


def test_a_plan_that_shards_less_is_seen(build):
    plan = plans.derive(build("llama"), TOKENS, degree=2).plan
    plan["parameter"] = {key: entry for key, entry in plan["parameter"].items() if "lm_head" not in key}
    assert describe(build("llama"), {"tp": 2}, plan) != describe(build("llama"), {"tp": 2}, plans.llama())


@pytest.mark.thorough
@pytest.mark.parametrize(("degree", "sequence_parallel"), list(itertools.product([2, 4], [False, True])))
def test_all_families(build, degree, sequence_parallel):
    check(build, sorted(plans.FAMILIES), degree, sequence_parallel)
