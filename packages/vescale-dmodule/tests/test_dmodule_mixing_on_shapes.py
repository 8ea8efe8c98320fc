"""What mixes rows is found on shapes alone, in one process, without a process group."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vescale.dmodule.rows import mixing_on_shapes
from vescale_testing import run_ranks

ROWS, WIDTH = 6, 4


class Model(nn.Module):
    """A linear layer and a loss."""

    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x, target):
        return self.loss(self.linear(x), target)


CLEAN = {
    "mean": lambda x, _: x.square().mean(),
    "cross entropy": F.cross_entropy,
    "sum": lambda x, _: x.square().sum(),
    "dropout": lambda x, _: F.dropout(x, 0.5).mean(),
    "unknown without values": lambda x, _: x[x.argmax(-1) == 0].sum() / (x > 0).sum().item(),
}
MIXERS = {
    "contrast": (lambda x, _: F.cross_entropy(x @ x.t(), torch.arange(len(x))), "matmul in the root module"),
    "router": (lambda x, _: (x.softmax(-1).mean(0) * x.sigmoid().mean(0)).sum(), "mul in the root module"),
    "statistics": (lambda x, _: F.batch_norm(x, None, None, training=True).mean(), "batch_norm in the root module"),
}


def found_in(loss):
    assert not dist.is_initialized()
    inputs = {"x": torch.randn(ROWS, WIDTH), "target": torch.randint(0, WIDTH, (ROWS,))}
    found = mixing_on_shapes(Model(loss), inputs)
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("name", CLEAN)
def test_rows_alone(name):
    assert found_in(CLEAN[name]) == ()


@pytest.mark.parametrize("name", MIXERS)
def test_mixed_rows(name):
    loss, text = MIXERS[name]
    assert text in found_in(loss)


def test_of_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    assert mixing_on_shapes(model, {"input": torch.ones(ROWS, WIDTH)}) == ("batch_norm in module '1'",)
    assert mixing_on_shapes(model.eval(), {"input": torch.ones(ROWS, WIDTH)}) == ()


def test_a_named_module_treats_rows_alone():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    assert mixing_on_shapes(model, {"input": torch.ones(ROWS, WIDTH)}, row_wise=["1"]) == ()


class Experts(nn.Module):
    """Experts as layers of Hugging Face write them: which tokens each takes depends on values."""

    def __init__(self, is_stack):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        if is_stack:
            self.num_experts = 2

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in torch.greater(F.one_hot(top_k_index, 2).sum((0, 1)), 0).nonzero().flatten().tolist():
            rows, which = torch.where(top_k_index == expert)
            out.index_add_(0, rows, hidden_states[rows] @ self.weight[expert] * top_k_weights[rows, which, None])
        return out


class Mixture(nn.Module):
    """Of no family that is known by name."""

    def __init__(self, *, is_stack, has_router_loss):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), Experts(is_stack)
        self.has_router_loss = has_router_loss

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, index = scores.topk(1, -1)
        loss = self.experts(x, index, weights).square().mean()
        return loss + (scores.mean(0) * scores.square().mean(0)).sum() if self.has_router_loss else loss


@pytest.mark.parametrize(
    "is_stack, has_router_loss, found",
    [(True, False, ()), (True, True, ("mul in the root module",)), (False, False, ("greater in module 'experts'",))],
)
def test_stacked_experts_are_known_by_their_structure_and_the_loss_of_their_router_is_seen(
    is_stack, has_router_loss, found
):
    model = Mixture(is_stack=is_stack, has_router_loss=has_router_loss)
    assert mixing_on_shapes(model, {"x": torch.randn(ROWS, WIDTH)})[: max(1, len(found))] == found


def call_with_group():
    loss, text = MIXERS["router"]
    inputs = {"x": torch.randn(ROWS, WIDTH), "target": torch.randint(0, WIDTH, (ROWS,))}
    return text in mixing_on_shapes(Model(loss), inputs), dist.get_world_size()


def test_a_group_that_exists_stays():
    assert run_ranks(call_with_group, 2) == [(True, 2), (True, 2)]
