"""Sharded optimizer state as placements: parameters cut over tp, then raggedly over dp, trained as on one device."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import Partial, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks

STEPS = 3


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def weights():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((8, 6), (6, 8))]


def train_plain():
    params = [torch.nn.Parameter(weight) for weight in weights()]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for x in batches():
        optimizer.zero_grad()
        (F.linear(F.gelu(F.linear(x, params[0])), params[1]) - x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return [param.detach() for param in params]


def train_sharded(mesh, stored, used):
    """Gather each parameter from its stored placements where it is used; its gradient goes the way back."""
    params = [
        torch.nn.Parameter(distribute_tensor(weight, mesh, placements))
        for weight, placements in zip(weights(), stored, strict=True)
    ]
    optimizer = torch.optim.AdamW(params, lr=0.1, foreach=True)
    rest = [Replicate()] * (mesh.ndim - 1)
    for x in batches():
        optimizer.zero_grad()
        x = distribute_tensor(x, mesh, [Shard(0), *rest])
        first, second = (p.redistribute(placements=q) for p, q in zip(params, used, strict=True))
        (F.linear(F.gelu(F.linear(x, first)), second) - x).square().sum().backward()
        for param, placements in zip(params, stored, strict=True):
            assert param.grad.placements == tuple(placements)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return params


@pytest.mark.parametrize("units", [((1, 1), (1, 1)), ((0, 4), (3, 1)), ((1, 3), (1, 0))])
def test_over_tensor_parallelism(units):
    @ranks(4)
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        used = [Replicate(), Shard(0)], [Replicate(), Shard(1)]
        stored = [
            [RaggedShard((0,), units[0]), Shard(0)],
            [RaggedShard((0, 1), units[1]), Shard(1)],
        ]
        params = train_sharded(mesh, stored, used)
        for param, expected in zip(params, train_plain(), strict=True):
            torch.testing.assert_close(param.detach().full_tensor(), expected, rtol=1e-10, atol=1e-10)

    check()


@ranks(3)
def test_whole_matrices_on_single_ranks():
    mesh = init_device_mesh("cpu", (3,))
    stored = [[RaggedShard((0,), (0, 1, 0))], [RaggedShard((0,), (0, 0, 1))]]
    params = train_sharded(mesh, stored, [[Replicate()], [Replicate()]])
    held = [param.to_local().numel() for param in params]
    assert held == [[0, 0], [48, 0], [0, 48]][mesh.get_local_rank()]
    for param, expected in zip(params, train_plain(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), expected, rtol=1e-10, atol=1e-10)


@ranks(4)
def test_one_gather_forward_and_one_reduction_backward():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    param = distribute_tensor(weights()[0], mesh, [RaggedShard((0,), (1, 1)), Shard(0)]).requires_grad_()
    x = distribute_tensor(batches()[0], mesh, [Shard(0), Replicate()])
    with CommDebugMode() as forward:
        y = F.linear(x, param.redistribute(placements=[Replicate(), Shard(0)]))
    assert forward.get_total_counts() == 1, forward.get_comm_counts()
    with CommDebugMode() as backward:
        y.sum().to_local().backward()
    assert backward.get_total_counts() == 1, backward.get_comm_counts()
    assert "allreduce" in str(backward.get_comm_counts())  # of a copy, as gloo itself carries out a reduce-scatter


@ranks(2)
def test_a_gradient_that_is_not_reduced_trains_otherwise():
    mesh = init_device_mesh("cpu", (2,))
    param = distribute_tensor(weights()[0], mesh, [RaggedShard((0,), (1, 3))]).requires_grad_()
    x = distribute_tensor(batches()[0], mesh, [Shard(0)])
    F.linear(x, param.redistribute(placements=[Replicate()])).sum().backward()
    whole = batches()[0].sum(0).expand(8, 6)
    torch.testing.assert_close(param.grad.full_tensor(), whole)
    local = DTensor.from_local(x.to_local().sum(0).expand(8, 6), mesh, [Replicate()])
    assert not torch.allclose(local.to_local(), whole)
    reduced = DTensor.from_local(local.to_local(), mesh, [Partial()]).redistribute(
        placements=[RaggedShard((0,), (1, 3))]
    )
    torch.testing.assert_close(reduced.to_local(), param.grad.to_local())
