"""With hybrid sharding, too: initialization, Muon, loss scaling, state, tensor parallelism, refusals, failures."""

import copy
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.dtensor import deferred_init
from vescale.optim import DDP, DistributedOptimizer, Muon, clip_grad_norm_
from vescale_testing import RankFailure, ranks, run_ranks

NAMES = ("replicate", "shard")
BOTH = "replicate x shard"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks, a gain and a buffer; the parameters may be DTensors."""

    mesh = None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.rand(6))
        self.register_buffer("shift", torch.rand(6))

    def forward(self, x):
        x = x if self.mesh is None else DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        for layer in self.layers:
            x = layer(x * self.gain)
            x = x if self.mesh is None else x.redistribute(placements=[Replicate()])
        return (x if self.mesh is None else x.to_local()) + self.shift


def build():
    torch.manual_seed(3)
    return Net().double()


def mesh_of(*shape, names=NAMES):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def batch(step, coord=0, size=1):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.chunk(size)[coord]


def place(mesh):
    return mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1), mesh.size(0) * mesh.size(1)


def train(model, optimizer, coord=0, size=1, steps=range(3), clip=lambda: None):
    """Return gradient norms and parameters after some steps."""
    norms = []
    for step in steps:
        model(batch(step, coord, size)).square().mean().backward()
        norm = clip()
        optimizer.step()
        norms.append(getattr(optimizer, "grad_norm", norm))
        optimizer.zero_grad()
    return norms


def whole(model):
    with model.unsharded():
        return {
            fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for fqn, p in model.named_parameters()
        }


def assert_close(actual, expected, **tolerance):
    assert set(actual) == set(expected)
    for fqn, value in expected.items():
        torch.testing.assert_close(actual[fqn], value.detach(), **(tolerance or {"rtol": 1e-12, "atol": 1e-14}))


# ------------------------------------------------------------------------------------------- initialization


@ranks(4)
def test_values_come_from_the_first_rank_of_both_axes():
    for zero in (0, 2, 3):
        torch.manual_seed(dist.get_rank())
        module = Net()
        torch.manual_seed(0)
        expected = Net()
        model = DDP(module, mesh_of(2, 2), zero=zero)
        assert_close(whole(model), dict(expected.named_parameters()), rtol=0, atol=0)
        assert torch.equal(model.shift, expected.shift)


@ranks(4)
def test_deferred_modules():
    expected = build()
    after = torch.rand(2)
    for shape in ((2, 2), (4, 1), (1, 4)):
        for zero in (2, 3):
            torch.manual_seed(3)
            model = DDP(deferred_init(lambda: Net().double()), mesh_of(*shape), zero=zero)
            assert torch.equal(torch.rand(2), after)
            assert_close(whole(model), dict(expected.named_parameters()), rtol=0, atol=0)
    torch.manual_seed(dist.get_rank() // 2)  # equal within a shard axis
    with pytest.raises(ValueError, match=r"random generator must be equal .* seed 0, .* on ranks 0, 1, got seed 1,"):
        DDP(deferred_init(Net), mesh_of(2, 2), zero=3)


# ------------------------------------------------------------------------------------------- optimizers and state


def muon_and_state():
    mesh = mesh_of(2, 2)
    coord, size = place(mesh)
    found = []
    for zero in (0, 2, 3):
        model = DDP(build(), mesh, zero=zero, bucket_bytes=300)
        optimizer = DistributedOptimizer(Muon, model=model, lr=0.02, adamw_lr=0.01)
        train(model, optimizer, coord, size)
        model = DDP(build(), mesh, zero=zero, bucket_bytes=300)
        adamw = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
        train(model, adamw, coord, size)
        state = adamw.full_state_dict()
        again = DDP(build(), mesh, zero=zero, bucket_bytes=600)
        again.load_state_dict(whole(model) | {"shift": again.shift})
        continued = DistributedOptimizer(torch.optim.AdamW, model=again, lr=0.01)
        continued.load_full_state_dict(state)
        train(again, continued, coord, size, steps=range(3, 5))
        found.append((whole(optimizer.model), state, whole(again)))
    return found


def test_muon_and_state_of_plain_optimizers():
    module = build()
    train(module, Muon(module.named_parameters(), lr=0.02, adamw_lr=0.01))
    plain = build()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, adamw)
    state = copy.deepcopy(adamw.state_dict()["state"])
    train(plain, adamw, steps=range(3, 5))
    for found in run_ranks(muon_and_state, 4):
        for by_muon, full, continued in found:
            # The iteration is in bfloat16: gradients that differ in the last bit may be rounded to other numbers.
            assert_close(by_muon, dict(module.named_parameters()), rtol=0, atol=2e-3)
            for number, entries in state.items():
                assert_close(full["state"][number], entries)
            assert_close(continued, dict(plain.named_parameters()))


def scaled(model, optimizer, coord, size):
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
    for step in range(4):
        x = batch(step, coord, size)
        loss = model(x).square().mean()
        if step == 1 and coord == size - 1:  # in one gradient of the last rank
            loss = loss + (model.get_parameter("gain") * 0).sum() * torch.inf if size == 1 else loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@ranks(4)
def test_an_infinity_on_one_rank_skips_the_step_on_all():
    for zero in (0, 1, 2, 3):
        mesh = mesh_of(2, 2)
        model = DDP(build(), mesh, zero=zero, bucket_bytes=300)
        scales = scaled(model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1), *place(mesh))
        assert scales == [8.0, 4.0, 4.0, 8.0]
        expected = build()
        optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)
        train(expected, optimizer, steps=(0, 2, 3))
        assert_close(whole(model), dict(expected.named_parameters()))


# ------------------------------------------------------------------------------------------- beside tensor parallelism


def tensor_parallel(shape):
    mesh = mesh_of(*shape, names=(*NAMES, "tp"))
    placements = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    found = []
    for zero in (2, 3):
        module = build()
        for fqn, param in list(module.named_parameters()):
            owner, _, name = fqn.rpartition(".")
            placement = next((p for end, p in placements.items() if fqn.endswith(end)), Replicate())
            placed = nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [placement]))
            setattr(module.get_submodule(owner), name, placed)
        module.mesh = mesh["tp"]
        model = DDP(module, mesh[NAMES], zero=zero, per_rank=True)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.05)
        norms = train(model, optimizer, *place(mesh[NAMES]))
        found.append((norms, whole(model)))
    return found


def test_tensor_parallel_parameters_beside():
    reference = build()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    norms = train(reference, optimizer, clip=lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
    for found in run_ranks(tensor_parallel, 8, (2, 2, 2)):
        for its_norms, params in found:
            torch.testing.assert_close(torch.stack(its_norms), torch.stack(norms), rtol=1e-12, atol=0)
            assert_close(params, dict(reference.named_parameters()))


# ------------------------------------------------------------------------------------------- errors


@ranks(4)
def test_what_is_refused():
    mesh = mesh_of(2, 2)
    with pytest.raises(ValueError, match=r"of the 2-D mesh .* must ascend .*, got \[\[3, 2\], \[1, 0\]\] for axes"):
        DDP(Net(), DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=NAMES))
    flat = mesh_of(4, names=("flat",))
    for over, name in ((mesh["shard"], "shard"), (mesh["replicate"], "replicate"), (flat, BOTH)):
        module = Net()
        module.gain = nn.Parameter(distribute_tensor(module.gain.detach(), over, [Replicate()]))
        with pytest.raises(ValueError, match=rf"'gain' is a DTensor over the axis '{name}' itself \(mesh "):
            DDP(module, mesh, zero=2)
    module = Net()
    if dist.get_rank() >= 2:  # the second row of ranks
        module.layers[1].up.bias.requires_grad_(False)
    with pytest.raises(
        ValueError, match=rf"differs .*: ranks 0, 1 have .*True', ranks 2, 3 have .*False' \(axis '{BOTH}'"
    ):
        DDP(module, mesh, zero=2)
    model = DDP(Net(), mesh, zero=2, find_unused_parameters=False)
    for axis in (mesh["replicate"], mesh["shard"], flat):
        with pytest.raises(ValueError, match=r"norm_axes has the axis .* which counts already"):
            clip_grad_norm_(model, 1.0, norm_axes=[axis])
    with pytest.raises(RuntimeError, match=rf"got no gradient on rank {dist.get_rank()} \(axis {BOTH}\(\d of 4\)\)"):
        model.gain.sum().backward()
    model.zero_grad()
    assert model.global_mean_scale(dist.get_rank()) == 4 / 6
    with pytest.raises(ValueError, match=rf"something else at coords \[3\] of axis '{BOTH}'"):
        model.global_mean_scale(-1 if dist.get_rank() == 3 else 1)


def leave(*_):
    os._exit(7)


def step_of_which_a_rank_leaves(lost, settings):
    model = DDP(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), mesh_of(2, 2), bucket_bytes=300, **settings)
    if dist.get_rank() == lost:
        model.module[1].weight.register_hook(leave)
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.usefixtures("quick_failures")
@pytest.mark.parametrize("settings", [{"zero": 2}, {"zero": 3, "reduction": "ordered"}])
def test_all_others_name_the_lost_rank(settings):
    """One of them has no collective with it: it waits for one that does."""
    with pytest.raises(RankFailure, match="rank 1: left with exit status 7") as failure:
        run_ranks(step_of_which_a_rank_leaves, 4, 1, settings, timeout=40)
    assert set(failure.value.exceptions) == {0, 2, 3}, failure.value
    for rank, error in failure.value.exceptions.items():
        expected = (
            rf"the \S+ of .* over axis '(shard|replicate|{BOTH})' failed on rank {rank}; "
            r"no answer from rank 1: ended, or hangs elsewhere\n"
        )
        assert re.match(expected, str(error)), error
