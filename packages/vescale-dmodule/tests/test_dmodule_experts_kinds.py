"""Other kinds of experts than one stack of tensors, and Hugging Face's implementations of their forward.

A list that the model calls one by one, a list with a forward of its own, a forward with other arguments that assumes
all experts to be present, the grouped and the batched implementation.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from vescale.dmodule import Experts, PlanError, parallelize_module
from vescale.dtensor import InterleavedShard, UnsupportedRandomOperator, distribute_tensor, init_device_mesh
from vescale_testing import ranks

NUM_EXPERTS, HIDDEN, TOP_K = 4, 8, 2
FLOAT64 = {"rtol": 1e-10, "atol": 1e-12}


def mlp():
    """Return an expert whose output is wider than its input."""
    return nn.Sequential(nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, HIDDEN + 1))


class Listed(nn.ModuleList):
    """A list of experts with a forward over indices and weights."""

    def __init__(self):
        super().__init__(mlp() for _ in range(NUM_EXPERTS))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = hidden_states.new_zeros(len(hidden_states), HIDDEN + 1)
        for number, expert in enumerate(self):
            token, choice = torch.where(top_k_index == number)
            if len(token):
                out = out.index_add(0, token, expert(hidden_states[token]) * top_k_weights[token, choice, None])
        return out


class Twice(nn.Module):
    def forward(self, x):
        return x, x


class Block(nn.Module):
    """A router and experts in a plain container, called one by one in a loop."""

    def __init__(self, experts):
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS)
        self.experts = experts

    def forward(self, x, skip_empty=True):
        weights, index = torch.topk(torch.softmax(self.router(x), dim=-1), TOP_K)
        out = x.new_zeros(len(x), HIDDEN + 1)
        experts = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
        for number, expert in enumerate(experts):
            token, choice = torch.where(index == number)
            if len(token) or not skip_empty:
                out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out


def rows(num_tokens=7):
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).double()


def assert_same_gradients(module, reference, bound=FLOAT64):
    for name, parameter in reference.named_parameters():
        actual = module.get_parameter(name)
        if parameter.grad is None:
            assert actual.grad is None, name
            continue
        gradient = actual.grad
        if isinstance(gradient, DTensor):
            assert gradient.placements == actual.placements, name
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, **bound, msg=name)


SPREAD = {"expert": {"experts": {"ep": Shard(0)}}}


@ranks(2)
def test_a_plain_list_that_the_model_calls_one_by_one():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for mode, container in (
        ("eager", lambda: nn.ModuleList(mlp() for _ in range(NUM_EXPERTS))),
        ("static", lambda: nn.ModuleList(mlp() for _ in range(NUM_EXPERTS))),
        ("eager", lambda: nn.ModuleDict({f"expert_{i}": mlp() for i in range(NUM_EXPERTS)})),
    ):
        torch.manual_seed(0)
        reference = Block(container()).double()
        module = parallelize_module(copy.deepcopy(reference), mesh, SPREAD, mode=mode)
        last = list(module.experts.parameters())[-1]
        held = last.to_local().numel(), sum(p.to_local().numel() for p in module.experts.parameters())
        assert held[0] == (0 if mesh.get_rank() == 0 else HIDDEN + 1)
        assert held[1] * 2 == sum(p.numel() for p in reference.experts.parameters())  # half of them on each rank

        for module_or_copy in (module, copy.deepcopy(module)):
            for skip_empty in (True, False):
                inputs = [rows().requires_grad_() for _ in range(2)]
                outputs = [m(x, skip_empty) for m, x in zip((module_or_copy, reference), inputs, strict=True)]
                assert torch.equal(*outputs)  # the owner's bits
                for output, model in zip(outputs, (module_or_copy, reference), strict=True):
                    model.zero_grad()
                    output.square().sum().backward()
                torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-12)
                assert_same_gradients(module_or_copy, reference)
        states = [m.state_dict() for m in (module, reference)]
        assert all(torch.equal(states[0][name].full_tensor(), states[1][name]) for name in states[1])


@ranks(2)
def test_what_a_plain_list_refuses():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    module = Block(nn.ModuleList(mlp() for _ in range(NUM_EXPERTS))).double()
    parallelize_module(module, mesh, SPREAD)
    expert = module.experts[1]
    sharded = distribute_tensor(rows(), mesh, [Shard(0)])
    text = "expert '1' of a list: expected replicated rows, because routing depends on data, got placements (Shard"
    with pytest.raises(PlanError) as error:
        expert(sharded)
    assert text in str(error.value)
    with pytest.raises(PlanError, match="expert '1' of a list: expected a tensor of rows among the arguments"):
        expert(torch.tensor(1.0))
    expert[2] = Twice()
    with pytest.raises(PlanError, match="expert '1' of a list: expected an output of one tensor with"):
        expert(rows())
    expert[2] = nn.Identity()
    expert[1] = nn.Dropout(0.5)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedRandomOperator, match="experts run on local tensors; move the random operator out"):
        expert(rows())
    assert torch.equal(torch.get_rng_state(), before)
    expert[1] = nn.Tanh()
    assert expert(rows()).shape == (7, 6)  # nothing of the failures stays


def routed(num_tokens=7):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).double()
    weights, index = torch.topk(torch.softmax(logits, dim=-1), TOP_K)
    return index, weights


TOKENS = [(Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())]
MLP_INNER = {
    r"\d+\.0\.(weight|bias)": {"etp": Shard(0)},
    r"\d+\.2\.weight": {"etp": Shard(1)},
}


@ranks(4)
def test_a_list_with_a_forward_of_its_own():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    inner = Experts({"ep": Shard(0)}, parameters=MLP_INNER, once=[r"\d+\.2\.bias"])
    for entry in ({"ep": Shard(0)}, inner):
        for tokens in TOKENS:
            for skipped in (None, 2):  # on one device an expert without tokens has no gradient
                check_experts_module(Listed, entry, tokens, mesh, skipped=skipped)


def mixtral(implementation):
    def make():
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=16, num_local_experts=NUM_EXPERTS)
        config._experts_implementation = implementation
        return initialized(MixtralExperts(config))

    return make


def gpt_oss():
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=16, num_local_experts=NUM_EXPERTS)
    config._experts_implementation = "eager"
    return initialized(GptOssExperts(config))


def initialized(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


MERGED = {"gate_up_proj": {"etp": InterleavedShard(1, 2)}, "down_proj": {"etp": Shard(2)}}
INTERLEAVED = {
    "gate_up_proj": {"etp": Shard(2)},
    "gate_up_proj_bias": {"etp": Shard(1)},
    "down_proj": {"etp": Shard(1)},
}


@ranks(4)
def test_hugging_face_experts():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    for tokens in TOKENS:
        for implementation in ("eager", "grouped_mm", "batched_mm"):
            dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # what the kernel takes
            for entry in ({"ep": Shard(0)}, Experts({"ep": Shard(0)}, parameters=MERGED)):
                check_experts_module(mixtral(implementation), entry, tokens, mesh, dtype=dtype)
        # its forward has other names and does not skip absent experts
        check_experts_module(gpt_oss, {"ep": Shard(0), "etp": Shard(0)}, tokens, mesh)
        entry = Experts({"ep": Shard(0)}, parameters=INTERLEAVED, once=["down_proj_bias"])
        check_experts_module(gpt_oss, entry, tokens, mesh)


class Around(nn.Module):
    """Experts alone."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, hidden, index, weights):
        return self.experts(hidden, index, weights)


def check_experts_module(make, entry, tokens, mesh, *, dtype=torch.float64, skipped=None):
    torch.manual_seed(0)
    reference = Around(make()).to(dtype)
    bound = FLOAT64 if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    forward = {"input": [tokens, tokens, tokens], "output": [(Replicate(), Replicate())]}
    module = parallelize_module(copy.deepcopy(reference), mesh, {"expert": {"experts": entry}, "forward": forward})
    index, weights = routed()
    index = index if skipped is None else index.masked_fill(index == skipped, (skipped + 1) % NUM_EXPERTS)
    results = []
    for model in (reference, module):
        hidden, chosen = rows().to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
        out = model(hidden, index, chosen)
        (out * out).sum().backward()
        results.append((out, hidden.grad, chosen.grad))
    for right, value in zip(*results, strict=True):
        torch.testing.assert_close(value, right, **bound)
    assert_same_gradients(module, reference, bound)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in reference.named_parameters()]
