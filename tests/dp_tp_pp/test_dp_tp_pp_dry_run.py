"""A dry run of a rank under data, tensor and pipeline parallelism has what that rank has in the real world."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dmodule import parallelize_module
from vescale.dtensor import init_device_mesh
from vescale.optim import DDP
from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import run_ranks

ROWS = 8


def step(kind, mesh, zero, schedule, mode, *, is_last=True):
    """Return what crosses stages, and the shapes of gradients on this rank."""
    torch.manual_seed(0)
    model = kind()
    plan = PipelinePlan(schedule, num_microbatches=2)
    if is_last:
        parallelize_module(model, mesh["tp"], kind.module_plan, mode=mode)
        engine = PipelineEngine(model, mesh["pp"], plan)
    else:
        engine = PipelineEngine(model, mesh["pp"], plan)
        parallelize_module(model, mesh["tp"], kind.module_plan, mode=mode)
    ddp = DDP(model, mesh["dp"], zero=zero)
    engine(torch.ones(ROWS, kind.width)).backward()
    del ddp
    return engine.transfers, {name: describe(p.grad) for name, p in model.named_parameters()}


def describe(grad):
    return None if grad is None else (grad.shape, grad.dtype, getattr(grad, "placements", None))


def mesh_of_eight():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))


def dry(rank, kind, *args, **options):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        return step(kind, mesh_of_eight(), *args, **options)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("zero", "schedule", "mode"),
    [
        (0, "1f1b", "eager"),
        pytest.param(2, "zb_v", "static", marks=pytest.mark.thorough),
        (3, "interleaved_1f1b", "eager"),
        (3, "1f1b", "static"),
    ],
)
def test_each_rank_has_what_it_has_in_the_real_world(zero, schedule, mode, layers_class):
    expected = run_ranks(lambda: step(layers_class, mesh_of_eight(), zero, schedule, mode), 8)
    (found,) = run_ranks(lambda: [dry(rank, layers_class, zero, schedule, mode) for rank in range(8)], 1, backend=None)
    assert found == expected
    values, gradients = found[2]
    assert values
    assert any(gradients.values())


def test_modules_that_are_parallelized_afterwards_are_refused(layers_class):
    def refused():
        with pytest.raises(PipelineError, match=r"dry run: expected parameter `layers.0.up.weight` .* make the engine"):
            dry(0, layers_class, 0, "1f1b", "static", is_last=False)

    run_ranks(refused, 1, backend=None)
