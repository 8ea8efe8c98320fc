"""`Plan(tp=2)` alone trains models that no ready plan knows as one process does, in eager and in static mode.

So do `Plan(tp=4)`, and `Plan(dp=2, tp=2)` on the rows of each rank. By default a family of each kind, and few on four
ranks; `-m thorough` runs all of them.
"""

import functools
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import vescale
from vescale import Plan
from vescale.dmodule.plans import derive
from vescale_testing import gather_full, keep_float64, run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
models = importlib.import_module("models")
sys.path.pop(0)

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1)
STEPS = 2
ORDINARY = ("falcon with alibi", "falcon of groups", "gpt_oss", "nanogpt", "encoder", "bert", "opt", "deepseek_v3")


def train_on_one(family):
    model = models.build(family)
    with keep_float64():
        return record(family, model, model, OPTIMIZER(model.parameters()))


def record(family, module, model, optimizer, plan=None):
    """Train some steps; return losses, parameters and the random state."""
    torch.manual_seed(1)
    found = {}
    for step in range(STEPS):
        output = model(**rows_of_rank(models.example(family, module, step), plan))
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = mean_over_ranks(gather_full(loss.detach()), plan)
    found |= {name: gather_full(p.detach()) for name, p in module.named_parameters()}
    return {**found, "random state": torch.get_rng_state().double()}


def rows_of_rank(inputs, plan):
    if plan is None or plan.dp == 1:
        return inputs
    number = dist.get_rank() // plan.tp
    return {name: v.chunk(plan.dp)[number] if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


def mean_over_ranks(loss, plan):
    if plan is None or plan.dp == 1:
        return loss
    dist.all_reduce(loss)
    return loss / plan.world_size


def train_on_ranks(family, plan, module_plan=None):
    module = models.build(family)
    with keep_float64():
        inputs = models.example(family, module, 0)
        model, optimizer = vescale.parallelize(
            plan, module, OPTIMIZER, module_plan=module_plan, example_inputs=inputs, row_wise=row_wise(module)
        )
        return record(family, module, model, optimizer, plan)


def row_wise(module):
    """Experts select rows by routes."""
    return [name for name, part in module.named_modules() if name.endswith(".experts")]


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        distance = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert distance < 1e-10, f"{name}: {distance}"


def check(family, *plans):
    expected = train_on_one(family)

    def on_a_rank():
        return [train_on_ranks(family, plan) for plan in plans]

    for records in run_ranks(on_a_rank, plans[0].world_size, timeout=300):
        for found in records:
            assert_equal(found, expected)


@pytest.mark.parametrize("family", ORDINARY)
def test_a_family_trains_as_on_one_process(family):
    check(family, Plan(tp=2), Plan(tp=2, mode="static"))


@pytest.mark.thorough
@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name not in ORDINARY])
def test_the_other_families_train_as_on_one_process(family):
    check(family, Plan(tp=2), Plan(tp=2, mode="static"))


FOUR = (Plan(tp=4), Plan(tp=4, mode="static"), Plan(dp=2, tp=2), Plan(dp=2, tp=2, mode="static"))


@pytest.mark.parametrize("family", ["nanogpt", "vit"])
def test_a_family_on_four_ranks(family):
    check(family, FOUR[0], FOUR[3])


@pytest.mark.thorough
@pytest.mark.parametrize("family", models.FAMILIES)
def test_all_families_on_four_ranks(family):
    check(family, *FOUR)


def test_a_wrong_placement_is_seen():
    """Fused queries, keys and values in chunks instead of a strip of each, with sizes as for strips."""
    model = models.build("nanogpt")
    plan = derive(model, models.example("nanogpt", model, 0), degree=2).plan
    right = dict(plan["parameter"])
    (key,) = (key for key in right if "c_attn" in key)
    plan["parameter"] = {**right, key: {"tp": Shard(0)}}

    def on_a_rank():
        with pytest.raises(vescale.dmodule.ImplicitRedistributionError, match=r"h\.0\.attn"):
            train_on_ranks("nanogpt", Plan(tp=2), plan)

    run_ranks(on_a_rank, 2)


def test_what_is_replicated_is_logged(caplog):
    def on_a_rank():
        with caplog.at_level("INFO", "vescale"):
            train_on_ranks("nanogpt", Plan(tp=2))
        (text,) = (message for message in caplog.messages if message.startswith("derived a plan for Nano over tp=2"))
        assert "wpe.weight  it is neither half of a pair" in text

    run_ranks(on_a_rank, 2)
