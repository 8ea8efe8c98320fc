"""A pipeline of one stage is the same engine without communication: a gradient-accumulation loop, dropout included."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()


@ranks(1)
def test_equal_to_a_loop_with_dropout(pipeline_mesh, differences, train_one_process):
    x = torch.randn(8, 4, dtype=torch.float64)
    reference, model = build(), build()
    torch.manual_seed(5)
    expected = train_one_process(reference, lambda model, x: model(x).mean(), {"x": x}, 4)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 4), loss_fn=torch.mean, per_microbatch=True)
    torch.manual_seed(5)
    loss = engine(x)
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}


@ranks(1)
def test_any_model_will_do(pipeline_mesh):
    """One stage needs no list of blocks, and tied parameters are no matter."""
    model = nn.Linear(4, 4)
    model.register_parameter("same", model.weight)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2), loss_fn=torch.mean)
    engine(torch.ones(4, 4)).backward()
    assert model.weight.grad is not None
    assert engine.split is None
    assert engine.transfers == ()


@ranks(2)
def test_an_axis_of_size_one_beside_another_axis(differences, train_one_process):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    x = torch.randn(4, 4, dtype=torch.float64)
    reference, model = build().eval(), build().eval()
    expected = train_one_process(reference, lambda model, x: model(x).mean(), {"x": x}, 2)
    PipelineEngine(model, mesh["pp"], PipelinePlan("gpipe", 2), loss_fn=torch.mean)(x).backward()
    assert differences(model, expected) == {}
