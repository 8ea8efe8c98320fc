"""Merged projections (QKV, gate-up) with interleaved weights: forward and backward as on one device, no gathering."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import InterleavedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks


def linear(x, weight, bias):
    return F.linear(x, weight, bias)


def conv1d(x, weight, bias):
    """As GPT-2 writes it: weight (in, out), rows flattened."""
    flat = torch.addmm(bias, x.view(-1, x.size(-1)), weight.t())
    return flat.view(*x.shape[:-1], flat.size(-1))


def no_bias(x, weight, bias):  # noqa: ARG001
    return F.linear(x, weight)


SPLITS = {
    "split": lambda y, k: y.split(y.shape[-1] // k, dim=-1),
    "chunk": lambda y, k: y.chunk(k, dim=-1),
    "sizes": lambda y, k: y.split([y.shape[-1] // k] * k, dim=2),
}


def block(x, weight, bias, project, split, k):
    """Mix the parts elementwise, so that every one has another gradient."""
    first, *others = SPLITS[split](project(x, weight, bias), k)
    for number, other in enumerate(others, 2):
        first = F.silu(first) * other * number
    return first


def operands(k, width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(k)
    shapes = [(2, 4, 6), (k * width, 6), (k * width,)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def placed(mesh, k, batch):
    out = [InterleavedShard(0, k)]
    rest = [Replicate()] * (mesh.ndim - 1)
    return [([Shard(0)] if batch else []) + [Replicate()] * (mesh.ndim - batch), rest + out, rest + out]


@pytest.mark.parametrize("project", [linear, conv1d, no_bias])
def test_parts_without_communication(project):
    @ranks(4)
    def check():
        for mesh_shape, k, width in [((4,), 3, 8), ((2, 2), 3, 4), ((2, 2), 2, 6), ((2, 2), 2, 4)]:
            mesh = init_device_mesh("cpu", mesh_shape)
            for split in SPLITS if project is linear and k == 3 else ("split",):
                leaves = [t.requires_grad_() for t in operands(k, width)]
                expected = block(*leaves, project, split, k)
                expected.square().sum().backward()
                batch = len(mesh_shape) > 1 and project is not conv1d
                shards = [
                    distribute_tensor(t.detach(), mesh, p).requires_grad_()
                    for t, p in zip(leaves, placed(mesh, k, batch), strict=True)
                ]
                with CommDebugMode() as comm:
                    result = block(*shards, project, split, k)
                    assert comm.get_total_counts() == 0, comm.get_comm_counts()
                    assert result.placements[-1] == Shard(2)
                    result.square().sum().to_local().backward()
                counts = comm.get_total_counts()
                assert counts == 0, comm.get_comm_counts()
                torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-10, atol=1e-10)
                for shard, leaf in zip(shards, leaves, strict=True):
                    if leaf.grad is None:
                        continue
                    gradient = shard.grad.full_tensor()
                    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-10)
                assert shards[1].grad.placements[-1] == InterleavedShard(0, k)

    check()


@ranks(2)
def test_uneven_strips():
    mesh = init_device_mesh("cpu", (2,))
    leaves = [t.requires_grad_() for t in operands(3, 5)]
    expected = block(*leaves, linear, "split", 3)
    expected.square().sum().backward()
    shards = [
        distribute_tensor(t.detach(), mesh, p).requires_grad_()
        for t, p in zip(leaves, placed(mesh, 3, False), strict=True)
    ]
    assert shards[1].to_local().shape[0] == (9, 6)[mesh.get_local_rank()]
    result = block(*shards, linear, "split", 3)
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    result.square().sum().backward()
    for shard, leaf in zip(shards, leaves, strict=True):
        torch.testing.assert_close(shard.grad.full_tensor(), leaf.grad, rtol=1e-10, atol=1e-10)


@ranks(2)
def test_a_plainly_sharded_projection_must_gather():
    mesh = init_device_mesh("cpu", (2,))
    x, weight, bias = operands(3, 4)
    layouts = [Replicate()], [Shard(0)], [Shard(0)]
    shards = [distribute_tensor(t, mesh, p) for t, p in zip((x, weight, bias), layouts, strict=True)]
    with CommDebugMode() as comm:
        block(*shards, linear, "split", 3)
    assert comm.get_total_counts() > 0


@ranks(2)
def test_sections_of_several_parts_stay_interleaved():
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 24, dtype=torch.float64)
    d = distribute_tensor(x, mesh, [InterleavedShard(1, 6)]).requires_grad_()
    leaf = x.clone().requires_grad_()
    with CommDebugMode() as comm:
        parts = d.split([16, 4, 4], dim=-1)
        (parts[0].square().sum() + (parts[1] * parts[2]).sum()).to_local().backward()
    assert comm.get_total_counts() == 0
    assert [part.placements[0] for part in parts] == [InterleavedShard(1, 4), Shard(1), Shard(1)]
    for part, expected in zip(parts, leaf.split([16, 4, 4], dim=-1), strict=True):
        assert torch.equal(part.full_tensor(), expected)
    whole = leaf.split([16, 4, 4], dim=-1)
    (whole[0].square().sum() + (whole[1] * whole[2]).sum()).backward()
    assert d.grad.placements == (InterleavedShard(1, 6),)
    assert torch.equal(d.grad.full_tensor(), leaf.grad)


@ranks(2)
def test_sections_cut_by_indexing():
    """Grouped queries: Q is four times as wide as K and V."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 24, dtype=torch.float64)
    d = distribute_tensor(x, mesh, [InterleavedShard(1, 6)]).requires_grad_()
    leaf = x.clone().requires_grad_()

    def mix(t):
        q, k, v = t[..., :16], t[..., 16:20], t[:, 20:]
        return q, k, v, q.square().sum() + (k * v).sum()

    with CommDebugMode() as comm:
        *parts, total = mix(d)
        total.to_local().backward()
    assert comm.get_total_counts() == 0
    assert [part.placements[0] for part in parts] == [InterleavedShard(1, 4), Shard(1), Shard(1)]
    *expected, total = mix(leaf)
    total.backward()
    for part, whole in zip(parts, expected, strict=True):
        assert torch.equal(part.full_tensor(), whole)
    assert d.grad.placements == (InterleavedShard(1, 6),)
    assert torch.equal(d.grad.full_tensor(), leaf.grad)


@ranks(2)
def test_slices_of_plain_shards_keep_torchs_gradients():
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.zeros(2, 12), mesh, [InterleavedShard(1, 3)])[:, :4]  # another slice of this shape was ours
    whole = torch.randn(2, 12)
    d = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    d[:, :4].square().sum().backward()
    assert d.grad.placements == (Shard(0),)
    assert torch.equal(d.grad.full_tensor()[:, :4], 2 * whole[:, :4])


@ranks(2)
def test_sections_that_cut_a_part_are_gathered():
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 24)
    parts = distribute_tensor(x, mesh, [InterleavedShard(1, 3)]).split([10, 14], dim=1)
    for part, expected in zip(parts, x.split([10, 14], dim=1), strict=True):
        assert torch.equal(part.full_tensor(), expected)


@ranks(2)
def test_unflattening_the_merged_dim():
    """`view(..., 3, heads, head_dim)` of a merged projection."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(2, 5, 3 * 4 * 2)
    d = distribute_tensor(x, mesh, [InterleavedShard(2, 3)])
    assert torch.equal(d.view(2, 5, 3, 4, 2).full_tensor(), x.view(2, 5, 3, 4, 2))
    assert torch.equal(d.view(10, 24).full_tensor(), x.view(10, 24))
    assert torch.equal(d.transpose(0, 2).full_tensor(), x.transpose(0, 2))
    assert torch.equal((d[..., :8] + d[..., 8:16]).full_tensor(), x[..., :8] + x[..., 8:16])
