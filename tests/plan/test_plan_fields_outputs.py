"""One loop and one type of output under every plan; rows of the module's output are there when asked for."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import vescale
from vescale import Plan, StepOutput
from vescale_testing import keep_float64, ranks
from vescale_testing.training import Training

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("fields_training")
sys.path.pop(0)
build, parallelize, train = training.build, training.parallelize, training.train

LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "zero": 3, "mode": "static"},
    {"tp": 2},
    {"pp": 2, "num_microbatches": 2},
    {"dp": 2, "num_microbatches": 2},
]


def words(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items())


@pytest.mark.parametrize("fields", LAYOUTS, ids=words)
def test_rows_are_those_of_one_process(fields):
    expected = build().eval()(training.batch(0)["ids"])

    @ranks(2)
    def on_every_rank():
        model, optimizer = parallelize(Plan(**fields), build(0.2))
        model.eval()
        local = model.local_batch({"ids": training.batch(0)["ids"]})
        rows = model.outputs(**local, gather=True)
        assert (rows - expected).abs().max() < 1e-12
        assert not rows.requires_grad
        classes = model.outputs(**local, select=lambda output: output.argmax(-1))
        assert torch.equal(classes, model.local_batch({"rows": expected.argmax(-1)})["rows"])
        model.train()
        train(model, optimizer, steps=1)
        model.eval()
        assert (model.outputs(**local, gather=True) - expected).abs().max() > 1e-4

    on_every_rank()


@pytest.mark.parametrize("fields", LAYOUTS, ids=words)
def test_a_loss_is_an_attribute(fields):
    """Of a Hugging Face output, which has it itself, and of a loss function's."""

    @ranks(2)
    def on_every_rank():
        config = Training("llama", layers=2, batch=4, seq=5)
        with keep_float64():
            torch.manual_seed(0)
            model, _ = vescale.parallelize(Plan(**fields), config.build(), torch.optim.SGD)
            output = model(**model.local_batch(config.global_batch(0)))
        assert type(output) is StepOutput
        assert output["loss"] is output.loss
        assert "loss" in output
        assert output.losses.shape == (fields.get("num_microbatches", 1),)
        if "num_microbatches" in fields:
            with pytest.raises(AttributeError, match=r"with stages or micro-batches, .*, got 'logits'; call model"):
                output.logits  # noqa: B018
            with pytest.raises(KeyError, match=r"got 'logits'; call model\.outputs"):
                output["logits"]
            with pytest.raises(AttributeError, match=r"got 'output'; call model\.outputs"):
                output.output  # noqa: B018
        else:
            assert output.logits.shape[-1] == 100
            assert output[1] is output["logits"] is output.logits is output.output.logits
            assert len(output) == len(list(output)) >= 2
            assert "logits" in output
        assert "loss=" in repr(output)

    on_every_rank()


@ranks(1)
def test_a_module_without_a_loss_returns_its_own_output():
    model, _ = vescale.parallelize(Plan(), build(), torch.optim.SGD)
    logits = model(training.batch(0)["ids"])
    assert type(logits) is torch.Tensor
    with pytest.raises(TypeError, match=r"outputs: expected a tensor in the module's output, got tuple; pass select="):
        model.outputs(training.batch(0)["ids"], select=lambda output: (output,))


class OwnLoss(torch.nn.Module):
    """Returns its loss, a scalar."""

    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, ids, target):
        return training.loss_fn(self.net(ids), target)


@pytest.mark.parametrize("fields", [{"dp": 2}, {"dp": 2, "num_microbatches": 2}], ids=words)
def test_a_module_that_returns_its_loss(fields):
    @ranks(2)
    def on_every_rank():
        model, _ = vescale.parallelize(Plan(**fields), OwnLoss(), torch.optim.SGD)
        output = model(**model.local_batch(training.batch(0)))
        expected = OwnLoss()(**training.batch(0))
        assert model.global_loss(output.loss).item() == pytest.approx(expected.item(), rel=1e-10)
        output.loss.backward()

    on_every_rank()
