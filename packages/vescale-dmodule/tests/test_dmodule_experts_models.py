"""Whole Mixtral models with their auxiliary loss: experts masked, exchanged, summed at the next boundary."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import parallelize_module, plans
from vescale.dmodule._experts import Experts
from vescale.dtensor import init_device_mesh
from vescale_testing import ranks

AXIS = {"tp": Shard(0)}
LAYER = r"model\.layers\.\d+\.mlp"
EXPERTS, INPUT, ROUTER = rf"{LAYER}\.experts", rf"{LAYER}\.input", rf"{LAYER}\.gate\.output"
CONFIG = {"dropout": 0.1, "router_aux_loss_coef": 0.5}
# sequence parallelism, changes of the plan's expert entry and of the layout in which tokens come to the router
CASES = {
    "picked": (False, AXIS, {"tp": Replicate()}),
    "masked": (False, Experts(AXIS, skips_absent=True), {"tp": Replicate()}),
    "summed at the next boundary": (True, Experts(AXIS, partial_output=True), {"tp": Replicate()}),
    "exchanged": (True, AXIS, {"tp": Shard(1)}),
}


def parallel(model, case, mode):
    sequence_parallel, entry, tokens = CASES[case]
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    plan = plans.plan_for(model, degree=world, sequence_parallel=sequence_parallel)
    assert set(plan["expert"]) == {EXPERTS}
    assert INPUT in plan["forward"]
    forward = {INPUT: [tokens], ROUTER: [{"tp": Replicate()}]}  # all logits, for the auxiliary loss
    plan = {**plan, "expert": {EXPERTS: entry}, "forward": {**plan["forward"], **forward}}
    return parallelize_module(model, mesh, plan, mode=mode)


@pytest.mark.parametrize(
    ("mode", "auxiliary", "cases"),
    [
        ("eager", True, ["picked", "summed at the next boundary", "exchanged"]),
        ("static", True, ["masked", "summed at the next boundary"]),
    ],
)
def test_training_equals_one_process(mode, auxiliary, cases, build, train, assert_same_pass):
    options = {"tokens": 12, "passes": 2, "output_router_logits": auxiliary}
    expected = train(build("mixtral", **CONFIG), **options)
    if auxiliary:
        without = train(build("mixtral", **CONFIG), **{**options, "output_router_logits": False})
        assert abs(expected.losses[0] - without.losses[0]) > 0.1  # it counts

    @ranks(2)
    def on_every_rank():
        for case in cases:
            model = parallel(build("mixtral", **CONFIG), case, mode)
            try:
                assert_same_pass(train(model, **options), expected)
            except Exception as error:
                error.add_note(f"in the case {case!r}")
                raise

    on_every_rank()
