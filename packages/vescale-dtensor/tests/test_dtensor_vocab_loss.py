"""`cross_entropy` on logits that are sharded over the classes equals one device and gathers no logits."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from vescale.dtensor import Partial, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

IGNORED = -100
WHOLE, ROWS, CLASSES, LAST = Replicate(), Shard(0), Shard(1), Shard(2)


def of_targets(placements, ndim=2):
    """Placements of the targets `(N, d)` beside logits `(N, C, d)`; a single row `(C,)` has one target."""
    return tuple({ROWS: ROWS, LAST: Shard(1)}.get(p, WHOLE) if ndim > 1 else WHOLE for p in placements)


def inputs(shape):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    num_classes = shape[1] if len(shape) > 1 else shape[0]
    targets = torch.randint(num_classes, (shape[:1] + shape[2:]) if len(shape) > 1 else (), generator=generator)
    if targets.ndim:
        targets[: shape[0] // 2 - 1] = IGNORED  # most of the first shard
    return logits, targets, torch.linspace(0.5, 3, num_classes, dtype=torch.float64)


def assert_same_loss(shard, mesh, placements, shape, *, weighted=False, **options):
    logits, targets, weights = inputs(shape)
    expected = F.cross_entropy(logits, targets, weights if weighted else None, **options)
    factors = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * factors).sum().backward()
    sharded = shard(logits, mesh, placements)
    weight = shard(weights, mesh, (WHOLE,) * mesh.ndim) if weighted else None
    actual = F.cross_entropy(sharded, shard(targets, mesh, of_targets(placements, logits.ndim)), weight, **options)
    where = (placements, shape, weighted, options)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-14, msg=lambda m: f"{m} {where}")
    (actual * shard(factors, mesh, (WHOLE,) * mesh.ndim)).sum().backward()
    torch.testing.assert_close(
        sharded.grad.full_tensor(), logits.grad, rtol=1e-12, atol=1e-14, msg=lambda m: f"{m} {where}"
    )
    return actual, sharded


@ranks(2)
def test_all_options(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for weighted, reduction, smoothing in itertools.product((False, True), ("none", "mean", "sum"), (0.0, 0.1)):
        shape = (4, 8, 3) if weighted else (6, 7)
        actual, sharded = assert_same_loss(
            shard, mesh, (CLASSES,), shape, weighted=weighted, reduction=reduction, label_smoothing=smoothing
        )
        assert sharded.grad.placements == (CLASSES,)
        assert actual.placements == (Partial(),)


@ranks(3)
def test_uneven_and_empty_shards(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for num_classes, reduction in itertools.product((2, 4, 7), ("none", "mean")):
        assert_same_loss(shard, mesh, (CLASSES,), (5, num_classes), weighted=True, reduction=reduction)
        assert_same_loss(shard, mesh, (ROWS,), (num_classes,), reduction=reduction)  # one row without a batch dim


@ranks(4)
def test_classes_and_batch_over_two_axes(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in itertools.product((ROWS, CLASSES, WHOLE), repeat=2):
        if CLASSES in placements:
            assert_same_loss(shard, mesh, placements, (5, 7), weighted=True)
    assert_same_loss(shard, mesh, (ROWS, CLASSES), (5, 7), reduction="none")
    assert_same_loss(shard, mesh, (LAST, CLASSES), (4, 7, 5))
    assert_same_loss(shard, mesh, (CLASSES, LAST), (4, 7, 5), reduction="sum", label_smoothing=0.2)
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    assert_same_loss(shard, mesh, (ROWS, CLASSES), (5, 7), weighted=True)


@ranks(2)
def test_other_uses_of_log_softmax(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x.data[0, :, 0] = -torch.inf
    x.data[0, 0, 0] = 1
    for placement, dim in itertools.product((ROWS, CLASSES, LAST), (0, 1, -1)):
        x.grad = None
        F.log_softmax(x, dim).exp().square().sum().backward()
        sharded = shard(x, mesh, (placement,))
        actual = F.log_softmax(sharded, dim)
        assert actual.stride() == x.stride()
        torch.testing.assert_close(actual.full_tensor(), F.log_softmax(x, dim), rtol=1e-12, atol=1e-14)
        actual.exp().square().sum().backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), x.grad, rtol=1e-12, atol=1e-14)
    low = shard(x.detach().bfloat16(), mesh, (CLASSES,))
    expected = F.log_softmax(x.detach().bfloat16(), 1)
    torch.testing.assert_close(F.log_softmax(low, 1).full_tensor(), expected, rtol=2**-8, atol=0)
    upcast = F.log_softmax(low, 1, dtype=torch.float32)
    torch.testing.assert_close(upcast.full_tensor(), F.log_softmax(x.detach().bfloat16(), 1, dtype=torch.float32))


@ranks(2)
def test_class_probabilities_as_targets(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, _, weights = inputs((6, 7))
    probabilities = torch.rand(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(1)
    F.cross_entropy(logits, probabilities, weights, label_smoothing=0.1).backward()
    sharded = shard(logits, mesh, (CLASSES,))
    weight = shard(weights, mesh, (WHOLE,))
    F.cross_entropy(sharded, shard(probabilities, mesh, (CLASSES,)), weight, label_smoothing=0.1).backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), logits.grad, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_no_logits_are_communicated(shard):
    assert_no_logits_are_communicated(shard, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


def assert_no_logits_are_communicated(shard, mesh):
    logits, targets, _ = inputs((6, 8))
    sharded = shard(logits, mesh, (CLASSES,))
    with CommDebugMode() as counts:
        F.cross_entropy(sharded, shard(targets, mesh, (WHOLE,))).backward()
    names = {str(op): count for op, count in counts.get_comm_counts().items()}
    assert set(names) == {"c10d_functional.all_reduce"}, names
    assert sum(names.values()) == 3  # two of log_softmax, one of its gradient


@ranks(2)
def test_targets_out_of_bounds(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, targets, _ = inputs((6, 7))
    for wrong in (7, -1):
        targets[-1] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.cross_entropy(logits, targets)
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.cross_entropy(shard(logits, mesh, (CLASSES,)), shard(targets, mesh, (WHOLE,)))


@ranks(2)
def test_plain_targets_need_implicit_replication(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, targets, _ = inputs((6, 7))
    sharded = shard(logits, mesh, (CLASSES,))
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor; distribute the tensor of shape \(6"):
        F.cross_entropy(sharded, targets)
    with implicit_replication():
        actual = F.cross_entropy(sharded, targets)
    torch.testing.assert_close(actual.full_tensor(), F.cross_entropy(logits, targets), rtol=1e-12, atol=0)


@ranks(2)
def test_after_loss_parallel_the_rules_are_back(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, targets, _ = inputs((6, 7))
    with loss_parallel():
        actual = F.cross_entropy(shard(logits, mesh, (CLASSES,)), targets)
    torch.testing.assert_close(actual.full_tensor(), F.cross_entropy(logits, targets), rtol=1e-12, atol=0)
    assert_no_logits_are_communicated(shard, mesh)
    with disabled(), loss_parallel():
        pass
    assert_no_logits_are_communicated(shard, mesh)
    assert_same_loss(shard, mesh, (CLASSES,), (6, 7))


@ranks(2)
def test_stock_gathers_the_logits(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, targets, _ = inputs((6, 8))
    with warnings.catch_warnings(), disabled(), CommDebugMode() as counts:
        F.cross_entropy(shard(logits, mesh, (CLASSES,)), shard(targets, mesh, (WHOLE,)))
    assert any("all_gather" in str(op) for op in counts.get_comm_counts())
