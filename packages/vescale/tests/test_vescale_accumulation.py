"""Gradients of several forwards add up before a step, with and without ``no_sync``, as in one process.

Not every batch divides into the micro-batches of a rank.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn

import vescale
from vescale.dtensor import Replicate, Shard
from vescale_testing import halved, ranks

ROUNDS = 3
MODULE_PLAN = {
    "parameter": {r"layers\.\d+\.(weight|bias)": {"tp": Shard(0)}},
    "forward": {r"layers\.\d+\.input": [{"tp": Replicate()}], r"layers\.\d+\.output": [{"tp": Replicate()}]},
}


class Net(nn.Module):
    """Four layers of which the loss is a function beside it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def build():
    torch.manual_seed(0)
    return Net().double()


def batches(dp):
    generator = torch.Generator().manual_seed(1)
    for number in range(2 * ROUNDS):
        x = torch.randn(16 - dp * (number % 2), 8, generator=generator, dtype=torch.float64)
        yield {"x": x, "target": x.sin()}


def train_plain(dp):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches(dp), 1):
        nn.functional.mse_loss(model(batch["x"]), batch["target"]).backward()
        if number % ROUNDS == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(plan, *, waits, forgets=False):
    """Train; ``waits`` reduces gradients in the last backward of a step alone, ``forgets`` drops those before it."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer = vescale.parallelize(plan, build(), sgd, loss_fn=nn.functional.mse_loss, module_plan=MODULE_PLAN)
    for number, batch in enumerate(batches(plan.dp), 1):
        is_last = number % ROUNDS == 0
        with model.no_sync() if waits and not is_last else contextlib.nullcontext():
            model(**model.local_batch(batch)).loss.backward()
        if forgets and not is_last:
            optimizer.zero_grad()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    with model.unsharded() if plan.zero == 3 else contextlib.nullcontext():
        named = model.named_parameters()
        return {name: getattr(p, "full_tensor", p.clone)().detach().clone() for name, p in named}


def differs(found, dp):
    expected = train_plain(dp)
    assert found
    return max(float((value - expected[name]).abs().max()) for name, value in found.items())


@halved
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4},
        {"dp": 2, "pp": 2, "num_microbatches": 2},
        {"dp": 2, "pp": 2, "num_microbatches": 2, "zero": 1, "schedule": "zb_h1"},
        {"dp": 2, "pp": 2, "num_microbatches": 2, "zero": 2, "schedule": "zb_v"},
        {"dp": 2, "pp": 2, "num_microbatches": 2, "zero": 3},
        {"tp": 2, "pp": 2, "num_microbatches": 4, "schedule": "interleaved_zero_bubble"},
        {"dp": 2, "tp": 2, "num_microbatches": 2, "zero": 2},
    ],
    ids=lambda layout: " ".join(f"{key}={value}" for key, value in layout.items()),
)
@ranks(4)
def test_gradients_of_several_forwards_add_up(layout, waits):
    assert differs(train(vescale.Plan(**layout), waits=waits), dp=layout.get("dp", 1)) < 1e-10


@ranks(2)
def test_a_forgotten_gradient_is_noticed():
    assert differs(train(vescale.Plan(pp=2, num_microbatches=2), waits=False, forgets=True), dp=1) > 1e-4
