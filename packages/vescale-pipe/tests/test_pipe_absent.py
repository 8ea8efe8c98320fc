"""Code outside of stage modules may ask what tensors of another stage are like, as it runs on every stage."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import ranks


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(4, 6)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.projection(x)


class Net(nn.Module):
    """As vision models and Mamba do: casts to the dtype of a weight, masks of its size on its device."""

    def __init__(self):
        super().__init__()
        self.embed = Patches()
        self.head = nn.Linear(6, 2)
        self.width = 6

    def forward(self, x):
        weight = self.embed.projection.weight
        h = self.embed(x.to(weight.dtype))
        mask = torch.ones(self.head.weight.shape[1], dtype=self.head.weight.dtype, device=self.head.bias.device)
        assert weight.ndim == weight.dim() == 2
        assert (weight.size(), weight.size(1), weight.numel()) == ((6, 4), 4, 24)
        assert weight.is_floating_point() and not weight.is_complex()  # noqa: PT018
        assert self.embed.scale.shape == (3,)
        assert self.embed.projection.in_features == 4
        return self.head(h * mask).square().mean()


def build():
    torch.manual_seed(0)
    return Net()


def engine_for(model, mesh):
    return PipelineEngine(model, mesh, PipelinePlan(num_microbatches=2, split=["head"]), per_microbatch=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@ranks(2)
def test_training_is_that_of_one_process(dtype, pipeline_mesh):
    """The dtype is that of the present, also where the model is converted after the engine was made."""
    one, model, x = build().to(dtype), build(), torch.randn(4, 4, dtype=torch.float64)
    engine = engine_for(model, pipeline_mesh())
    model.to(dtype)
    for _ in range(2):
        one.zero_grad()
        model.zero_grad()
        loss = engine(x)
        loss.backward()
        expected = 0
        for rows in x.chunk(2):
            part = one(rows) / 2
            part.backward()
            expected = expected + part.detach()
        assert loss.dtype == dtype
        assert torch.equal(loss, expected)
    gradients = {name: p.grad for name, p in one.named_parameters()}
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@ranks(2)
def test_a_model_without_memory_is_converted_after_it_has_some(pipeline_mesh):
    """Stubs keep no tensors, so a conversion has nothing to copy from the meta device."""
    with torch.device("meta"):
        model = Net()
    engine = engine_for(model, pipeline_mesh())
    model.to_empty(device="cpu")
    model.to(device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert engine(torch.ones(4, 4)).dtype == torch.float64
    assert model.head.weight.device == torch.device("cpu")


@ranks(2)
def test_what_is_known_and_what_is_not(pipeline_mesh):
    model = build()
    engine_for(model, pipeline_mesh())
    absent = model.head if dist.get_rank() == 0 else model.embed.projection
    name, stage = ("head", 1) if dist.get_rank() == 0 else ("embed.projection", 0)
    unit = model.head if dist.get_rank() == 0 else model.embed
    for other in (copy.deepcopy(unit), pickle.loads(pickle.dumps(unit))):
        assert f"of stage {stage}" in repr(other)
    absent.weight = nn.Parameter(torch.ones(3, 1, dtype=torch.float16))  # as on the other stage
    assert (absent.weight.shape, absent.weight.dtype) == ((3, 1), torch.float16)
    assert dist.get_rank() or not list(model.head.parameters())
    for read in (lambda: absent.weight.t(), lambda: absent.weight.data):
        with pytest.raises(
            AttributeError, match=f"expected shape, dtype or device, got `.*` of `{name}.weight`, which is"
        ):
            read()
    for operate in (lambda: torch.ones(2) * absent.weight, lambda: torch.relu(absent.weight)):
        with pytest.raises(
            PipelineError, match=f"expected values of this stage, got `{name}.weight`, which is on pipel"
        ):
            operate()
    with pytest.raises(AttributeError, match=f"attribute `nothing` of `{name}` is available on pipeline stage {stage}"):
        _ = absent.nothing
    assert not hasattr(absent, "other")
