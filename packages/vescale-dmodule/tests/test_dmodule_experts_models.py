"""Whole mixtures of experts: auxiliary loss, experts masked, exchanged, summed later; an axis of their own."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import Experts, parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale_testing import ranks

AXIS = {"tp": Shard(0)}
LAYER = r"model\.layers\.\d+\.mlp"
EXPERTS, INPUT, ROUTER = rf"{LAYER}\.experts", rf"{LAYER}\.input", rf"{LAYER}\.gate\.output"
CONFIG = {"dropout": 0.1, "router_aux_loss_coef": 0.5}
# sequence parallelism, changes of the plan's expert entry and of the layout in which tokens come to the router
CASES = {
    "picked": (False, Experts(AXIS, skips_absent=False), {"tp": Replicate()}),
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


def test_training_equals_one_process(build, train, assert_same_pass):
    options = {"tokens": 12, "passes": 2, "output_router_logits": True}
    reference, logits = build("mixtral", **CONFIG), []
    reference.register_forward_hook(lambda _module, _args, output: logits.append(output.router_logits))
    expected = train(reference, **options)
    without = train(build("mixtral", **CONFIG), **{**options, "output_router_logits": False})
    assert abs(expected.losses[0] - without.losses[0]) > 0.1  # it counts

    @ranks(2)
    def on_every_rank():
        for mode, case in (
            ("eager", "picked"),
            ("eager", "exchanged"),
            ("static", "masked"),
            ("static", "summed at the next boundary"),
        ):
            model, routed = parallel(build("mixtral", **CONFIG), case, mode), []
            model.register_forward_hook(lambda _module, _args, output: routed.append(output.router_logits))  # noqa: B023
            try:
                assert_same_pass(train(model, **options), expected)
                torch.testing.assert_close(routed[-1], logits[-1], rtol=1e-10, atol=1e-12)
            except Exception as error:
                error.add_note(f"in the case {case!r} of mode {mode}")
                raise

    on_every_rank()


# --------------------------------------------------------------------------------- an axis of its own for experts


MODES = ("eager", "static", "compile")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


@pytest.fixture
def run_mixtures(build, train, assert_same_pass, shard_batch, graphs):
    """Train mixtures of which the batch, so the tokens, lies over the axis `ep` of the experts, too."""

    def run(family, mode, sequence_parallel, ep, tp, expected):
        graphs.clear()
        mesh = init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))
        model = build(family, dropout=0.1)
        plan = plans.plan_for(model, degree=tp, sequence_parallel=sequence_parallel, expert_axis="ep")
        parallelize_module(model, mesh, shard_batch(plan, "ep"), mode=mode)
        name = next(name for name, _ in model.named_parameters() if "experts" in name)
        assert model.get_parameter(name).to_local().shape[0] == 4 // ep
        options = {"use_cache": False} if mode == "compile" else {}
        assert_same_pass(train(model, tokens=11, **options), expected[family])
        assert bool(graphs.forward) == (mode == "compile")

    def prepare(cases):
        expected = {family: train(build(family, dropout=0.1), tokens=11) for family in MIXTURES}

        def on_every_rank():
            for case in cases:
                try:
                    run(*case, expected)
                except Exception as error:
                    error.add_note(f"in the case {case}")
                    raise

        return on_every_rank

    return prepare


def test_experts_and_batch_over_one_axis(run_mixtures):
    cases = [(family, "static", False, 2, 1) for family in MIXTURES]
    cases += [("mixtral", "eager", True, 2, 1), ("mixtral", "compile", True, 2, 1)]
    ranks(2, timeout=240)(run_mixtures(cases))()


@pytest.mark.thorough
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_experts_and_batch_over_one_axis_in_all_modes(ep, tp, run_mixtures):
    cases = [(*case, ep, tp) for case in itertools.product(MIXTURES, MODES, (False, True))]
    ranks(ep * tp, timeout=1500)(run_mixtures(cases))()
