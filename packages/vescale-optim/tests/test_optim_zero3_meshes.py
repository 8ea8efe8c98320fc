"""ZeRO 3 beside other axes: tensor-parallel parameters, pipeline engines that call the module, deferred modules."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.dtensor import deferred_init
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_named, held_bytes, ranks, run_ranks

PLACEMENTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up = nn.Linear(width, 8)
        self.down = nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks that may be tensor-parallel."""

    mesh = None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x):
        whole = [Replicate()]
        x = x if self.mesh is None else DTensor.from_local(x, self.mesh, whole, run_check=False)
        for layer in self.layers:
            x = layer(x * self.gain)
            x = x if self.mesh is None else x.redistribute(placements=whole)
        return x if self.mesh is None else x.to_local()


def build():
    torch.manual_seed(3)
    return Net().double()


def shard(module, mesh):
    for fqn, param in list(module.named_parameters()):
        owner, _, name = fqn.rpartition(".")
        placement = next((p for end, p in PLACEMENTS.items() if fqn.endswith(end)), Replicate())
        placed = distribute_tensor(param.detach(), mesh, [placement])
        setattr(module.get_submodule(owner), name, nn.Parameter(placed))
    module.mesh = mesh
    return module


def batch(step, coord=0, size=1):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.chunk(size)[coord]


def train(model, optimizer, coord=0, size=1, clip=lambda: None):
    norms = []
    for step in range(3):
        model(batch(step, coord, size)).square().mean().backward()
        norms.append(clip())
        optimizer.step()
        norms[-1] = getattr(optimizer, "grad_norm", norms[-1])
        optimizer.zero_grad()
    return norms


def tensor_parallel(shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = DDP(shard(build(), mesh["tp"]), mesh["dp"], zero=3, per_rank=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.05)
    norms = train(model, optimizer, mesh.get_local_rank("dp"), mesh["dp"].size())
    pieces = gather_named(model.state_dict())
    with model.unsharded():
        full = {fqn: p.full_tensor() for fqn, p in model.named_parameters()}
        loaded = model.state_dict()
    assert all(torch.equal(full[fqn], pieces[fqn]) for fqn in full)
    before = {fqn: value.tensor.clone() for fqn, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.tensor.zero_()
    model.load_state_dict(loaded)  # DTensors, whole over dp
    assert all(torch.equal(value.tensor, before[fqn]) for fqn, value in model.state_dict().items())
    return norms, pieces


@pytest.mark.parametrize("shape, names", [((2, 2), ("dp", "tp")), ((2, 2), ("tp", "dp")), ((2, 1), ("dp", "tp"))])
def test_tensor_parallel_parameters(shape, names):
    reference = build()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    expected = train(reference, optimizer, clip=lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
    for norms, params in run_ranks(tensor_parallel, shape[0] * shape[1], shape, names):
        torch.testing.assert_close(torch.stack(norms), torch.stack(expected), rtol=1e-12, atol=0)
        for fqn, value in reference.named_parameters():
            torch.testing.assert_close(params[fqn], value.detach(), rtol=1e-12, atol=1e-14)


@ranks(2)
def test_an_engine_that_calls_the_module_underneath(deliver):
    """Forwards of two micro-batches before their backwards, in the engine's own passes."""
    module, reference = build(), build()
    model = DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=3)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(2):
        params = list(module.parameters())
        losses = [module(x).square().mean() / 2 for x in batch(step, dist.get_rank(), 2).chunk(2)]
        parts = [torch.autograd.grad(loss, params) for loss in losses]
        grads = [sum(each) for each in zip(*parts, strict=True)]
        deliver(sum(losses).detach(), grads, *params).backward()
        reference(batch(step)).square().mean().backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    with model.unsharded():
        for fqn, value in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(fqn), value, rtol=1e-12, atol=1e-14)


class Large(nn.Module):
    """Equal blocks, a tied parameter, a parameter without dims, one with fewer rows than ranks, a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(8)])
        self.layers[7].weight = self.layers[2].weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.row = nn.Parameter(torch.randn(1, 96))
        self.frozen = nn.Parameter(torch.rand(5, 3), requires_grad=False)
        self.register_buffer("noise", torch.randn(4))
        self.layers[0].weight.tag = "kept"

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x + self.row


def test_a_deferred_module_is_never_whole_on_a_rank():
    def body():
        gc.collect()
        before, peak, full_tensor = held_bytes(), [0], DTensor.full_tensor

        def noting(self):
            full = full_tensor(self)
            gc.collect()
            peak[0] = max(peak[0], held_bytes() - before)
            return full

        pytest.MonkeyPatch().setattr(DTensor, "full_tensor", noting)
        torch.manual_seed(11)
        model = DDP(deferred_init(Large), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), zero=3)
        assert model.layers[7].weight is model.layers[2].weight
        assert model.layers[0].weight.tag == "kept"
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
        model(torch.ones(2, 96)).sum().backward()
        optimizer.step()
        with model.unsharded():
            params = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
        return peak[0], params, model.noise.clone(), torch.rand(2)

    torch.manual_seed(11)
    eager = Large()
    after = torch.rand(2)
    eager(torch.ones(2, 96)).sum().backward()
    torch.optim.SGD([p for p in eager.parameters() if p.requires_grad], lr=0.1).step()
    total = sum(p.numel() * p.element_size() for p in eager.parameters())
    for peak, params, noise, drawn in run_ranks(body, 4):
        assert torch.equal(noise, eager.noise)
        assert torch.equal(drawn, after)
        for fqn, value in eager.named_parameters():
            torch.testing.assert_close(params[fqn], value.detach(), rtol=1e-5, atol=1e-6)
        assert 0 < peak < 0.8 * total


@ranks(2)
def test_a_deferred_module_of_ranks_with_different_seeds():
    torch.manual_seed(dist.get_rank())
    module = deferred_init(nn.Linear, 4, 4)
    with pytest.raises(
        ValueError,
        match=r"the state of the random generator must be equal on all ranks: expected seed 0, .* got seed 1,",
    ):
        DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=3)
