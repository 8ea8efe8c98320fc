"""`Plan(tp=2)` alone trains models that no ready plan knows as one process does, in eager and in static mode.

So do `Plan(tp=4)`, and `Plan(dp=2, tp=2)` on the rows of each rank. By default a family of each kind, and few on four
ranks; `-m thorough` runs all of them.
"""

import importlib
import sys
from pathlib import Path

import pytest
from torch.distributed.tensor import Shard

import vescale
from vescale import Plan
from vescale.dmodule.plans import derive
from vescale_testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("derived_training")
sys.path.pop(0)
models, check, train_on_ranks = training.models, training.check, training.train_on_ranks

ORDINARY = ("falcon with alibi", "falcon of groups", "gpt_oss", "nanogpt", "encoder", "bert", "opt", "deepseek_v3")


@pytest.mark.parametrize("family", ORDINARY)
def test_a_family_trains_as_on_one_process(family):
    check(family, Plan(tp=2), Plan(tp=2, mode="static"))


@pytest.mark.thorough
@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name not in ORDINARY])
def test_the_other_families_train_as_on_one_process(family):
    check(family, Plan(tp=2), Plan(tp=2, mode="static"))


FOUR = (Plan(tp=4), Plan(tp=4, mode="static"), Plan(dp=2, tp=2), Plan(dp=2, tp=2, mode="static"))


@pytest.mark.parametrize("family", ["vit"])
def test_a_family_on_four_ranks(family):
    check(family, FOUR[0], FOUR[3])


@pytest.mark.thorough
@pytest.mark.parametrize("family", models.FAMILIES)
def test_all_families_on_four_ranks(family):
    check(family, *FOUR)


def test_a_wrong_placement_is_seen():
    """Fused queries, keys and values in chunks instead of a strip of each, with sizes as for strips."""
    model = models.build("nanogpt")
    plan = derive(model, models.example("nanogpt", model, 0), degree=2).plan
    right = dict(plan["parameter"])
    (key,) = (key for key in right if "c_attn" in key)
    plan["parameter"] = {**right, key: {"tp": Shard(0)}}

    def on_a_rank():
        with pytest.raises(vescale.dmodule.ImplicitRedistributionError, match=r"h\.0\.attn"):
            train_on_ranks("nanogpt", Plan(tp=2), plan)

    run_ranks(on_a_rank, 2)


def test_what_is_replicated_is_logged(caplog):
    def on_a_rank():
        with caplog.at_level("INFO", "vescale"):
            train_on_ranks("nanogpt", Plan(tp=2))
        (text,) = (message for message in caplog.messages if message.startswith("derived a plan for Nano over tp=2"))
        assert "wpe.weight  it is neither half of a pair" in text

    run_ranks(on_a_rank, 2)
