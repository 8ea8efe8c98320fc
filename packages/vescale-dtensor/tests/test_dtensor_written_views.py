"""What is written to a view of a sharded tensor arrives in the tensor, as on one device.

Stock DTensor gives a view over a sharded dim as a gathered copy; what is written to that is lost.
"""

import torch

from vescale.dtensor import DTensor, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
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
    "with a sharded value": lambda x: x[1:3].copy_(x[3:5] * 2),
    "twice": lambda x: (x[1].zero_(), x[1].add_(3), x[2:].sub_(1)),
}


@ranks(4)
def test_values_are_those_of_one_device():
    for sizes, names in (((4,), ("tp",)), ((2, 2), ("dp", "tp"))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for name, write in WRITES.items():
            data = torch.arange(30, dtype=torch.float64).view(5, 6)
            expected = data.clone()
            write(expected)
            for placements in ((Shard(0),) * mesh.ndim, (Shard(1),) + (Replicate(),) * (mesh.ndim - 1)):
                sharded = distribute_tensor(data, mesh, placements)
                write(sharded)
                assert sharded.placements == placements
                assert torch.equal(sharded.full_tensor(), expected), (name, placements)


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
    assert sharded.full_tensor().sum() == 20


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
