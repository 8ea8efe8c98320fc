"""Pointwise operators for which stock has no rule run on the shards, and no collective does."""

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import DTensor, Partial, Replicate, Shard, disabled, distribute_tensor, init_device_mesh, strict
from vescale.dtensor.debug import comm_log
from vescale_testing import ranks

WHOLE = torch.arange(20, dtype=torch.float64).view(5, 4) / 4 - 2  # uneven over two ranks


def replicated(like, value):
    value = torch.as_tensor(value, dtype=like.dtype)
    return distribute_tensor(value, like.device_mesh, [Replicate()]) if isinstance(like, DTensor) else value


def gradient(function):
    def of(x):
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf), leaf, x)
        return grad

    return of


LOCAL = {
    "a number in all rows": (lambda x: x.__setitem__((..., 0), 5), (0,)),
    "a number in all columns": (lambda x: x.__setitem__(1, 5), (1,)),
    "a number in all": (lambda x: x.__setitem__(slice(None), 5), (0, 1)),
    "a plain value": (lambda x: x.fill_(torch.tensor(3.0)), (0, 1)),
    "a replicated value": (lambda x: x.fill_(replicated(x, 3.0)), (0, 1)),
    "a new tensor": (lambda x: torch.ops.aten.fill.Tensor(x, replicated(x, 3.0)), (0, 1)),
    "a quotient": (lambda x: x.floor_divide_(x.abs() + 1), (0, 1)),
    "hardtanh": (gradient(F.hardtanh), (0, 1)),
    "hardswish": (gradient(F.hardswish), (0, 1)),
    "hardsigmoid": (gradient(F.hardsigmoid), (0, 1)),
    "logsigmoid": (gradient(F.logsigmoid), (0, 1)),
}


@ranks(2)
def test_on_the_shards(shard):
    mesh = init_device_mesh("cpu", (2,))
    for name, (write, dims) in LOCAL.items():
        for dim in dims:
            whole, x = WHOLE.clone(), shard(WHOLE, mesh, [Shard(dim)])
            expected = write(whole)
            with strict(), comm_log() as log:
                result = write(x)
            assert not log.only(implicit=True), (name, dim, str(log))
            assert torch.equal(x.full_tensor(), whole), (name, dim)
            if expected is not None:
                assert result.placements == (Shard(dim),), (name, dim)
                assert torch.equal(result.full_tensor(), expected), (name, dim)


@ranks(2)
def test_a_fill_has_no_collective(shard):
    x = shard(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])
    with comm_log() as log:
        x[..., 0] = 5
        x.fill_(torch.tensor(3.0))
        x[:, 1:] = 2.0
    assert len(log) == 0, str(log)


@ranks(2)
def test_a_fill_of_what_has_to_move(shard):
    mesh = init_device_mesh("cpu", (2,))
    half = DTensor.from_local(WHOLE / 2, mesh, [Partial()])
    for placement, x in ((Shard(0), None), (Shard(1), None), (Partial(), half)):
        whole, x = WHOLE.clone(), shard(WHOLE, mesh, [placement]) if x is None else x
        for each in (whole, x):
            each[1] = 7  # one row, which is a copy where rows are sharded
            each[:, :2] = each.sum()
        assert torch.allclose(x.full_tensor(), whole), placement


@ranks(2)
def test_disabled_takes_the_rules_away(shard):
    x = shard(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])
    with disabled(), pytest.raises(RuntimeError, match="fill_"):
        x.fill_(torch.tensor(3.0))
