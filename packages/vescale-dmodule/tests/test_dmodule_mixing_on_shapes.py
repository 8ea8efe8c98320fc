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


def call_with_group():
    loss, text = MIXERS["router"]
    inputs = {"x": torch.randn(ROWS, WIDTH), "target": torch.randint(0, WIDTH, (ROWS,))}
    return text in mixing_on_shapes(Model(loss), inputs), dist.get_world_size()


def test_a_group_that_exists_stays():
    assert run_ranks(call_with_group, 2) == [(True, 2), (True, 2)]
