"""A dry run of a rank under data, tensor and pipeline parallelism has what that rank has in the real world."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP
from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import run_ranks

ROWS, WIDTH = 8, 8
PLAN = {
    "parameter": {
        r"layers.\d+.up.weight": [Shard(0)],
        r"layers.\d+.up.bias": [Shard(0)],
        r"layers.\d+.down.weight": [Shard(1)],
    },
    "forward": {r"layers.\d+.up.input": [[Replicate()]], r"layers.\d+.down.output": [[Replicate()]]},
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(mesh, zero, schedule, mode, *, is_last=True):
    """Return what crosses stages, and the shapes of gradients on this rank."""
    torch.manual_seed(0)
    model = Model()
    plan = PipelinePlan(schedule, num_microbatches=2)
    if is_last:
        parallelize_module(model, mesh["tp"], PLAN, mode=mode)
        engine = PipelineEngine(model, mesh["pp"], plan)
    else:
        engine = PipelineEngine(model, mesh["pp"], plan)
        parallelize_module(model, mesh["tp"], PLAN, mode=mode)
    ddp = DDP(model, mesh["dp"], zero=zero)
    engine(torch.ones(ROWS, WIDTH)).backward()
    del ddp
    return engine.transfers, {name: describe(p.grad) for name, p in model.named_parameters()}


def describe(grad):
    return None if grad is None else (grad.shape, grad.dtype, getattr(grad, "placements", None))


def mesh_of_eight():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))


def dry(rank, *args, **options):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        return step(mesh_of_eight(), *args, **options)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("zero", "schedule", "mode"),
    [(0, "1f1b", "eager"), (2, "zb_v", "static"), (3, "interleaved_1f1b", "eager"), (3, "1f1b", "static")],
)
def test_each_rank_has_what_it_has_in_the_real_world(zero, schedule, mode):
    expected = run_ranks(lambda: step(mesh_of_eight(), zero, schedule, mode), 8)
    (found,) = run_ranks(lambda: [dry(rank, zero, schedule, mode) for rank in range(8)], 1, backend=None)
    assert found == expected
    values, gradients = found[2]
    assert values
    assert any(gradients.values())


def test_modules_that_are_parallelized_afterwards_are_refused():
    def refused():
        with pytest.raises(PipelineError, match=r"dry run: expected parameter `layers.0.up.weight` .* make the engine"):
            dry(0, 0, "1f1b", "static", is_last=False)

    run_ranks(refused, 1, backend=None)
