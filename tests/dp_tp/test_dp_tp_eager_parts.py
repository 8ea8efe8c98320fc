"""A part in eager mode gets a tensor that code outside of it makes of the sizes of its rows."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import vescale
from vescale.dmodule import NotLocalFriendlyError
from vescale_testing import run_ranks

WIDTH, HEADS, ROWS = 8, 4, 8
PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {r"down\.output": [{"tp": Replicate()}]},
    "eager": [r"scale"],
}


class Scale(nn.Module):
    """Scales the heads of all rows, which are one dim."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH // HEADS))

    def forward(self, x, slopes):
        heads = x.reshape(-1, WIDTH // HEADS)
        return (heads * slopes * self.gain).reshape(x.shape)


class Net(nn.Module):
    def __init__(self, slopes):
        super().__init__()
        self.scale, self.slopes = Scale(), slopes
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(self.scale(x, self.slopes(len(x)))).tanh())


def per_head(rows):
    return torch.linspace(1, 2, HEADS, dtype=torch.float64).repeat(rows)[:, None]


def per_row(rows):
    return torch.linspace(1, 2, rows * HEADS, dtype=torch.float64)[:, None]


def build(slopes):
    torch.manual_seed(0)
    return Net(slopes).double()


def train(model, optimizer, call):
    losses = []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        loss = call(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def alone(slopes):
    model = build(slopes)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())


def on_ranks(slopes):
    plan = vescale.Plan(dp=2, tp=2, mode="static")
    made = vescale.parallelize(
        plan, build(slopes), lambda p: torch.optim.SGD(p, lr=0.1), module_plan=PLAN, loss_fn=lambda y: y.square().mean()
    )

    def call(model, x):
        loss = model(**model.local_batch({"x": x})).loss
        call.losses.append(float(model.global_loss(loss)))
        return loss

    call.losses = []
    train(*made, call)
    return call.losses


@pytest.mark.parametrize("slopes", [per_head, per_row])
def test_a_tensor_for_all_rows(slopes):
    (expected,) = run_ranks(alone, 1, slopes)
    for losses in run_ranks(on_ranks, 4, slopes):
        assert losses == pytest.approx(expected, rel=1e-10)


def alternating(rows):
    """Return values that another number of rows changes, where no operator of torch makes them."""
    values = [1 + 1 / rows] * (rows * HEADS)
    return torch.from_numpy(np.array(values))[:, None]


def refused():
    with pytest.raises(NotLocalFriendlyError, match="on the rows of all ranks: ") as found:
        on_ranks(alternating)
    return "'scale enters [1]' differs by up to 0.125" in str(found.value)


def test_a_tensor_of_another_number_of_rows_is_refused():
    """Other ranks than the first fail where the value is made."""
    assert run_ranks(refused, 4) == [True, True, False, False]
