"""``param.data = tensor`` between steps gives the values of one process, whatever holds the parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks, run_ranks

NUM_STEPS = 4
STAGES = (None, 0, 1, 2, 3)


class Scaled(nn.Module):
    """A layer with a parameter without dims, beside parameters whose parts are uneven."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x).tanh() * self.scale


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.Linear(7, 3)).to(dtype)


def averages(module):
    """Put an average of each parameter and a constant in place."""
    for param in module.parameters():
        param.data = param.data * 0.5 + 0.25


def one_parameter(module):
    module[1].bias.data = torch.linspace(-1, 1, 3, dtype=module[1].bias.dtype)


def vector(module):
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat * 0.5, module.parameters())


def other_strides(module):
    """Put the same memory in place, transposed: a square matrix."""
    for param in module.parameters():
        param.data = param.data.flip(0).t().contiguous().t() if param.ndim == 2 else param.data


CHANGES = (averages, one_parameter, vector, other_strides)


def train(model, optimizer, change, *, part=slice(None), around=None):
    """Take steps; replace memory before the first and the third one."""
    module = model.module if isinstance(model, DDP) else model
    for step in range(NUM_STEPS):
        if change is not None and step % 2 == 0:
            with around() if around is not None else torch.no_grad():
                change(module)
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=module[0].scale.dtype)
        optimizer.zero_grad()
        model(batch[part]).square().mean().backward()
        optimizer.step()
    return model


def one_process(change):
    model = build()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1), change)
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


def local_part():
    size = 8 // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def values_of(model):
    if isinstance(model, DDP):
        with model.unsharded():
            return {fqn: param.detach().clone() for fqn, param in model.module.named_parameters()}
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


def differs(values, expected):
    return max(((values[fqn] - expected[fqn]).abs().max().item() for fqn in expected), default=0.0)


def check_any_stage():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    untouched = one_process(None)
    for change in CHANGES:
        expected = one_process(change)
        assert differs(untouched, expected) > 1e-3
        for zero in STAGES:
            model, part = build(), slice(None)
            if zero is not None:
                model, part = DDP(model, mesh["dp"], zero=zero, bucket_bytes=100), local_part()
            optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
            train(model, optimizer, change, part=part, around=getattr(model, "unsharded", None))
            assert differs(values_of(model), expected) < 1e-10, (change.__name__, zero)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 4))])
def test_any_stage(world_size):
    run_ranks(check_any_stage, world_size)


@ranks(2)
def test_while_parameters_are_gathered():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(build(), mesh["dp"], zero=2, bucket_bytes=100)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()  # gathers are in flight
        for param in model.module.parameters():
            param.data = torch.full_like(param, 3.0)
    shards = model.sharded_parameters()
    assert all(shards[fqn].full_tensor().eq(3).all() for fqn, _ in model.named_parameters())


def check_masters():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    found = []
    for zero in STAGES:
        model = build(torch.bfloat16)
        if zero is not None:
            model = DDP(model, mesh["dp"], zero=zero, bucket_bytes=100)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, master_dtype=torch.float32)
        train(model, optimizer, averages, around=getattr(model, "unsharded", None))
        found.append(values_of(model))
    wide = build(torch.bfloat16)
    masters = [nn.Parameter(param.detach().float()) for param in wide.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)

    class Rounded:
        def zero_grad(self):
            wide.zero_grad()

        def step(self):
            for master, param in zip(masters, wide.parameters(), strict=True):
                same = master.detach().to(param.dtype) == param.detach()
                master.data = torch.where(same, master.detach(), param.detach().float())
                master.grad = param.grad.float()
            optimizer.step()
            for master, param in zip(masters, wide.parameters(), strict=True):
                param.data = master.detach().to(param.dtype)

    train(wide, Rounded(), averages)
    expected = values_of(wide)
    for values in found:  # every rank has the full batch: means of equal gradients are exact
        assert differs(values, expected) == 0
    assert differs(values_of(build(torch.bfloat16)), expected) > 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_masters(world_size):
    run_ranks(check_masters, world_size)


class Weighted(nn.Module):
    """A sum of parameters with weights, which are their gradients."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.ParameterList(values)

    def forward(self, *weights):
        return sum((value * weight).sum() for value, weight in zip(self.values, weights, strict=True))


@ranks(4)
def test_tensor_parallel_parameters():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    starts = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).double() for shape in ((5, 3), (3,))]

    def gradient(step, value):
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(step)).double()

    single = [nn.Parameter(value.clone()) for value in starts]
    reference = torch.optim.AdamW(single, lr=0.1)
    for step in range(3):
        for param in single:
            param.data = param.data * 0.5
            param.grad = gradient(step, param)
        reference.step()
    for zero in (0, 1, 2, 3):
        given = [
            distribute_tensor(v.clone(), mesh["tp"], [p]) for v, p in zip(starts, (Shard(0), Replicate()), strict=True)
        ]
        module = Weighted(given)
        model = DDP(module, mesh["dp"], zero=zero, per_rank=True)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
        for step in range(3):
            with model.unsharded():
                for param in module.parameters():
                    param.data = param.data * 0.5
            optimizer.zero_grad()
            factors = [distribute_tensor(gradient(step, p), mesh["tp"], p.placements) for p in module.parameters()]
            model(*factors).backward()
            optimizer.step()
        with model.unsharded():
            for param, expected, start in zip(module.parameters(), single, starts, strict=True):
                assert isinstance(param, DTensor)
                assert (param.full_tensor() - expected).abs().max() < 1e-10
                assert (param.full_tensor() - start).abs().max() > 0.1


class Decaying(nn.Module):
    """A layer whose forward changes its weight."""

    def __init__(self, replaces):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.replaces = replaces

    def forward(self, x):
        if self.replaces is None:
            pass
        elif self.replaces:
            self.linear.weight.data = self.linear.weight.data * 0.5
        else:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return self.linear(x)


@ranks(2)
def test_writes_in_a_forward():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    def run(replaces, zero):
        torch.manual_seed(0)
        model = nn.Sequential(Decaying(replaces), nn.Linear(3, 2)).double()
        if zero is not None:
            # a forward that runs several times must not write what is freed after each
            model = DDP(model, mesh["dp"], zero=zero, per_rank=zero == 3)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return values_of(model)

    for replaces in (False, True):
        expected = run(replaces, None)
        assert differs(run(None, None), expected) > 1e-3
        for zero in (0, 1, 2, 3):
            assert differs(run(replaces, zero), expected) < 1e-10, (replaces, zero)


def half(module):
    module.half()


def shorter(module):
    module[1].bias.data = torch.zeros(2).double()


def step_after(change, model, optimizer):
    with model.unsharded():
        change(model.module)
        optimizer.step()


@ranks(2)
def test_what_does_not_fit_is_refused():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rows = [
        (
            half,
            r"expected shape .*, torch.float64 on cpu for the parameter '[\w.]+' on this rank, got .* torch.float16",
        ),
        (shorter, r"'1.bias' on this rank, got \(2,\), torch.float64 on cpu: its `.data` was replaced"),
    ]
    for zero in (1, 2, 3):
        for change, message in rows:
            model = DDP(build(), mesh["dp"], zero=zero)
            optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
            with pytest.raises(RuntimeError, match=message):
                step_after(change, model, optimizer)
