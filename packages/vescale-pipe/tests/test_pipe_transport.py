"""Transfers between two ranks: any dtype, shape and strides, in order; groups made with and without the whole world."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe._transport import BACKWARD, FORWARD, Transport, new_groups
from vescale_testing import ranks


def make_transport():
    return Transport(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))["pp"], timeout=None)


TENSORS = {
    "float64": lambda: torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    "bfloat16": lambda: torch.arange(6.0).bfloat16(),
    "bool": lambda: torch.tensor([True, False, True]),
    "int64": lambda: torch.tensor(7),
    "complex, conjugated": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "slice": lambda: torch.arange(12.0).reshape(4, 3)[1:, :2],
    "offset": lambda: torch.arange(12.0)[4:],
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "size one": lambda: torch.arange(6.0).reshape(6, 1).t(),
}


@pytest.mark.parametrize("name", TENSORS)
@ranks(2)
def test_tensor_arrives(name):
    transport = make_transport()
    tensor = TENSORS[name]()
    for direction, source in ((FORWARD, 0), (BACKWARD, 1)):
        if transport.stage == source:
            transport.send(tensor, 1 - source, direction)
            transport.wait_sends()
        else:
            where = {"device": torch.device("cpu"), "source": source, "direction": direction}
            got = transport.receive(tensor.shape, tensor.stride(), tensor.dtype, **where)
            assert torch.equal(got, tensor)
            if name in ("transposed", "channels last"):
                assert got.stride() == tensor.stride()


@ranks(2)
def test_messages_keep_their_order_and_strides_can_be_asked_for():
    transport = make_transport()
    matrix = torch.arange(6.0).reshape(2, 3)
    if transport.stage == 0:
        for i in range(4):
            transport.send(matrix + i, 1, FORWARD, stride=(1, 2))
        transport.wait_sends()
    else:
        where = {"device": torch.device("cpu"), "source": 0, "direction": FORWARD}
        for i in range(4):
            assert torch.equal(transport.receive((2, 3), (1, 2), torch.float32, **where), matrix + i)


@ranks(3)
def test_small_objects():
    transport = make_transport()
    assert transport.gather_objects({"stage": transport.stage}) == [{"stage": 0}, {"stage": 1}, {"stage": 2}]
    assert transport.gather_integers([transport.stage, 1]) == [[0, 1], [1, 1], [2, 1]]
    assert transport.broadcast_from_last(torch.tensor(float(transport.stage))).item() == 2.0


@pytest.mark.parametrize("everyone", [False, True])
@ranks(4)
def test_groups_of_two_pipelines_side_by_side(everyone):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mine = mesh["pp"].mesh.tolist()
    groups = new_groups(mine, "gloo", 2, everyone=everyone, timeout=None)
    for group in groups:
        assert dist.get_process_group_ranks(group) == mine
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(mine)


@ranks(2)
def test_stages_that_know_different_groups():
    """Stock would name the pipeline's groups after how many others the stage knows."""
    dist.new_group([0])
    transport = make_transport()
    assert transport.gather_objects(transport.stage) == [0, 1]
    assert make_transport().gather_objects(transport.stage) == [0, 1]
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.raises(RuntimeError):
        dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=1))
