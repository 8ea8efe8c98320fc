"""Training with DDP at any ZeRO stage is training in one process: loss, norm, parameters and optimizer state."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import assert_same_training, halved, run_ranks

SETTINGS = {"lr": 0.01}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adam-fused": (torch.optim.Adam, {"lr": 0.01, "fused": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
}


def train(problem, optimizer_class, settings, *, zero, bucket_bytes=25 * 2**20, overlap=True, clip=None, no_sync=True):
    """Train on all ranks of the world and return this rank's record."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(problem.model(), mesh["dp"], zero=zero, bucket_bytes=bucket_bytes, overlap=overlap)
    optimizer = DistributedOptimizer(optimizer_class, model=model, clip_grad_norm=clip, **settings)
    return problem.train(model, optimizer, coord=dist.get_rank(), size=dist.get_world_size(), no_sync=no_sync)


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks(problem, world_size, zero):
    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    records = run_ranks(train, world_size, problem, torch.optim.AdamW, SETTINGS, zero=zero, clip=0.5)
    for record in records:
        assert_same_training(record, expected, rtol=1e-12)


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer(problem, name, zero):
    optimizer_class, settings = OPTIMIZERS[name]
    expected = problem.one_process(optimizer_class, **settings)
    for record in run_ranks(train, 2, problem, optimizer_class, settings, zero=zero, bucket_bytes=300):
        assert_same_training(record, expected, rtol=1e-12)


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1000])
def test_any_bucket_size(problem, bucket_bytes, zero):
    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    settings = {"zero": zero, "bucket_bytes": bucket_bytes, "clip": 0.5}
    for record in run_ranks(train, 3, problem, torch.optim.AdamW, SETTINGS, **settings):
        assert_same_training(record, expected, rtol=1e-12)


@halved
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradient_accumulation(accumulating_problem, zero, no_sync):
    expected = accumulating_problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    settings = {"zero": zero, "bucket_bytes": 300, "clip": 0.5, "no_sync": no_sync}
    for record in run_ranks(train, 3, accumulating_problem, torch.optim.AdamW, SETTINGS, **settings):
        assert_same_training(record, expected, rtol=1e-12)


def test_two_ranks_give_the_same_bits_at_any_stage_and_bucket_size(problem):
    expected, *_ = run_ranks(train, 2, problem, torch.optim.AdamW, SETTINGS, zero=0)
    for zero in (0, 1, 2):
        for bucket_bytes, overlap in ((25 * 2**20, False), (1, True), (300, True)):
            settings = {"zero": zero, "bucket_bytes": bucket_bytes, "overlap": overlap}
            for record in run_ranks(train, 2, problem, torch.optim.AdamW, SETTINGS, **settings):
                assert_same_training(record, expected, bitwise=True)


def test_accumulated_gradients_have_the_same_bits_at_any_stage(accumulating_problem):
    expected, *_ = run_ranks(train, 2, accumulating_problem, torch.optim.AdamW, SETTINGS, zero=0)
    for zero in (1, 2):
        for record in run_ranks(train, 2, accumulating_problem, torch.optim.AdamW, SETTINGS, zero=zero):
            assert_same_training(record, expected, bitwise=True)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_other_dtypes_on_ranks_give_what_the_same_dtype_gives_in_one_process(problem, dtype, rtol):
    def train_in(dtype, zero=None):
        model = problem.model().to(dtype)
        if zero is not None:
            model = DDP(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=zero, bucket_bytes=100)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
        coord, size = (0, 1) if zero is None else (dist.get_rank(), 2)
        for step in range(2):
            x, y = (each.to(dtype) for each in problem.batch(step, coord=coord, size=size))
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {fqn: p.detach().double() for fqn, p in model.named_parameters()}

    expected = train_in(dtype)
    for zero in (0, 1, 2):
        for actual in run_ranks(train_in, 2, dtype, zero):
            for fqn, value in expected.items():
                torch.testing.assert_close(actual[fqn], value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_of_several_dtypes_have_buckets_of_their_own(zero):
    def build():
        torch.manual_seed(0)
        return torch.nn.ModuleDict({"wide": torch.nn.Linear(3, 3).double(), "narrow": torch.nn.Linear(3, 3)})

    def loss_of(model, x):
        return (model["wide"](model["narrow"](x.float()).double()) ** 2).mean()

    def on_ranks():
        model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=zero)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
        loss_of(model.module, torch.arange(12.0).view(4, 3).chunk(2)[dist.get_rank()]).backward()
        optimizer.step()
        return dict(model.state_dict())

    model = build()
    loss_of(model, torch.arange(12.0).view(4, 3)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for actual in run_ranks(on_ranks, 2):
        for fqn, value in model.state_dict().items():
            torch.testing.assert_close(actual[fqn], value, rtol=1e-5, atol=1e-6)
            assert actual[fqn].dtype == value.dtype
