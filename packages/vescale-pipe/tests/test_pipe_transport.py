"""Values of any dtype, shape and strides cross stages; groups are created with and without the full world."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale.pipe._run.transport import new_groups
from vescale_testing import ranks

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


class Emits(nn.Module):
    """Return a hidden value and the tensors of ``make(micro-batch)``."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make, self.calls = nn.Linear(4, 4), make, 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x), self.make(self.calls - 1)


class Receives(nn.Module):
    """Keep the received tensor of each micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear, self.received = nn.Linear(4, 4), []

    def forward(self, hidden, tensor):
        self.received.append(tensor)
        return self.linear(hidden)


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second = Emits(make), Receives()

    def forward(self, x):
        return self.second(*self.first(x)).square().mean()


def run(make, pipeline_mesh, num_microbatches=2):
    """Return the tensors received by the last stage, one per micro-batch; empty on the first stage."""
    model = Model(make)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", num_microbatches, ["second"]))
    engine(torch.ones(2 * num_microbatches, 4)).backward()
    return model.second.received if engine.stage == 1 else []


@pytest.mark.parametrize("name", TENSORS)
@ranks(2)
def test_tensor_arrives(name, pipeline_mesh):
    expected = TENSORS[name]()
    for received in run(lambda _: TENSORS[name](), pipeline_mesh):
        assert received.dtype == expected.dtype
        assert torch.equal(received, expected)
        if name in ("transposed", "channels last"):
            assert received.stride() == expected.stride()


@ranks(2)
def test_values_arrive_in_order_with_the_recorded_strides(pipeline_mesh):
    matrix = torch.arange(6.0).reshape(2, 3)

    def make(microbatch):
        return (matrix + microbatch).t().contiguous().t() if microbatch == 0 else matrix + microbatch

    for microbatch, received in enumerate(run(make, pipeline_mesh, num_microbatches=4)):
        assert torch.equal(received, matrix + microbatch)
        assert received.stride() == (1, 2)


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
def test_stages_in_different_numbers_of_groups(pipeline_mesh):
    """Stock torch would name the pipeline's groups after the number of groups of each stage."""
    dist.new_group([0])
    for _ in range(2):
        run(lambda _: torch.ones(1), pipeline_mesh)
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.raises(RuntimeError):
        dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=1))


@ranks(3)
def test_a_sent_value_is_freed_when_its_gradient_has_arrived(pipeline_mesh):
    """As its activations are: 1F1B holds those of as many micro-batches as stages follow."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 8), loss_fn=torch.mean)
    transport, held = engine._transport, []
    send = transport.send
    for _ in range(2):
        held.clear()
        transport.send = lambda *args, **kwargs: (held.append(len(transport._pending)), send(*args, **kwargs))[1]
        engine(torch.ones(8, 4))
    if dist.get_rank() == 0:
        assert max(held) == 2
