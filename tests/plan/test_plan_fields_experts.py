"""Experts over data-parallel ranks, over tensor-parallel ones too, or each sharded: as on one process, with dropout."""

import functools
import math

import pytest
import torch
from torch import nn

import vescale
from vescale import Plan
from vescale_testing import keep_float64, ranks
from vescale_testing.training import Training

TRAINING = Training("mixtral", layers=2, dropout=0.1, steps=2, batch=8, seq=5)
ROWS = [r"model\.layers\.\d+\.mlp\.experts"]
adamw = functools.partial(torch.optim.AdamW, lr=0.01)

# the fields, and the shape of gate_up_proj on a rank, of (4, 96, 32)
LAYOUTS = [
    (2, {"dp": 2, "ep": 2}, (2, 96, 32)),
    (2, {"tp": 2, "etp": 2}, (4, 48, 32)),
    (2, {"tp": 2, "etp": 2, "mode": "static", "sequence_parallel": True}, (4, 48, 32)),
    (4, {"dp": 2, "ep": 2, "tp": 2, "mode": "static"}, (1, 96, 32)),
    (4, {"dp": 2, "ep": 2, "tp": 2, "etp": 2, "recompute": 1}, (2, 48, 32)),
    (4, {"dp": 4, "ep": 2, "zero": 3, "num_microbatches": 2}, (2, 96, 32)),
    (4, {"dp": 4, "ep": 2, "dp_replicate": 2, "zero": 1}, (2, 96, 32)),
    (4, {"dp": 2, "ep": 2, "pp": 2, "num_microbatches": 2}, (2, 96, 32)),
]


def words(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items()) if isinstance(fields, dict) else ""


def on_one():
    losses, norms = [], []
    with keep_float64():
        torch.manual_seed(0)
        model = TRAINING.build()
        optimizer = adamw(model.parameters())
        for step in range(TRAINING.steps):
            loss = model(**TRAINING.global_batch(step)).loss
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms, model.state_dict()


@pytest.fixture(scope="module")
def expected():
    return on_one()


@pytest.mark.parametrize(("num_ranks", "fields", "shape"), LAYOUTS, ids=words)
def test_training_is_that_of_one_process(num_ranks, fields, shape, expected):
    def on_every_rank():
        losses, norms = [], []
        with keep_float64():
            torch.manual_seed(0)
            model, optimizer = vescale.parallelize(Plan(**fields), TRAINING.build(), adamw, row_wise=ROWS)
            with model.unsharded():
                experts = [p for name, p in model.named_parameters() if name.endswith("gate_up_proj")]
                assert {tuple(p.to_local().shape) for p in experts} == {shape}
            for step in range(TRAINING.steps):
                loss = model(**model.local_batch(TRAINING.global_batch(step))).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(model.global_loss(loss).item())
                norms.append(optimizer.grad_norm.item())
        assert losses == pytest.approx(expected[0], rel=1e-10)
        assert norms == pytest.approx(expected[1], rel=1e-10)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[2][name], rtol=1e-8, atol=1e-10)

    ranks(num_ranks, timeout=240)(on_every_rank)()


def test_other_experts_are_noticed(expected):
    """The comparison above can fail: here two experts have changed places, and the router has not."""
    with keep_float64():
        torch.manual_seed(0)
        model = TRAINING.build()
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.data = layer.mlp.experts.gate_up_proj.data.flip(0)
        loss = model(**TRAINING.global_batch(0)).loss
    assert loss.item() != pytest.approx(expected[0][0], rel=1e-6)


@ranks(2)
def test_rows_that_are_fewer_than_ranks_are_refused():
    model, _ = vescale.parallelize(Plan(dp=2, ep=2), TRAINING.build(), adamw)
    with pytest.raises(ValueError, match=r"expected at least dp \* num_microbatches = 2 \* 1 = 2 sequences, got 1 in"):
        model.local_batch({"input_ids": torch.zeros(1, 5, dtype=torch.long)})


def test_experts_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"mixture of experts for Plan\(ep=2, etp=1\), got LlamaForCausalLM of type"):
        vescale.parallelize(Plan(dp=2, ep=2), Training("llama").build(), adamw)
    own = {"expert": {r".*\.experts": {"tp": vescale.dtensor.Shard(0)}}}
    with pytest.raises(
        ValueError, match=r"expected experts over the axis 'ep' in module_plan for Plan\(ep=2, etp=1\), got"
    ):
        vescale.parallelize(Plan(dp=2, ep=2), TRAINING.build(), adamw, module_plan=own)
