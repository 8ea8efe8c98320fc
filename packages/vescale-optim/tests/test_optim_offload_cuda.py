"""Offload on a CUDA device: homes are pinned host memory, and copies that do not wait for each other lose nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 512


class Net(nn.Module):
    """Layers large enough for copies to be under way while the host goes on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@pytest.fixture
def mesh():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))["dp"]
    dist.destroy_process_group()


def build():
    torch.manual_seed(0)
    return Net().to("cuda", torch.float64)


def train(model, optimizer, *, micros=1, scale=None):
    scaler = torch.amp.GradScaler("cuda", init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    for step in range(4):
        for micro in range(micros):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro), dtype=torch.float64)
            loss = model(x.cuda()).square().mean() / micros
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        if scale is not None:
            scaler.unscale_(optimizer)
        if not isinstance(model, DDP):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.parametrize("case", [{}, {"micros": 2}, {"scale": 16.0}])
def test_training_is_that_of_one_process(mesh, case):
    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), **case)
    model = DDP(build(), mesh, zero=3, offload=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.5)
    torch.testing.assert_close(train(model, optimizer, **case), expected, rtol=1e-10, atol=1e-12)
    with model.unsharded():
        for fqn, value in plain.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[fqn], value, rtol=1e-9, atol=1e-11)


def test_homes_are_pinned_and_the_device_is_empty_between_uses(mesh):
    build()(torch.ones(8, WIDTH).to("cuda", torch.float64)).sum().backward()  # cuBLAS has its workspaces now
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = DDP(build(), mesh, zero=3, offload=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    train(model, optimizer)
    torch.cuda.synchronize()
    unit = WIDTH * (WIDTH + 1) * 8
    assert torch.cuda.memory_allocated() - before < unit
    for piece, slot in zip(optimizer.pieces, model.slots().values(), strict=True):
        assert piece.tensor.is_pinned()
        assert slot.grad_part.is_pinned()
        assert all(value.device.type == "cpu" for value in optimizer.state[piece.tensor].values())
        assert slot.param.is_cuda
    assert all(part.to_local().device.type == "cpu" for part in model.sharded_parameters().values())


def test_a_gradient_that_nobody_waits_for_is_seen(mesh, monkeypatch, fault):
    """A step that begins before the gradients have come reads those of the step before."""
    fault(monkeypatch, "the host waits for copies of gradients", lambda _wait: lambda _host: None)
    model = DDP(build(), mesh, zero=3, offload=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    model(torch.ones(8, WIDTH, dtype=torch.float64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    optimizer.zero_grad()
    x = torch.full((8, WIDTH), 3.0, dtype=torch.float64, device="cuda")
    loss = model(x).sum()
    torch.cuda._sleep(2_000_000_000)  # the device is late by a second or so
    loss.backward()
    early = [slot.grad_part.clone() for slot in model.slots().values()]
    torch.cuda.synchronize()
    assert any(not torch.equal(a, slot.grad_part) for a, slot in zip(early, model.slots().values(), strict=True))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_backward_waits_for_no_device(mesh, zero):
    model = DDP(build(), mesh, zero=zero)
    x = torch.ones(8, WIDTH, dtype=torch.float64, device="cuda")
    model(x).sum().backward()  # the first allocates
    loss = model(x).sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
