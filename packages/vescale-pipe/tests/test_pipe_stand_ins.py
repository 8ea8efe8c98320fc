"""Units that compute with leaves in the place of parameters, and that run more than once in a call, train as always."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks

SCHEDULES = ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"]


class Halves:
    """Two leaves stand in for a weight: the halves of its rows; gradients reach the weight through them alone."""

    def __init__(self, weight):
        self.weight = weight
        self.rows = [rows.detach().requires_grad_() for rows in weight.chunk(2)]

    def leaves(self):
        return [(leaf, lambda gradient, i=i: self.whole(gradient, i)) for i, leaf in enumerate(self.rows)]

    def whole(self, gradient, place):
        return torch.cat([gradient if i == place else torch.zeros_like(rows) for i, rows in enumerate(self.rows)])


class Layer(nn.Module):
    """A linear layer that can compute with stand-ins, and can run its call once more before it, as a recording does."""

    def __init__(self, is_shown, *, repeats=False):
        super().__init__()
        self.linear, self.is_shown = nn.Linear(6, 6), is_shown
        self.recorded = False
        if repeats:
            self.register_forward_pre_hook(self.record)

    def record(self, _module, args):
        if not self.recorded:
            self.recorded = True
            self(*args)
            with pytest.raises(RuntimeError):
                self(args[0][:, :1])

    def forward(self, x):
        weight = self.linear.weight
        if self.is_shown:
            if not hasattr(weight, "_vescale_gradients"):
                weight._vescale_gradients = Halves(weight)
            weight = torch.cat(weight._vescale_gradients.rows)
        return x + torch.tanh(nn.functional.linear(x, weight, self.linear.bias))


def build(**options):
    torch.manual_seed(0)
    layers = [Layer(number % 3 != 1, **options) for number in range(4)]
    return nn.Sequential(*layers).double(), torch.randn(8, 6, dtype=torch.float64)


def check_equal(schedule, **options):
    model, x = build(**options)
    reference = copy.deepcopy(model)
    for layer in reference:
        layer.is_shown, layer.recorded = False, True
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan(schedule, 4), loss_fn=lambda y: y.square().mean())
    for _ in range(2):
        engine(x).backward()
        for part in x.chunk(4):
            (reference(part).square().mean() / 4).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("schedule", SCHEDULES)
@ranks(2)
def test_gradients_come_from_stand_ins(schedule):
    check_equal(schedule)


@ranks(1)
def test_micro_batches_of_one_stage():
    check_equal("1f1b")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@ranks(2)
def test_calls_inside_of_a_call_are_not_seen(schedule):
    check_equal(schedule, repeats=True)


@ranks(2)
def test_without_the_stand_ins_gradients_are_missing(monkeypatch):
    monkeypatch.setattr(Halves, "leaves", lambda _: [])
    with pytest.raises((AssertionError, TypeError)):
        check_equal("1f1b")
