"""Modules come to stages in the order in which they run, which may be another than that of their registration."""

import copy
import logging

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan, split_units
from vescale_testing import ranks


class Other(nn.Module):
    """Registers its last norm before its blocks, and its blocks from the last to the first."""

    def __init__(self, *, reads=False):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(6, 6)
        self.embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.reads = reads

    def forward(self, x):
        x = nn.functional.dropout(self.embed(x), 0.0)
        for number, block in enumerate(reversed(self.blocks)):
            if self.reads and number == 2 and x.sum().isnan().item():
                return x
            x = x + torch.tanh(block(x))
        return self.norm(x).square().mean()


def stages(model, inputs, **options):
    return [" ".join(units) for units in split_units(model, PipelinePlan(**options), 2, example_inputs=inputs).stages]


def test_the_order_of_the_forward():
    model, calls = Other(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    in_order = ["embed blocks.3 blocks.2", "blocks.1 blocks.0 norm unused"]
    state = torch.get_rng_state()
    assert stages(model, (torch.ones(2, 3),)) == in_order
    assert stages(model, {"x": torch.ones(2, 3, device="meta")}) == in_order
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
    assert stages(model, None) == ["norm unused embed blocks.0 blocks.1", "blocks.2 blocks.3"]
    assert stages(model, (torch.ones(2, 3),), split=["blocks.0"]) == [
        "embed blocks.3 blocks.2 blocks.1",
        "blocks.0 norm unused",
    ]


def test_inputs_that_the_model_knows():
    model = Other()
    model.dummy_inputs = {"x": torch.ones(2, 3)}
    assert stages(model, None) == ["embed blocks.3 blocks.2", "blocks.1 blocks.0 norm unused"]


def test_a_forward_that_reads_elements(caplog):
    caplog.set_level(logging.WARNING, logger="vescale.pipe")
    in_order = ["embed blocks.3 blocks.2", "norm unused blocks.0 blocks.1"]
    assert stages(Other(reads=True), (torch.ones(2, 3),), split=["norm"]) == in_order
    text = "the order of modules after `blocks.2` is that of their registration: a forward without data ends there"
    assert text in caplog.text


class Wrapped(nn.Module):
    """Calls parts of a module that it never calls itself, as Hugging Face's BART does with its decoder alone."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Linear(3, 6)
        self.model.blocks = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.model.blocks(self.model.embed(x))).square().mean()


def test_a_module_of_which_only_parts_are_called_is_a_container():
    assert stages(Wrapped(), None, split=["head"]) == ["model", "head"]
    assert stages(Wrapped(), (torch.ones(2, 3),), split=["head"]) == ["model.embed model.blocks", "head"]


@pytest.mark.parametrize("has_example", [False, True])
@ranks(2)
def test_calls_of_parts(has_example, pipeline_mesh, train_one_process, differences):
    torch.manual_seed(0)
    model, x = Wrapped().double(), torch.randn(8, 3, dtype=torch.float64)
    expected = train_one_process(copy.deepcopy(model), lambda model, x: model(x), {"x": x}, 4)
    plan = PipelinePlan("1f1b", 4, split=["head"])
    engine = PipelineEngine(model, pipeline_mesh(), plan, example_inputs=(x,) if has_example else None)
    if not has_example:
        text = r"calls of whole units by code outside of stage modules, got one of `model\.embed`, a part of a unit of"
        with pytest.raises(PipelineError, match=text):
            engine(x)
        return
    loss = engine(x)
    loss.backward()
    assert torch.equal(loss.detach(), expected.losses[0])
    assert not differences(model, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@ranks(2)
def test_training_is_that_of_one_process(schedule, train_one_process, pipeline_mesh, differences):
    torch.manual_seed(0)
    model, x = Other().double(), torch.randn(8, 3, dtype=torch.float64)
    expected = train_one_process(copy.deepcopy(model), lambda model, x: model(x), {"x": x}, 4)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, 4), example_inputs=(x,))
    loss = engine(x)
    loss.backward()
    assert torch.equal(loss.detach(), expected.losses[0])
    assert not differences(model, expected)


@ranks(2)
def test_the_order_of_registration_is_refused(pipeline_mesh):
    engine = PipelineEngine(Other(), pipeline_mesh(), PipelinePlan("1f1b", 4))
    with pytest.raises(PipelineError, match=r"`blocks\.1` on stage 0: expected arguments of this or earlier stages"):
        engine(torch.randn(8, 3))
