"""Convolutions: a sharded batch stays sharded, on one axis or on several; everything else runs on full operands."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import implicit_replication

from vescale.dtensor import Partial, Replicate, Shard, UnsupportedOperator, init_device_mesh, strict
from vescale.dtensor.debug import comm_log
from vescale_testing import ranks

CONVOLUTIONS = {
    "1-D": (lambda x, w, b: F.conv1d(x, w, b), (8, 3, 6), (2, 3, 2)),
    "strided": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (8, 3, 6), (2, 3, 3)),
    "dilated": (lambda x, w, b: F.conv2d(x, w, b, dilation=2, padding="same"), (8, 2, 4, 4), (2, 2, 3, 3)),
    "in groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (8, 4, 4, 4), (2, 2, 3, 3)),
    "transposed": (lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), (8, 3, 5), (3, 2, 2)),
    "3-D": (lambda x, w, b: F.conv3d(x, w, b), (8, 2, 3, 3, 3), (2, 2, 2, 2, 2)),
}
OF_THE_BATCH = ((Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(0)))


def tensors(name):
    _, *shapes = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (*shapes, (2,))]


def gradients(function, operands):
    """Return the result, the gradients of the operands, and those of the gradients."""
    result = function(*operands)
    first = torch.autograd.grad(result.square().sum(), operands, create_graph=True)
    return result, *first, *torch.autograd.grad(sum(each.sin().sum() for each in first), operands)


@ranks(4)
def test_a_batch_over_several_axes_is_that_of_one_device(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, (function, *_) in CONVOLUTIONS.items():
        expected = gradients(function, [each.requires_grad_() for each in tensors(name)])
        for placements in OF_THE_BATCH:
            layouts = (placements, [Replicate()] * 2, [Replicate()] * 2)
            operands = [
                shard(each, mesh, layout).requires_grad_() for each, layout in zip(tensors(name), layouts, strict=True)
            ]
            for got, wanted in zip(gradients(function, operands), expected, strict=True):
                torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-10, atol=1e-10)


@ranks(2)
def test_a_plain_weight_counts_as_replicated(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x, w, b = tensors("strided")
    expected = F.conv1d(x, w, b, stride=2, padding=1)
    x = shard(x, mesh, [Shard(0)])
    with implicit_replication(), comm_log() as log:
        result = F.conv1d(x, w, b, stride=2, padding=1)
    assert len(log) == 0
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(UnsupportedOperator, match="implicit_replication"):
        F.conv1d(x, w, b)


@ranks(4)
def test_a_sharded_batch_needs_no_communication(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w, b = tensors("1-D")
    x, w, b = shard(x, mesh, OF_THE_BATCH[0]), shard(w, mesh, [Replicate()] * 2), shard(b, mesh, [Replicate()] * 2)
    w.requires_grad_()
    with strict(), comm_log() as log:
        result = F.conv1d(x, w, b)
        (gradient,) = torch.autograd.grad(result, w, torch.ones_like(result))
    assert len(log) == 0
    assert result.placements == OF_THE_BATCH[0]
    assert gradient.placements == (Partial(), Partial())


@ranks(4)
def test_sharded_channels_are_gathered(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w, b = tensors("in groups")
    operands = [shard(x, mesh, (Shard(0), Shard(1))), shard(w, mesh, (Replicate(), Shard(0)))]
    with pytest.raises(Exception, match=r"strict\(\)"), strict():
        F.conv2d(*operands, groups=2)
    assert torch.allclose(F.conv2d(*operands, groups=2).full_tensor(), F.conv2d(x, w, groups=2), 1e-12)
    assert b.shape == (2,)
