"""What is added to partial sums is added once and whole: the bias of a row-parallel linear, and the residual."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import DTensor, Partial, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

WHOLE = Replicate()


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def linear(x, weight, bias):
    return F.linear(x, weight, bias)


def conv1d(x, weight, bias):
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)


def scaled(x, weight, bias):
    return torch.addmm(bias, x.flatten(0, -2), weight.t(), beta=0.5, alpha=2)


def addmv(x, weight, bias):
    return torch.addmv(bias, weight, x.flatten(0, -2)[0])


def residual(x, weight, bias):
    return F.linear(x, weight) + bias


@ranks(3)
def test_row_parallel(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for f, shape, width in itertools.product((linear, conv1d, scaled, addmv, residual), ((4, 7), (2, 5, 7)), (7,)):
        whole = tensors(shape, (6, width), (6,))
        expected = f(*whole)
        expected.square().sum().backward()
        x, weight, bias = whole
        sharded = [shard(x, mesh, (Shard(x.ndim - 1),)), shard(weight, mesh, (Shard(1),)), shard(bias, mesh, (WHOLE,))]
        actual = f(*sharded)
        assert actual.placements == (Partial(),) or f is addmv, f
        torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-14)
        actual.square().sum().backward()
        for one, other in zip(sharded, whole, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-13)


@ranks(2)
def test_batched(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = tensors((3, 5, 8), (3, 8, 6), (3, 5, 6))
    expected = torch.baddbmm(whole[2], whole[0], whole[1])
    left, right, bias = (shard(t, mesh, (p,)) for t, p in zip(whole, (Shard(2), Shard(1), WHOLE), strict=True))
    torch.testing.assert_close(torch.baddbmm(bias, left, right).full_tensor(), expected, rtol=1e-12, atol=1e-14)


@ranks(3)
def test_one_rank_adds_all_of_it(shard):
    """With a product of zeros nothing rounds: the bias comes back bit for bit, in every dtype."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x, weight, bias = (t.detach() for t in tensors((4, 6), (64, 6), (64,), dtype=dtype))
        operands = (shard(torch.zeros_like(x), mesh, (Shard(1),)), shard(weight, mesh, (Shard(1),)))
        whole_bias = shard(bias, mesh, (WHOLE,))
        assert torch.equal(F.linear(*operands, whole_bias).full_tensor(), bias.expand(4, -1)), dtype
        with disabled():
            stock = F.linear(*operands, whole_bias).full_tensor()
        assert not torch.equal(stock, bias.expand(4, -1)), dtype  # three thirds


@ranks(4)
def test_two_axes(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, weight, bias = tensors((4, 8), (6, 8), (6,))
    expected = F.linear(x, weight, bias)
    for rows, inner in (((Shard(0), Shard(1)), (WHOLE, Shard(1))), ((Shard(1), Shard(1)), (Shard(1), Shard(1)))):
        actual = F.linear(shard(x, mesh, rows), shard(weight, mesh, inner), shard(bias, mesh, (WHOLE, WHOLE)))
        torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-14)


@ranks(3)
def test_every_value_survives(shard):
    """The way from whole to partial and back is exact: signed zeros, infinities, subnormal numbers, other dtypes."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for value in (torch.tensor([1.0, 0.0, -0.0, torch.inf, 3e-45]), torch.tensor([1, 2, 3]), torch.tensor([1 + 2j])):
        zeros = DTensor.from_local(value.new_zeros(()).neg(), mesh, [Partial()])
        replicated = shard(value, mesh, (WHOLE,))
        actual = torch.add(replicated, zeros)
        assert actual.placements == (Partial(),)
        whole = actual.full_tensor()
        assert torch.equal(whole, value)
        if value.is_floating_point():
            assert torch.equal(whole.signbit(), value.signbit())
        assert torch.equal(replicated.to_local(), value)


@ranks(2)
def test_it_communicates_nothing(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, weight, bias = tensors((4, 8), (6, 8), (6,))
    operands = shard(x, mesh, (Shard(1),)), shard(weight, mesh, (Shard(1),)), shard(bias, mesh, (WHOLE,))
    with CommDebugMode() as counts:
        F.linear(*operands)
    assert counts.get_total_counts() == 0


@ranks(2)
def test_a_bias_added_on_every_rank_would_be_noticed(shard, monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, weight, bias = tensors((4, 8), (6, 8), (6,))
    operands = shard(x, mesh, (Shard(1),)), shard(weight, mesh, (Shard(1),)), shard(bias, mesh, (WHOLE,))
    monkeypatch.setattr("vescale.dtensor._placements.hooks._whole_on_first", lambda tensor, *_, **__: tensor)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(F.linear(*operands).full_tensor(), F.linear(x, weight, bias))
