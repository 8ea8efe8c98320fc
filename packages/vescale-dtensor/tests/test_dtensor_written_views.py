"""What is written to a view of a sharded tensor arrives in the tensor, and the other way round, as on one device.

Stock DTensor gives a view over a sharded dim as a gathered copy; what is written to that is lost, and the copy does not
see what is written to the tensor.
"""

import gc

import pytest
import torch

from vescale.dtensor import (
    DTensor,
    Replicate,
    Shard,
    UnsupportedOperator,
    disabled,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks

WRITES = {
    "a row": lambda x: x[3].zero_(),
    "a column": lambda x: x[:, 2].fill_(7),
    "a range": lambda x: x[1:4].mul_(2),
    "an element": lambda x: x[2, 1].add_(1),
    "rows of itself": lambda x: x[0:2].copy_(x[3:5]),
    "assignment": lambda x: x.__setitem__((slice(1, 3), 2), 5.0),
    "flattened": lambda x: x.view(-1)[3:17].neg_(),
    "of a detached tensor": lambda x: x.detach()[4].zero_(),
    "a view of a view of a view": lambda x: x[1:4].t()[2][1:].mul_(-1),
    "a part of a row": lambda x: x[3][1:].mul_(-1),
    "a part of a part of rows": lambda x: x[1:4][1:, 2:5][1][1:].mul_(-1),
    "an element of a row of rows": lambda x: x[2:].t()[3:][1][1:2].zero_(),
    "with a sharded value": lambda x: x[1:3].copy_(x[3:5] * 2),
    "twice": lambda x: (x[1].zero_(), x[1].add_(3), x[2:].sub_(1)),
    "in another dtype": lambda x: x[3].view(torch.int32)[:2].fill_(7),
    "in a wider dtype": lambda x: x[3].view(torch.complex128)[1:].zero_(),
    "as a result": lambda x: torch.add(x[0], 5.0, out=x[3]),
    "in a list": lambda x: torch._foreach_zero_([x[3], x[4]]),
    "in a list, twice one row": lambda x: torch._foreach_add_([x[3][:2], x[3][2:], x[0][1:]], 1.5),
    "of a temporary tensor": lambda x: x.data[1:3].data[0].fill_(3),
}

# functions of a tensor and of a view of it; they return what is read at the end
READS = {
    "after the tensor": lambda x, row: (row, x.mul_(2)),
    "after another view": lambda x, row: (part := x[2:5], row.zero_(), part),
    "after views in the tensor's memory": lambda x, row: (x[:, 1:3].neg_(), x[:, 2].zero_(), row),
    "after a list of tensors": lambda x, row: (torch._foreach_mul_([x, x.clone()], 3), row, x)[1:],
    "after a result": lambda x, row: (row, torch.neg(x.clone(), out=x)),
    "after a view of a view": lambda x, row: (part := x[1:4], x.add_(1), part[1][0].zero_(), part, row),
    "of another dtype": lambda x, row: (bits := row.view(torch.int32), x.mul_(2), bits),
    "of a detached tensor": lambda x, row: (row := x.detach()[3], x.mul_(2), row),
    "after a part of it": lambda x, row: (row[1:].mul_(-1), x.add_(1), row),
    "a part, after the tensor": lambda x, row: (part := row[1:4], x.mul_(2), part, row),
    "a part, after the row": lambda x, row: (part := row[1:4], row.mul_(2), part, x[3]),
    "a part of a row that is gone": lambda x, _: (part := x[2][1:], x.mul_(2), part.add_(1), x[2], part),
}


# where two axes shard two dims, a view of a view is a copy of a copy: `x[3]` is still sharded, and `x[3][1:]` is not
PLACEMENTS = {
    1: [(Shard(0),), (Shard(1),)],
    2: [
        (Shard(0), Shard(0)),
        (Shard(1), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
    ],
}


def run(function, tensor):
    """Return what a function gives, each tensor read again at the end."""
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in function(tensor, tensor[3])]


@ranks(4)
def test_values_are_those_of_one_device():
    for sizes, names in (((4,), ("tp",)), ((2, 2), ("dp", "tp"))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for name, write in WRITES.items():
            data = torch.arange(30, dtype=torch.float64).view(5, 6)
            expected = data.clone()
            write(expected)
            for placements in PLACEMENTS[mesh.ndim]:
                sharded = distribute_tensor(data, mesh, placements)
                write(sharded)
                assert sharded.placements == placements
                assert torch.equal(sharded.full_tensor(), expected), (name, placements)


@ranks(4)
def test_views_are_read_after_later_writes():
    for sizes, names in (((4,), ("tp",)), ((2, 2), ("dp", "tp"))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for name, read in READS.items():
            data = torch.arange(30, dtype=torch.float64).view(5, 6)
            whole = data.clone()
            expected = run(read, whole)
            for placements in PLACEMENTS[mesh.ndim]:
                sharded = distribute_tensor(data, mesh, placements)
                actual = run(read, sharded)
                assert all(map(torch.equal, actual, expected)), (name, placements)
                assert torch.equal(sharded.full_tensor(), whole), (name, placements)


@ranks(2)
def test_ranks_may_forget_a_view_at_different_times():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    cycle = [sharded[3]]
    cycle.append(cycle)
    gc.disable()
    del cycle
    if mesh.get_local_rank() == 1:
        gc.collect()
    sharded.add_(1)  # rank 0 still holds the row, rank 1 does not
    gc.enable()
    assert sharded.full_tensor().sum() == 40


@ranks(4)
def test_ranks_may_forget_a_view_of_a_view_at_different_times():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)])
    cycle = [sharded[3], sharded[3][1:]]
    cycle.append(cycle)
    gc.disable()
    del cycle
    if mesh.get_local_rank("dp") == 1:
        gc.collect()
    sharded.add_(1)  # two ranks still hold the row and a part of another copy of it, two ranks hold neither
    gc.enable()
    assert sharded.full_tensor().sum() == 40


@ranks(4)
def test_a_view_keeps_the_memory_of_its_tensor():
    """A write to a view of a tensor that is gone on some ranks gives the values of one device, on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in PLACEMENTS[2]:
        sharded = distribute_tensor(torch.ones(5, 4), mesh, placements)
        row = sharded[3]
        cycle = [sharded]
        cycle.append(cycle)
        gc.disable()
        del cycle, sharded
        if mesh.get_local_rank("dp") == 1:
            gc.collect()
        row[1:].mul_(3)
        gc.enable()
        assert row.full_tensor().tolist() == [1, 3, 3, 3]


@ranks(2)
def test_conjugated_views():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.randn(5, 4, dtype=torch.complex128)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    for x in (whole, sharded):
        x.conj()[3].mul_(1j)
        x.conj().imag[1].zero_()
    assert torch.equal(sharded.full_tensor(), whole)


@ranks(2)
def test_many_views_of_one_tensor():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    kept = [sharded[i % 5] for i in range(200)][::40]
    sharded.add_(1)
    assert all(torch.equal(row.full_tensor(), torch.full((4,), 2.0)) for row in kept)


@ranks(2)
def test_a_tensor_and_its_view_in_one_operator_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    with pytest.raises(UnsupportedOperator, match="use two operators"):
        torch._foreach_add_([sharded, sharded[3]], 1)
    assert sharded.full_tensor().sum() == 20


@ranks(2)
def test_a_parameter_without_a_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]))
    with torch.no_grad():
        weight[3].zero_()
    assert weight.full_tensor().sum(1).tolist() == [4, 4, 4, 0, 4]


@ranks(2)
def test_stock_torch_loses_it():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    with disabled("operators"):
        sharded[3].zero_()
        row = sharded[3]
        sharded.mul_(2)
    assert sharded.full_tensor().sum() == 40
    assert row.full_tensor().sum() == 4


@ranks(2)
def test_random_fills_of_a_view():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.zeros(5, 40)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    for tensor in (whole, sharded):
        torch.manual_seed(3)
        tensor[3].normal_()
        tensor[4].uniform_()
    assert torch.equal(sharded.full_tensor(), whole)


@ranks(2)
def test_the_last_view_is_freed_inside_an_operator():
    """`x[mask] = 0` runs as another operator that writes, which finds that no view is left."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    table = dict(DTensor._op_dispatcher._custom_op_handlers)
    sharded = distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Shard(0)])
    for number in range(3):
        row = sharded[3]
        mask = sharded == number
        del row
        sharded[mask] = 9
        assert dict(DTensor._op_dispatcher._custom_op_handlers) == table
    assert sharded.full_tensor().flatten()[:4].tolist() == [9, 9, 9, 3]


@ranks(2)
def test_operators_are_watched_only_while_a_copy_is_alive():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    sharded = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    row = sharded[3]
    assert torch.ops.aten.mul_.Tensor in table
    row.mul_(2)
    del row
    sharded.add_(1)
    assert dict(table) == before
    assert sharded.full_tensor().sum() == 44
