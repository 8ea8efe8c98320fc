"""Fused optimizer steps on sharded parameters: the values of one device, without asking stock DTensor.

Up to the last bit: torch's kernel rounds the last elements of a tensor, which fill no vector, in another way.
"""

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import DTensor, InterleavedShard, RaggedShard, Replicate, Shard, _fused_steps, init_device_mesh
from vescale_testing import ranks

OPTIMIZERS = (
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {"weight_decay": 0.1}),
)
SHAPES = ((5, 3), (4, 6), (7,), (1, 2))  # uneven, and with ranks that hold nothing
PLACEMENTS = ((Shard(0),), (Replicate(),), (Shard(0),), (Replicate(),))

LAST_BIT = {"rtol": 1e-14, "atol": 1e-15}


def parameters_of(shard, mesh):
    generator = torch.Generator().manual_seed(3)
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [nn.Parameter(w.clone()) for w in wholes], [
        nn.Parameter(shard(whole, mesh, layout)) for whole, layout in zip(wholes, PLACEMENTS, strict=True)
    ]


def set_gradients(alone, sharded, shard, mesh, step):
    generator = torch.Generator().manual_seed(step)
    for one, many, layout in zip(alone, sharded, PLACEMENTS, strict=True):
        one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
        many.grad = shard(one.grad, mesh, layout)


def calls_of_stock(monkeypatch):
    calls, stock = [], _fused_steps._torch.stock_dispatch

    def spy(op, args, kwargs):
        calls.append(op)
        return stock(op, args, kwargs)

    monkeypatch.setattr(_fused_steps._torch, "stock_dispatch", spy)
    return calls


@ranks(2)
def test_steps_are_those_of_one_device(shard, monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    calls = calls_of_stock(monkeypatch)
    for optimizer, options in OPTIMIZERS:
        options = {"lr": 0.01, **options, "fused": True}
        alone, sharded = parameters_of(shard, mesh)
        one, many = optimizer(alone, **options), optimizer(sharded, **options)
        for step in range(3):
            set_gradients(alone, sharded, shard, mesh, step)
            one.step()
            with CommDebugMode() as counts:
                many.step()
            assert counts.get_total_counts() == 0
        for expected, parameter in zip(alone, sharded, strict=True):
            torch.testing.assert_close(parameter.full_tensor(), expected, **LAST_BIT)
            for key, value in one.state[expected].items():
                state = many.state[parameter][key]
                if isinstance(value, torch.Tensor):
                    state = state.full_tensor() if isinstance(state, DTensor) else state
                    torch.testing.assert_close(state, value, **LAST_BIT)
    assert not calls


@ranks(2)
def test_placements_that_torch_lacks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    for layout in ((RaggedShard(dims=(0,), local_units=(3, 1)),), (InterleavedShard(1, 3),)):
        start = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        alone, sharded = nn.Parameter(whole.clone()), nn.Parameter(start.redistribute(placements=layout))
        alone.grad, sharded.grad = whole.sin(), start.redistribute(placements=layout).sin().detach()
        for parameter in (alone, sharded):
            torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
        torch.testing.assert_close(sharded.detach().full_tensor(), alone.detach(), **LAST_BIT)


@ranks(2)
def test_other_calls_are_left_to_stock(shard, monkeypatch):
    """A gradient that lies elsewhere than its parameter is moved, as stock torch does it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    calls = calls_of_stock(monkeypatch)
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    alone, sharded = nn.Parameter(whole.clone()), nn.Parameter(shard(whole, mesh, (Shard(0),)))
    alone.grad, sharded.grad = whole.sin(), shard(whole.sin(), mesh, (Replicate(),))
    for parameter in (alone, sharded):
        torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
    assert calls
    torch.testing.assert_close(sharded.detach().full_tensor(), alone.detach(), **LAST_BIT)


@ranks(2)
def test_a_wrong_gradient_is_seen(shard):
    """The comparison above fails where one rank's gradient is another's."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    alone, sharded = nn.Parameter(whole.clone()), nn.Parameter(shard(whole, mesh, (Shard(0),)))
    alone.grad, sharded.grad = whole.sin(), shard(whole.sin().flip(0), mesh, (Shard(0),))
    for parameter in (alone, sharded):
        torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    assert not torch.allclose(sharded.detach().full_tensor(), alone)
