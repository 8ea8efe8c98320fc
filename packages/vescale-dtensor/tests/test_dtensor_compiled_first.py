"""A program that is compiled before any DTensor has moved: the compiler meets nothing but the DTensors themselves."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale.dtensor import distribute_tensor
from vescale_testing import ranks

KINDS = (Shard(0), Shard(1), Replicate(), Partial())


def move(local, mesh, before, after):
    return DTensor.from_local(local, mesh, [before], run_check=False).redistribute(placements=[after]).to_local()


def compiled():
    torch._dynamo.reset()
    return torch.compile(move, backend="eager", fullgraph=True)


@ranks(2)
def test_the_first_move_is_compiled():
    local = torch.arange(12.0).view(4, 3) + 100 * dist.get_rank()
    for number, (before, after) in enumerate(itertools.product(KINDS, KINDS[:3])):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"axis{number}",))  # a mesh that nothing has used
        first = compiled()(local, mesh, before, after)
        torch.testing.assert_close(first, move(local, mesh, before, after), rtol=0, atol=0)


@ranks(6)
def test_the_order_of_ranks():
    """Torch gathers in the order of the process group, whichever order the ranks of the mesh have."""
    whole = torch.arange(30.0).view(6, 5)
    for rows in (
        ((0, 1, 2), (3, 4, 5)),
        ((0, 3), (1, 4), (2, 5)),
        ((0, 2, 1), (3, 4, 5)),
        ((3, 4, 5), (0, 1, 2)),
        ((0, 1, 5), (3, 4, 2)),
    ):
        mesh = DeviceMesh("cpu", torch.tensor(rows))
        for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(0))):
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(tensor.full_tensor(), whole), (rows, placements)
