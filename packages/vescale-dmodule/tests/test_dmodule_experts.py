"""Experts spread over ranks give one device's values and gradients, whichever experts the tokens go to."""

import pytest
import torch
from torch import nn

from vescale.dmodule import Experts, parallelize_module
from vescale.dtensor import DeviceMesh, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh
from vescale_testing import ranks

NUM_EXPERTS, HIDDEN, TOP_K = 4, 6, 2


class Mlps(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 8, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, 8) / 3)
        self.fail = False
        self.dropout = 0.0
        self.seen = self.num_rows = None

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.seen = (self.num_experts, tuple(self.up.shape), type(hidden_states))
        self.num_rows = len(hidden_states)
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token) == 0:
                continue
            hidden = torch.relu(hidden_states[token] @ self.up[expert].T)
            hidden = nn.functional.dropout(hidden, self.dropout) @ self.down[expert].T
            out.index_add_(0, token, hidden * top_k_weights[token, choice, None])
        if self.fail:
            raise ZeroDivisionError
        return out


class Moe(nn.Module):
    """Router and experts. `preference` is added to the router's logits, to send tokens where a test wants them."""

    def __init__(self, preference=(0.0,) * NUM_EXPERTS, top_k=TOP_K):
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = Mlps()
        self.preference = torch.tensor(preference, dtype=torch.float64)
        self.top_k = top_k

    def forward(self, x):
        hidden = x.reshape(-1, HIDDEN)
        weights, index = torch.topk(torch.softmax(self.router(hidden) + self.preference, dim=-1), self.top_k, dim=-1)
        return x + self.experts(hidden, index, weights / weights.sum(-1, keepdim=True)).reshape(x.shape)


def made(**options):
    torch.manual_seed(0)
    return Moe(**options).double()


def parallel(model, *, skips_absent=None):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    forward = {"input": [{"tp": Replicate()}], "output": [{"tp": Replicate()}]}
    entry = Experts({"tp": Shard(0)}, skips_absent=skips_absent)
    return parallelize_module(model, mesh, {"expert": {"experts": entry}, "forward": forward})


def assert_trains_alike(model, reference, batch=3):
    x = torch.randn(batch, 5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, tokens in zip((model, reference), inputs, strict=True):
        module.zero_grad()
        module(tokens).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-12)
    for name, parameter in reference.named_parameters():
        actual = model.get_parameter(name).grad
        assert actual.placements == model.get_parameter(name).placements, name
        torch.testing.assert_close(actual.full_tensor(), parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
    return inputs[1].grad


PREFERENCES = {
    "balanced": (0.0, 0.0, 0.0, 0.0),
    "all to the first": (50.0, 0.0, 0.0, 0.0),
    "all to the last": (0.0, 0.0, 0.0, 50.0),
    "one without tokens": (0.0, -90.0, 0.0, 0.0),
    "one rank without tokens": (0.0, 0.0, -90.0, -90.0),
}


@pytest.mark.parametrize(("world", "skips_absent"), [(2, True), (4, False)])
def test_values_and_gradients(world, skips_absent):
    @ranks(world)
    def on_every_rank():
        for preference in PREFERENCES.values():
            for top_k in (1, 2):
                reference = made(preference=preference, top_k=top_k)
                model = parallel(made(preference=preference, top_k=top_k), skips_absent=skips_absent)
                assert_trains_alike(model, reference)
                local = NUM_EXPERTS // world
                assert model.experts.seen == (local, (local, 8, HIDDEN), torch.Tensor)
                if top_k == 2:
                    assert reference.router.weight.grad.abs().max() > 0

    on_every_rank()


@ranks(2)
def test_outside_of_a_call_the_module_holds_all_experts():
    model = parallel(made(preference=PREFERENCES["one rank without tokens"]))
    parameters = dict(model.experts.named_parameters())
    many = 1 << 14
    for num_tokens, num_rows in ((2, [2, 2]), (many, [TOP_K * many, 0])):  # all tokens, or the pairs of this rank
        model(torch.ones(1, num_tokens, HIDDEN, dtype=torch.float64))
        assert model.experts.num_rows == num_rows[torch.distributed.get_rank()]
    assert model.experts.num_experts == NUM_EXPERTS
    assert all(model.experts.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert parameters["up"].placements == (Shard(0),)
    assert parameters["up"].shape == (NUM_EXPERTS, 8, HIDDEN)


@ranks(2)
def test_a_failure_inside_leaves_everything_as_it_was():
    model, reference = parallel(made()), made()
    for cause in ("fail", "dropout"):
        before = torch.get_rng_state()
        setattr(model.experts, cause, 0.5)
        text = "experts run on local tensors; move the random operator out of them"
        error, match = (ZeroDivisionError, None) if cause == "fail" else (UnsupportedRandomOperator, text)
        with pytest.raises(error, match=match):
            model(torch.ones(1, 2, HIDDEN, dtype=torch.float64))
        setattr(model.experts, cause, 0.0)
        assert torch.equal(torch.get_rng_state(), before)
        assert model.experts.num_experts == NUM_EXPERTS
        assert_trains_alike(model, reference)
    torch.rand(2)  # refused only inside


@ranks(2)
def test_a_frozen_expert_tensor():
    models = [made(), made()]
    for model in models:
        model.experts.up.requires_grad_(False)
    model = parallel(models[0])
    x = torch.ones(1, 2, HIDDEN, dtype=torch.float64)
    for module in (model, models[1]):
        module(x).sum().backward()
    assert model.experts.up.grad is None
    torch.testing.assert_close(model.experts.down.grad.full_tensor(), models[1].experts.down.grad)


@ranks(2)
def test_a_difference_in_one_expert_would_be_noticed():
    for expert in range(NUM_EXPERTS):
        reference = made()
        with torch.no_grad():
            reference.experts.down[expert].mul_(2)
        with pytest.raises(AssertionError):
            assert_trains_alike(parallel(made()), reference)


def with_tokens_of_their_own(model, mesh):
    forward = {"input": [{"ep": Shard(0)}], "output": [{"ep": Replicate()}]}
    return parallelize_module(model, mesh, {"expert": {"experts": {"ep": Shard(0)}}, "forward": forward})


@ranks(4)
def test_ranks_of_the_mesh_in_any_order():
    """Each rank sends its tokens to the rank at a coordinate, whose place in the process group may be another one."""
    for layout, names in (([3, 1, 2, 0], ("ep",)), ([[3, 1], [2, 0]], ("dp", "ep")), ([[2, 3], [0, 1]], ("ep", "dp"))):
        mesh = DeviceMesh("cpu", layout, mesh_dim_names=names)
        assert_trains_alike(with_tokens_of_their_own(made(), mesh), made(), batch=8)
