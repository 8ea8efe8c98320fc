"""The mean of a loss over a sharded batch is that of the whole batch, whatever targets are ignored on which rank."""

import itertools

import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import Partial, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks, torch_is_before

IGNORED = -100


def inputs(rows):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, 5, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(5, (rows,), generator=generator)
    targets[: rows // 2 - 1] = IGNORED  # most of the first shard
    return logits, targets, torch.linspace(0.5, 3, 5, dtype=torch.float64)


def assert_same_loss(shard, mesh, placements, rows, *, weighted, reduction):
    logits, targets, weights = inputs(rows)
    expected = F.cross_entropy(logits, targets, weights if weighted else None, reduction=reduction)
    expected.sum().backward()
    sharded = shard(logits, mesh, placements)
    weight = shard(weights, mesh, (Replicate(),) * mesh.ndim) if weighted else None
    actual = F.cross_entropy(sharded, shard(targets, mesh, placements), weight, reduction=reduction)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=0)
    actual.sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), logits.grad, rtol=1e-12, atol=1e-15)


@ranks(2)
def test_ignored_targets_and_class_weights(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    cases = itertools.product((Shard(0), Replicate()), (8, 7), (False, True), ("mean", "sum", "none"))
    for placement, rows, weighted, reduction in cases:
        assert_same_loss(shard, mesh, (placement,), rows, weighted=weighted, reduction=reduction)


@ranks(4)
def test_over_two_axes(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ((Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate())):
        assert_same_loss(shard, mesh, placements, 12, weighted=True, reduction="mean")


@ranks(2)
def test_pixels(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 5, 3, 2, dtype=torch.float64, generator=generator)
    targets = torch.randint(5, (4, 3, 2), generator=generator)
    targets[0] = IGNORED
    actual = F.cross_entropy(shard(logits, mesh, (Shard(0),)), shard(targets, mesh, (Shard(0),)))
    torch.testing.assert_close(actual.full_tensor(), F.cross_entropy(logits, targets), rtol=1e-12, atol=0)


@ranks(2)
def test_one_number_is_communicated(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    logits, targets, _ = inputs(8)
    with CommDebugMode() as counts:
        loss = F.cross_entropy(shard(logits, mesh, (Shard(0),)), shard(targets, mesh, (Shard(0),)))
    assert loss.placements == (Partial(),)
    assert counts.get_total_counts() == 1


@ranks(2)
def test_the_mean_of_local_means_is_another_number(shard):
    """Stock torch returns it before 2.14; from 2.14 on it gathers all logits."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    logits, targets, _ = inputs(8)
    expected = F.cross_entropy(logits, targets)
    mean_of_means = (F.cross_entropy(logits[:4], targets[:4]) + F.cross_entropy(logits[4:], targets[4:])) / 2
    assert not torch.isclose(mean_of_means, expected)
    with disabled("operators"), CommDebugMode() as counts:
        stock = F.cross_entropy(shard(logits, mesh, (Shard(0),)), shard(targets, mesh, (Shard(0),)))
    if torch_is_before("2.14"):
        torch.testing.assert_close(stock.full_tensor(), mean_of_means)
    else:
        torch.testing.assert_close(stock.full_tensor(), expected)
        assert stock.placements == (Replicate(),)
        assert counts.get_total_counts() > 0
