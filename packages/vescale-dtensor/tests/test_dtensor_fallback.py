"""An operator that stock DTensor has no rule for runs on whole operands: right values, right gradients, on all ranks.

Reference: the same operator on plain tensors.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from vescale.dtensor import Replicate, Shard, UnsupportedOperator, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

FUNCTIONS = {
    "linalg.inv": lambda x: torch.linalg.inv(x[:, :5] + 5 * torch.eye(5, dtype=x.dtype)),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "index with a mask": lambda x: x[x > 0],
    "unfold": lambda x: x.unfold(1, 3, 2),
    "uneven unflatten": lambda x: x.unflatten(1, (2, 3)),
    "uneven flatten": lambda x: x.flatten(),
    "grid_sample": lambda x: F.grid_sample(x.view(1, 1, 5, 6), torch.zeros(1, 2, 2, 2, dtype=x.dtype), align_corners=True),
}
S0, S1, R = Shard(0), Shard(1), Replicate()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@ranks(4)
def test_values_and_gradients_equal_one_device():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for name, function in FUNCTIONS.items():
        torch.manual_seed(3)
        data = torch.randn(5, 6, dtype=torch.float64)
        plain = data.clone().requires_grad_()
        expected = function(plain)
        weight = torch.randn_like(expected) if expected.is_floating_point() else None
        if weight is not None:
            (expected * weight).sum().backward()
        for placement in (S0, S1, R):
            sharded = distribute_tensor(data, mesh, [placement]).requires_grad_()
            with implicit_replication():
                actual = function(sharded)
                assert actual.shape == expected.shape, (name, placement)
                torch.testing.assert_close(whole(actual), expected, rtol=1e-12, atol=1e-12)
                if weight is not None:
                    (actual * weight).sum().backward()
                    torch.testing.assert_close(whole(sharded.grad), plain.grad, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_what_is_written_keeps_its_placements():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = torch.arange(15.0).view(5, 3)
    expected = data.clone()
    expected.masked_scatter_(data > 6, -data)
    sharded = distribute_tensor(data.clone(), mesh, [S0])
    mask, source = (distribute_tensor(t, mesh, [S0]) for t in (data > 6, -data))
    result = sharded.masked_scatter_(mask, source)
    assert result is sharded
    assert sharded.placements == (S0,)
    assert torch.equal(sharded.full_tensor(), expected)


@ranks(2)
def test_stock_torch_raises():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.randn(5, 6), mesh, [S0])
    for name in ("nonzero", "index with a mask", "uneven flatten"):
        with disabled("operators"), pytest.raises((RuntimeError, NotImplementedError)):
            FUNCTIONS[name](sharded)
        FUNCTIONS[name](sharded)


@ranks(2)
def test_whole_operands_need_no_communication_where_they_are_whole():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    replicated = distribute_tensor(torch.randn(5, 6), mesh, [R])
    with CommDebugMode() as communication:
        replicated[replicated > 0].exp()
    assert communication.get_total_counts() == 0


@ranks(2)
def test_refused_alike_on_all_ranks_before_communication():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.randn(5, 6), mesh, [S0])
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    other = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 1)), [R, R])
    mask = distribute_tensor(torch.ones(4, 4, dtype=torch.bool), mesh, [R])
    with CommDebugMode() as communication:
        with pytest.raises(UnsupportedOperator, match=r"aten.resize_.*shape \(5, 6\).*Shard\(dim=0\).*returns a new"):
            sharded.resize_(3)
        with pytest.raises(UnsupportedOperator, match=r"masked_scatter_.*writes to a partial tensor: redistribute"):
            partial.masked_scatter_(mask, partial)
        with pytest.raises(UnsupportedOperator, match=r"linalg_lstsq.*bring them to one mesh with full_tensor\(\)"):
            torch.linalg.lstsq(partial, other)
        with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
            torch.masked_scatter(sharded, torch.ones(5, 6, dtype=torch.bool), torch.ones(30))
    assert communication.get_total_counts() == 0
