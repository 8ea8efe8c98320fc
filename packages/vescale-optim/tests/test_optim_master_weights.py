"""Narrow parameters with master weights train as one process does that keeps wide parameters and rounds them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import gather_full, ranks, run_ranks

NUM_STEPS = 16


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()


def gradient_of(param, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(param.shape, generator=generator).bfloat16()


def run_steps(model, optimizer, steps=range(NUM_STEPS)):
    """Take steps with gradients that do not depend on the parameters, small enough for each update to be lost."""
    for step in steps:
        sum((p * gradient_of(p, step)).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def one_process(optimizer_class=torch.optim.AdamW, **settings):
    """Keep wide parameters, as a program does that is written by hand."""
    model = build()
    wide = {fqn: nn.Parameter(p.detach().float()) for fqn, p in model.named_parameters()}
    named = wide.items() if optimizer_class is Muon else wide.values()
    optimizer = optimizer_class(named, **settings)
    for step in range(NUM_STEPS):
        for param in wide.values():
            param.grad = gradient_of(param, step).float()
        optimizer.step()
    return wide


def wrapped(zero, **ddp):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return build() if zero is None else DDP(build(), mesh["dp"], zero=zero, bucket_bytes=100, **ddp)


CASES = [
    (torch.optim.AdamW, {"lr": 1e-4}),
    (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "foreach": True}),
    (Muon, {"lr": 1e-4}),
]


def on_ranks(cases):
    results = []
    for optimizer_class, settings in cases:
        for zero in (None, 0, 1, 2):
            model = wrapped(zero)
            optimizer = DistributedOptimizer(optimizer_class, model=model, master_dtype=torch.float32, **settings)
            params = run_steps(model, optimizer)
            masters = {
                fqn: gather_full(entries["master_weight"]) for fqn, entries in optimizer.state_dict()["state"].items()
            }
            results.append((params, masters))
    return results


@pytest.mark.parametrize("world_size", [1, 2])  # whose means of equal gradients are exact
def test_any_stage(world_size):
    expected = [one_process(optimizer_class, **settings) for optimizer_class, settings in CASES for _ in range(4)]
    for results in run_ranks(on_ranks, world_size, CASES):
        for (params, masters), wide in zip(results, expected, strict=True):
            for fqn, value in wide.items():
                torch.testing.assert_close(masters[fqn], value.detach(), rtol=1e-6, atol=1e-7)
                assert params[fqn].dtype == torch.bfloat16
                assert torch.equal(params[fqn], masters[fqn].bfloat16())


def test_without_them_small_updates_are_lost():
    model = build()
    before = copy.deepcopy(model.state_dict())
    lost = run_steps(model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-5, weight_decay=0.0))
    kept = one_process(lr=1e-5, weight_decay=0.0)
    stuck = [((lost[fqn] == before[fqn]) & (kept[fqn].bfloat16() != before[fqn])).sum() for fqn in lost]
    assert sum(stuck) > 0


@ranks(2)
def test_a_training_goes_on_from_its_state():
    for zero in (0, 1, 2):
        settings = {"lr": 1e-4, "master_dtype": torch.float32}
        models = [wrapped(zero) for _ in range(2)]
        optimizers = [DistributedOptimizer(torch.optim.AdamW, model=model, **settings) for model in models]
        run_steps(models[0], optimizers[0], range(10))
        models[1].load_state_dict(models[0].state_dict())
        optimizers[1].load_state_dict(copy.copy(optimizers[0].state_dict()))
        expected, actual = (run_steps(*pair, range(10, 20)) for pair in zip(models, optimizers, strict=True))
        for fqn, value in expected.items():
            assert torch.equal(actual[fqn], value)
        masters = [optimizer.state_dict()["state"]["0.weight"]["master_weight"] for optimizer in optimizers]
        assert torch.equal(gather_full(masters[0]), gather_full(masters[1]))


def write_between_steps(write):
    """Return how far the written values are from where the next step starts, which moves them by 2**-10 at most."""
    distances = []
    for zero in (None, 0, 1, 2):
        model = wrapped(zero)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=2**-12, master_dtype=torch.float32)
        run_steps(model, optimizer, range(3))
        write(model, optimizer)
        after = run_steps(model, optimizer, range(3, 4))
        distances.append(max((value.float() - 1).abs().max().item() for value in after.values()))
    return distances


def by_load_state_dict(model, _optimizer):
    model.load_state_dict({fqn: torch.ones_like(p) for fqn, p in model.named_parameters()})


def in_place(model, _optimizer):
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)


def through_data(model, _optimizer):
    for param in model.parameters():
        param.data.fill_(1.0)


def through_data_and_refreshed(model, optimizer):
    through_data(model, optimizer)
    optimizer.refresh_master_weights()


def test_values_written_between_steps_are_taken_over():
    for write in (by_load_state_dict, in_place, through_data_and_refreshed):
        for distances in run_ranks(write_between_steps, 2, write):
            assert max(distances) < 2**-6


def test_values_that_masters_do_not_take_over_are_seen():
    """Torch counts no change by a write through ``.data``; with ZeRO 1 and 2 an all-gather of gloo may count as one."""
    without_ddp, with_zero_0, *_ = run_ranks(write_between_steps, 2, through_data)[0]
    assert min(without_ddp, with_zero_0) > 0.5


def test_an_unchanged_value_keeps_the_bits_of_its_master():
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=1e-5, master_dtype=torch.float32)
    run_steps(model, optimizer, range(3))
    before = [piece.tensor.detach().clone() for piece in optimizer.pieces]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.refresh_master_weights()
    for piece, master in zip(optimizer.pieces, before, strict=True):
        assert torch.equal(piece.tensor, master)
        assert not torch.equal(master, master.bfloat16().float())


@ranks(2)
def test_tensor_parallel_parameters():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.ones(3, 2).bfloat16(), mesh, [Shard(0)]))
    module.wide = nn.Parameter(torch.ones(3))
    optimizer = DistributedOptimizer(torch.optim.SGD, model=module, lr=2**-10, master_dtype=torch.float32)
    for _ in range(8):
        (module.weight.to_local().sum() + module.wide.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(module.weight.full_tensor(), torch.full((3, 2), 1 - 2**-7).bfloat16())
    assert "master_weight" not in optimizer.state_dict()["state"]["wide"]


@ranks(2)
def test_gradients_of_another_dtype():
    for zero in (0, 1, 2):
        for master_dtype in (None, torch.float32):
            model = wrapped(zero, grad_dtype=torch.float32)
            optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.5, master_dtype=master_dtype)
            before = copy.deepcopy(model.state_dict())
            after = run_steps(model, optimizer, range(1))
            for fqn, value in after.items():
                expected = before[fqn].float() - 0.5 * gradient_of(value, 0).float()
                torch.testing.assert_close(value, expected.bfloat16(), rtol=2**-7, atol=0)


def test_a_dtype_that_is_none():
    with pytest.raises(ValueError, match=r"master_dtype must be a floating-point dtype .* got torch.int8"):
        DistributedOptimizer(torch.optim.SGD, model=build(), master_dtype=torch.int8)
