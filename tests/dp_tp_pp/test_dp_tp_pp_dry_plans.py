"""On torch's fake process group `vescale.parallelize` gives one process what a rank of the plan's world has."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale
from vescale.dtensor import deferred_init
from vescale_testing import halved, run_ranks

PLANS = {
    "tp pp": vescale.Plan(tp=2, pp=2, num_microbatches=2),
    "dp tp pp, static, ZeRO 3, V": vescale.Plan(
        dp=2, tp=2, pp=2, zero=3, num_microbatches=4, schedule="zb_v", mode="static"
    ),
    "dp pp, ZeRO 2": vescale.Plan(dp=2, pp=2, zero=2, num_microbatches=2, schedule="zb_h1"),
    "dp tp": vescale.Plan(dp=2, tp=2, zero=1),
}


def what_a_rank_has(plan, kind, *, deferred):
    """Return the forms of parameters, gradients and optimizer states after a step, and what crosses stages."""
    torch.manual_seed(0)
    made = deferred_init(kind) if deferred else kind()
    adamw = functools.partial(torch.optim.AdamW, lr=0.1)
    model, optimizer = vescale.parallelize(plan, made, adamw, clip_grad_norm=1.0, module_plan=kind.module_plan)
    found = {f"{name}: parameter": form(p) for name, p in model.named_parameters()}
    output = model(**model.local_batch({"x": torch.ones(8, kind.width)}))
    (output.loss if model.engine else output).backward()
    found |= {f"{name}: gradient": form(p.grad) for name, p in model.named_parameters()}
    found["transfers"] = model.engine.transfers if model.engine else None
    optimizer.step()
    for name, values in optimizer.state_dict()["state"].items():
        found |= {f"{name}: {key}": form(value) for key, value in values.items()}
    return found


def form(value):
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return type(value).__name__, tuple(value.shape), value.dtype, getattr(value, "placements", None)


def dry(rank, plan, kind, *, deferred=False):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        return what_a_rank_has(plan, kind, deferred=deferred)
    finally:
        dist.destroy_process_group()


@halved
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_has_what_it_has_in_the_real_world(plan, is_deferred, layers_class):
    plan = PLANS[plan]
    every_third = range(0, plan.world_size, 3)
    expected = run_ranks(what_a_rank_has, plan.world_size, plan, layers_class, deferred=is_deferred)

    def dry_ones():
        return [dry(rank, plan, layers_class, deferred=is_deferred) for rank in every_third]

    (found,) = run_ranks(dry_ones, 1, backend=None)
    assert found == [expected[rank] for rank in every_third]
    assert any(name.endswith("exp_avg") for name in found[0])


def test_another_plan_has_other_forms(layers_class):
    plans = PLANS["tp pp"], PLANS["dp pp, ZeRO 2"]
    ((first, second),) = run_ranks(lambda: [dry(0, plan, layers_class) for plan in plans], 1, backend=None)
    assert first != second
