"""`Plan(ep=2)` spreads the experts of models that no ready plan knows, and trains as one process does, in both modes.

By default one model; `-m thorough` runs the others, and four ranks.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest
from torch import nn

import vescale
from vescale import Plan
from vescale.dmodule.plans import derive
from vescale.dtensor import Replicate, Shard

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("derived_training")
sys.path.pop(0)
models = training.models

MIXTURES = ("olmoe", "deepseek_v3", "gpt_oss")
PLANS = Plan(dp=2, ep=2), Plan(dp=2, ep=2, mode="static")


@pytest.fixture(autouse=True)
def without_the_loss_of_routers(monkeypatch):
    """It is a mean over all rows, of which ranks have parts; `parallelize` refuses it."""
    build = models.build

    def without(family):
        model = build(family)
        model.config.output_router_logits = False
        return model

    monkeypatch.setattr(models, "build", without)


def test_a_mixture_trains_as_on_one_process():
    training.check("olmoe", *PLANS)


@pytest.mark.thorough
@pytest.mark.parametrize("family", MIXTURES[1:])
def test_the_other_mixtures_train_as_on_one_process(family):
    training.check(family, *PLANS)


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [{}, {"sequence_parallel": True, "mode": "static"}], ids=["eager", "static"])
@pytest.mark.parametrize("family", MIXTURES)
def test_with_tensor_parallelism(family, fields):
    training.check(family, Plan(dp=2, ep=2, tp=2, **fields))


def test_the_batch_lies_over_ep_from_the_tokens_to_the_head():
    """Targets stay whole: their loss is a mean over the batch."""
    model = models.build("olmoe")
    inputs = models.example("olmoe", model, 0)
    forward = derive(model, inputs, degree=1, expert_axis="ep", batch_axis="ep").plan["forward"]
    assert forward == {"input": {"input_ids": {"ep": Shard(0)}}, r"lm_head\.output": [{"ep": Replicate()}]}
    assert "labels" in inputs


@pytest.mark.parametrize(
    ("plan", "family", "message"),
    [
        (Plan(dp=2, ep=2), "opt", "for Plan(ep=2, etp=1), got OPTForCausalLM, in which derive finds none; leave ep"),
        (Plan(tp=2, etp=2), "olmoe", "expected etp=1 for OlmoeForCausalLM, which has no ready plan, got 2: a derived"),
    ],
)
def test_what_a_derived_plan_does_not_do_is_refused(plan, family, message):
    model = models.build(family)
    with pytest.raises(ValueError, match=re.escape(message)):
        vescale.parallelize(plan, model, training.OPTIMIZER, example_inputs=models.example(family, model, 0))


def test_a_module_whose_result_has_no_rows_is_refused():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x.mean(0))

    with pytest.raises(vescale.dmodule.PlanError, match="whose result has the rows of the batch in dim 0, for batch_a"):
        derive(Mean(4, 4), degree=1, expert_axis="ep", batch_axis="ep")
