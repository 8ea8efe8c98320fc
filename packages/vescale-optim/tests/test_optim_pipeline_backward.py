"""Gradients that arrive from a function of the user's, without a call of the wrapper, are reduced all the same."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import run_ranks


class Engine:
    """Runs two micro-batches of the module by torch.autograd.grad."""

    def __init__(self, module, deliver):
        self.module, self.deliver = module, deliver

    def __call__(self, x, y):
        params = [p for p in self.module.parameters() if p.requires_grad]
        losses, sums = [], [torch.zeros_like(p) for p in params]
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = ((self.module(part_x) - part_y) ** 2).mean() / 2
            for total, grad in zip(sums, torch.autograd.grad(loss, params), strict=True):
                total += grad
            losses.append(loss.detach())
        return self.deliver(sum(losses), sums, *params)


def train(problem, zero, deliver):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = problem.model()
    engine = Engine(module, deliver)
    model = DDP(module, mesh["dp"], zero=zero, bucket_bytes=300)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.5)
    for step in range(problem.steps):
        engine(*problem.batch(10 * step, coord=dist.get_rank(), size=2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_engine_that_never_calls_the_wrapper(problem, zero, deliver):
    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01).params
    for actual in run_ranks(train, 2, problem, zero, deliver):
        for fqn, value in actual.items():
            torch.testing.assert_close(value, expected[fqn], rtol=1e-12, atol=1e-14)
