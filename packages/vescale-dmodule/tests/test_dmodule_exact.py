"""Unmodified Hugging Face models inside of `exact` train with the bits of one process: dropout, clipping, AdamW."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import Replicate, Shard, UnsupportedOperator, exact, init_device_mesh
from vescale_testing import ranks

BATCH = {"forward": {"input": {"input_ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}}}
ROUTER = {"output_router_logits": True}


def parallel(model, dp, tp, *, sequence_parallel=False, mode="eager"):
    """Return a model with its batch over `dp` and its parameters over `tp`."""
    plan = plans.plan_for(model, degree=tp, sequence_parallel=sequence_parallel) if tp > 1 else {}
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return parallelize_module(model, mesh, plans.merge(plan, BATCH), mode=mode, allow_implicit=True)


def bits(model, *, num_blocks=8, steps=2):
    """Return losses, parameters and the optimizer's state after some steps."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(5)
    losses = []
    with contextlib.nullcontext() if num_blocks is None else exact(num_blocks=num_blocks):
        for _ in range(steps):
            ids = torch.randint(0, 255, (8, 9), generator=generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
            optimizer.step()
            optimizer.zero_grad()
    states = [state for parameter in model.parameters() for state in optimizer.state[parameter].values()]
    found = [*losses, *(parameter.detach() for parameter in model.parameters()), *states]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in found]


def num_equal(actual, expected):
    return sum(map(torch.equal, actual, expected))


def options_of(family):
    heads = {"n_head": 8} if family == "gpt2" else {"num_attention_heads": 8, "num_key_value_heads": 4}
    return {"dropout": 0.1, "dtype": torch.float32, **heads, **(ROUTER if family == "mixtral" else {})}


@pytest.mark.parametrize(
    ("family", "dp", "tp", "options"),
    [
        ("gpt2", 2, 2, {"sequence_parallel": True}),
        ("llama", 2, 1, {}),
        ("mixtral", 1, 2, {}),
        ("llama", 1, 2, {"sequence_parallel": True, "mode": "static"}),
    ],
)
def test_bits_are_those_of_one_process(family, dp, tp, options, build):
    @ranks(dp * tp, timeout=120)
    def on_every_rank():
        expected = bits(build(family, **options_of(family)))
        actual = bits(parallel(build(family, **options_of(family)), dp, tp, **options))
        assert num_equal(actual, expected) == len(expected)

    on_every_rank()


@pytest.mark.thorough
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_ten_steps_on_every_layout(family, dp, tp, build):
    @ranks(dp * tp, timeout=1800)
    def on_every_rank():
        for attention, sequence_parallel in itertools.product(("eager", "sdpa"), (False, True) if tp > 1 else (False,)):
            options = {**options_of(family), "attention": attention}
            expected = bits(build(family, **options), steps=10)
            model = parallel(build(family, **options), dp, tp, sequence_parallel=sequence_parallel)
            assert num_equal(bits(model, steps=10), expected) == len(expected)

    on_every_rank()


@ranks(2)
def test_without_the_context_parameters_differ(build):
    expected = bits(build("llama", **options_of("llama")), num_blocks=None)
    actual = bits(parallel(build("llama", **options_of("llama")), 2, 1), num_blocks=None)
    assert num_equal(actual, expected) < len(expected) / 2
    assert num_equal(bits(build("llama", **options_of("llama")), num_blocks=8), expected) < len(expected) / 2


@ranks(2)
def test_code_on_local_tensors_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"local": {"0": {"input": [{"tp": Shard(0)}], "output": [{"tp": Shard(0)}]}}}
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), mesh, plan)
    with exact(), pytest.raises(UnsupportedOperator, match=r"module '0'.*the plan runs on local tensors"):
        model(torch.ones(4, 4))
    assert model(torch.ones(4, 4)).shape == (4, 4)


@ranks(2)
def test_forms_need_no_permission_to_communicate():
    """A product of fitting shards runs without `allow_implicit`, although its parts are gathered."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    parameters = {r"0\..*": {"tp": Shard(0)}, r"2\.weight": {"tp": Shard(1)}}
    parallelize_module(model, mesh, {"parameter": parameters, "forward": {r"2\.output": [{"tp": Replicate()}]}})
    with exact():
        results = [each(torch.linspace(-1, 1, 48).view(6, 8)) for each in (plain, model)]
        for result in results:
            result.square().sum().backward()
    assert torch.equal(*results)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)
