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
    "grid_sample": lambda x: F.grid_sample(
        x.view(1, 1, 5, 6), torch.zeros(1, 2, 2, 2, dtype=x.dtype), align_corners=True
    ),
}
GRID = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
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
def test_what_is_written_to_a_partial_tensor_counts_once():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    partial = DTensor.from_local(torch.full((4, 4), 1.0 + mesh.get_local_rank()), mesh, [Partial()])
    partial[0].fill_(5)
    mask = distribute_tensor(torch.eye(4, dtype=torch.bool), mesh, [R])
    partial.masked_scatter_(mask, distribute_tensor(torch.arange(4.0), mesh, [R]))
    expected = torch.full((4, 4), 3.0)
    expected[0] = 5
    expected[mask.to_local()] = torch.arange(4.0)
    assert partial.placements == (Partial(),)
    assert torch.equal(partial.full_tensor(), expected)


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
    with CommDebugMode() as communication:
        with pytest.raises(UnsupportedOperator, match=r"aten.set_.*shape \(5, 6\).*Shard\(dim=0\).*returns a new"):
            torch.ops.aten.set_(sharded)
        with pytest.raises(UnsupportedOperator, match=r"linalg_lstsq.*bring them to one mesh with full_tensor\(\)"):
            torch.linalg.lstsq(partial, other)
        with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
            torch.masked_scatter(sharded, torch.ones(5, 6, dtype=torch.bool), torch.ones(30))
    assert communication.get_total_counts() == 0


@ranks(2)
def test_shape_changed_in_place():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = torch.arange(30.0).view(5, 6)
    for change in (lambda x: x.unsqueeze_(1), lambda x: x.t_(), lambda x: x.transpose_(0, 1).unsqueeze_(0).squeeze_(0)):
        for placement in (S0, S1, R):
            sharded, expected = distribute_tensor(data.clone(), mesh, [placement]), change(data.clone())
            assert change(sharded) is sharded
            assert sharded.shape == expected.shape
            assert torch.equal(sharded.full_tensor(), expected), placement


@ranks(2)
def test_running_statistics_are_written_whatever_their_placements():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    x, mean, var = torch.randn(6, 4, dtype=torch.float64), torch.zeros(4).double(), torch.ones(4).double()
    sharded = [distribute_tensor(t.clone(), mesh, [S0]) for t in (x, mean, var)]
    expected = F.batch_norm(x, mean, var, training=True)
    actual = F.batch_norm(*sharded, training=True)
    torch.testing.assert_close(actual.full_tensor(), expected)
    torch.testing.assert_close(sharded[1].full_tensor(), mean)
    torch.testing.assert_close(sharded[2].full_tensor(), var)
