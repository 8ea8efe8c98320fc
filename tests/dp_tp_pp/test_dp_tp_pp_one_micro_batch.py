"""Data-parallel pipelines of one micro-batch draw what one process draws for the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale_testing import run_ranks

WIDTH, ROWS = 6, 8


class Block(nn.Module):
    """A block that drops out in its own code, in a module, and of the weights of attention."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        x = self.dropout(F.dropout(self.linear(x), 0.2))
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class OwnGenerator(Net):
    """Draws from a generator of its own, which stages would move in another order."""

    def forward(self, x):
        return super().forward(x) * torch.rand(x.shape, generator=torch.Generator(), dtype=x.dtype)


def build(kind=Net):
    torch.manual_seed(0)
    return kind().double()


def train(model, optimizer, call):
    torch.manual_seed(1)
    losses = []
    x = torch.randn(ROWS, 4, 24, WIDTH, dtype=torch.float64)
    for _ in range(3):
        loss = call(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) if not hasattr(model, "global_loss") else float(model.global_loss(loss)))
    return losses


def alone():
    model = build()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())


def on_ranks(plan, kind=Net):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    made = vescale.parallelize(plan, build(kind), optimizer, loss_fn=lambda y: y.square().mean())
    return train(*made, lambda model, x: model(**model.local_batch({"x": x})).loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_dropout(schedule):
    (expected,) = run_ranks(alone, 1)
    for losses in run_ranks(on_ranks, 4, vescale.Plan(dp=2, pp=2, zero=1, schedule=schedule)):
        assert losses == pytest.approx(expected, rel=1e-10)


def refused():
    with pytest.raises(NotImplementedError, match=r"expected random operators of torch.s default generators, got"):
        on_ranks(vescale.Plan(dp=2, pp=2), OwnGenerator)


def test_a_generator_of_its_own_is_refused():
    run_ranks(refused, 4)
