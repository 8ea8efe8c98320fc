"""Functions of the program (`torch.autograd.Function`) in stages: as in one process, or refused if they mix rows."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from vescale.dtensor import init_device_mesh
from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import ranks

WIDTH, ROWS = 4, 12


class Scaled(torch.autograd.Function):
    """A mask with draws of its own, and another gradient than that of its forward."""

    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.3).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 0.5


class Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dim = 0
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(ctx.dim)


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function.apply(self.linear(x)).tanh()


def build(function):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(function) for _ in range(4))).double()
    return model, torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()


def engine_of(model, num_microbatches, **options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    plan = PipelinePlan("zb_v", num_microbatches)
    return PipelineEngine(model, mesh["pp"], plan, loss_fn=mse_loss, **options)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@ranks(2)
def test_training_is_that_of_one_process(num_microbatches):
    model, x, target = build(Scaled)
    reference = copy.deepcopy(model)
    engine = engine_of(model, num_microbatches)
    for seed in range(3):
        torch.manual_seed(seed)
        reference.zero_grad()
        mse_loss(reference(x), target).backward()
        torch.manual_seed(seed)
        model.zero_grad()
        engine(x, target=target).backward()
        expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


@ranks(2)
def test_one_that_mixes_rows_is_refused():
    model, x, target = build(Centered)
    with pytest.raises(PipelineError, match=r"treats every row alone.*the backward of Centered"):
        engine_of(model, 3)(x, target=target)
    engine_of(build(Centered)[0], 3, per_microbatch=True)(x, target=target)
