"""Parameters cast for the computation train as in plain torch with wide masters that were never rounded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.dtensor import deferred_init
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

STEPS = 3
NARROW = torch.bfloat16


class Net(nn.Module):
    """A tied weight, a frozen layer, a parameter that is narrow already, and a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.tied = nn.Linear(5, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 7)
        self.tied.weight = self.up.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.narrow = nn.Parameter(torch.ones(7, dtype=NARROW))
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, x):
        x = self.frozen(self.tied(self.down(self.up(x).tanh())))
        return (x * self.narrow).float() + self.shift


def build():
    torch.manual_seed(2)
    return Net()


def loss_of(model, step, coord):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).chunk(2)[coord]
    return (model(x.to(NARROW)) ** 2).mean()


def train_plain(*, rounds_first=False):
    """Train two replicas in one process, by hand; return rounded parameters and masters."""
    model = build()
    masters = {
        fqn: nn.Parameter((p.to(NARROW) if rounds_first else p).detach().to(p.dtype))
        for fqn, p in model.named_parameters()
        if p.requires_grad
    }
    buffer = model.shift.clone()
    model.to(NARROW).shift = buffer
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01)
    for step in range(STEPS):
        grads = [
            torch.autograd.grad(loss_of(model, step, coord), [params[fqn] for fqn in masters]) for coord in range(2)
        ]
        for fqn, first, second in zip(masters, *grads, strict=True):
            masters[fqn].grad = ((first + second) / 2).to(masters[fqn].dtype)
        optimizer.step()
        with torch.no_grad():
            for fqn, master in masters.items():
                params[fqn].copy_(master)
    return {fqn: p.detach() for fqn, p in params.items()}, masters


def train(model, optimizer):
    for step in range(STEPS):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = optimizer.full_state_dict()["master_weights"]
    with model.unsharded():
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}, masters


def same(ours, theirs):
    return all(torch.equal(ours[fqn], theirs[fqn]) and ours[fqn].dtype == theirs[fqn].dtype for fqn in ours)


def mesh_of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


@ranks(2, timeout=120)
def test_training_has_the_bits_of_plain_torch():
    params, masters = train_plain()
    _, rounded = train_plain(rounds_first=True)
    assert not same(masters, rounded)  # masters that begin from rounded values are seen
    for zero in (0, 1, 2, 3):
        module = build()
        if dist.get_rank() == 1:  # what counts is coord 0's, unrounded
            nn.init.zeros_(module.up.weight)
        before = dict(module.named_parameters())
        model = DDP(module, mesh_of_two()["dp"], zero=zero, bucket_bytes=100, param_dtype=NARROW)
        assert all(p is before[fqn] and p.dtype == NARROW for fqn, p in model.named_parameters())
        assert model.module.shift.dtype == torch.float32
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
        ours, our_masters = train(model, optimizer)
        assert same(ours, params), zero
        assert sorted(our_masters) == sorted(fqn for fqn in masters if fqn != "narrow")
        assert same(our_masters, masters), zero


@ranks(2)
def test_each_rank_holds_its_part_until_the_optimizer_takes_it():
    for zero in (0, 1, 2, 3):
        model = DDP(build(), mesh_of_two()["dp"], zero=zero, param_dtype=NARROW)
        held = sum(part.numel() for part in model.originals._parts.values())
        every = sum(p.numel() for p in build().parameters() if p.requires_grad and p.dtype != NARROW)
        counts = torch.tensor([held])
        dist.all_reduce(counts)
        assert counts.item() == (every if zero else 2 * every)
        assert not model.originals._full
        DistributedOptimizer(torch.optim.SGD, model=model)
        assert not model.originals._parts
        again = DistributedOptimizer(torch.optim.SGD, model=model)  # begins from the rounded values
        assert {piece.tensor.dtype for piece in again.pieces if piece.fqn != "narrow"} == {torch.float32}


@ranks(2)
def test_what_is_written_before_the_optimizer_is_made_counts():
    for zero in (0, 2, 3):
        model = DDP(build(), mesh_of_two()["dp"], zero=zero, param_dtype=NARROW)
        model.load_state_dict({"up.weight": torch.full((7, 5), 0.5)}, strict=False)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model)
        masters = optimizer.full_state_dict()["master_weights"]
        assert (masters["up.weight"] == 0.5).all()
        assert torch.equal(masters["down.weight"], build().down.weight)


@ranks(2)
def test_deferred_modules():
    expected = None
    for zero in (0, 2, 3):
        torch.manual_seed(2)
        model = DDP(deferred_init(Net), mesh_of_two()["dp"], zero=zero, param_dtype=NARROW)
        assert all(p.dtype == NARROW for p in model.parameters())
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
        ours, masters = train(model, optimizer)
        expected = expected or (ours, masters)
        assert same(ours, expected[0])
        assert same(masters, expected[1])


@ranks(4)
def test_tensor_parallel_parameters():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    weights = torch.randn(6, 4), torch.randn(3, 6)
    for zero in (0, 1, 2, 3):
        module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
        for layer, weight, placement in zip(module, weights, (Shard(0), Shard(1)), strict=True):
            layer.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [placement]))
        model = DDP(module, mesh["dp"], zero=zero, param_dtype=NARROW, per_rank=True)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
        masters = optimizer.full_state_dict()["master_weights"]
        assert torch.equal(masters["0.weight"], weights[0])
        assert torch.equal(masters["1.weight"], weights[1])
        x = distribute_tensor(torch.ones(2, 4, dtype=NARROW), mesh["tp"], [Replicate()], src_data_rank=None)
        out = model(x)
        assert isinstance(out, DTensor)
        assert out.dtype == NARROW
        out.full_tensor().sum().backward()
        optimizer.step()
        grads = torch.autograd.grad(
            (torch.ones(2, 4) @ weights[0].requires_grad_().t() @ weights[1].t()).sum(), weights[0]
        )
        moved = optimizer.full_state_dict()["master_weights"]["0.weight"]
        torch.testing.assert_close(moved, (weights[0] - 0.1 * grads[0]).detach(), rtol=0.02, atol=0.02)


@ranks(2)
def test_masters_have_the_dtype_that_is_asked_for():
    model = DDP(build().double(), mesh_of_two()["dp"], zero=2, param_dtype=NARROW)
    first = next(iter(DistributedOptimizer(torch.optim.SGD, model=model, master_dtype=torch.float32).pieces))
    assert first.tensor.dtype == torch.float32
    model = DDP(build().double(), mesh_of_two()["dp"], zero=2, param_dtype=NARROW)
    first = next(iter(DistributedOptimizer(torch.optim.SGD, model=model).pieces))
    assert first.tensor.dtype == torch.float64


@ranks(2)
def test_refusals():
    mesh = mesh_of_two()["dp"]
    with pytest.raises(ValueError, match=r"param_dtype must be a floating-point dtype such as .*, got torch.int8"):
        DDP(build(), mesh, param_dtype=torch.int8)
    module = build()
    module.down.weight.grad = torch.zeros(5, 7)
    with pytest.raises(ValueError, match=r"'down.weight' has a gradient .*param_dtype=torch.bfloat16 is to cast it"):
        DDP(module, mesh, param_dtype=NARROW)
    assert module.up.weight.dtype == torch.float32
    module = build()
    module.down.weight = nn.Parameter(module.up.weight.detach().view(5, 7))
    with pytest.raises(ValueError, match="different tensors in the same memory"):
        DDP(module, mesh, param_dtype=NARROW)
    with pytest.raises(
        ValueError, match=r"module given to DDP, or a setting, differs between ranks.*\(axis 'dp'\); give all"
    ):
        DDP(build().to(torch.float64 if dist.get_rank() else torch.float32), mesh, param_dtype=NARROW)
