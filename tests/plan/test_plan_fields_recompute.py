"""Recomputed modules give the same numbers bit for bit, in every mode, with dropout, ZeRO 3 and stages."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vescale
from vescale import Plan
from vescale_testing import ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("fields_training")
sys.path.pop(0)
Block, build, parallelize, train = training.Block, training.build, training.parallelize, training.train

LAYOUTS = [
    {"dp": 2, "zero": 3},
    {"tp": 2, "mode": "static"},
    {"dp": 2, "num_microbatches": 2},
    {"pp": 2, "num_microbatches": 2, "schedule": "zb_v"},
    {"pp": 2, "num_microbatches": 2, "mode": "static"},
    {"dp": 2, "zero": 2, "random_stream": "philox"},
]


def words(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items())


def outcome(fields, monkeypatch, **options):
    """Train, and count the calls of the blocks' code on this rank."""
    calls, forward = [], Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: calls.append(id(self)) or forward(self, x))
    try:
        vescale.dtensor.random.manual_seed(5)
        model, optimizer = parallelize(Plan(**fields), build(dropout=0.2), **options)
        record = train(model, optimizer)
        assert type(model.layers[0]).__name__ in ("Block", "Stub")
        return record, len(calls)
    finally:
        monkeypatch.setattr(Block, "forward", forward)
        vescale.dtensor.random.set_stream("torch")


@pytest.mark.parametrize("fields", LAYOUTS, ids=words)
def test_the_same_bits(fields, monkeypatch):
    @ranks(2)
    def on_every_rank():
        expected, kept = outcome(fields, monkeypatch)
        actual, again = outcome({**fields, "recompute": 1}, monkeypatch)
        assert actual.losses == expected.losses
        assert actual.norms == expected.norms
        assert all(torch.equal(value, expected.state[name]) for name, value in actual.state.items())
        assert again > kept
        every_other = outcome({**fields, "recompute": 2}, monkeypatch)[1]
        assert kept < every_other < again

    on_every_rank()


@ranks(2)
def test_compiled_blocks(compile_with):
    compile_with("aot_eager")
    expected = train(*parallelize(Plan(tp=2, mode="compile"), build(dropout=0.2)))
    actual = train(*parallelize(Plan(tp=2, mode="compile", recompute=1), build(dropout=0.2)))
    assert actual.losses == expected.losses
    assert all(torch.equal(value, expected.state[name]) for name, value in actual.state.items())


@ranks(1)
def test_modules_by_name():
    model, _ = parallelize(Plan(recompute=[r"layers\.[02]", "norm"]), build())
    assert model.recomputed == ("layers.0", "layers.2", "norm")
    assert parallelize(Plan(recompute=3), build())[0].recomputed == ("layers.2",)
    assert parallelize(Plan(), build())[0].recomputed == ()


@ranks(1)
def test_other_random_numbers_in_the_recomputation_are_noticed(monkeypatch):
    """The comparison above can fail: here the repeated call draws on."""
    expected, _ = outcome({}, monkeypatch)
    checkpoint = torch.utils.checkpoint.checkpoint
    drawing = lambda *args, **options: checkpoint(*args, **options, preserve_rng_state=False)  # noqa: E731
    monkeypatch.setattr("vescale._recompute.checkpoint", drawing)
    actual, _ = outcome({"recompute": 1}, monkeypatch)
    assert actual.difference(expected) > 1e-4


@pytest.mark.parametrize("fields", [{"tp": 2, "mode": "static"}, {"pp": 2, "num_microbatches": 2}], ids=words)
def test_layers_of_hugging_face_by_their_own_switch(fields):
    """With a cache, which the config asks for by default, and which a second call must not write again."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    tokens = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))

    def losses(**more):
        torch.manual_seed(0)
        model, optimizer = vescale.parallelize(Plan(**fields, **more), LlamaForCausalLM(config), torch.optim.SGD)
        found = []
        for _ in range(2):
            loss = model(**model.local_batch({"input_ids": tokens, "labels": tokens})).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, model.module

    @ranks(2)
    def on_every_rank():
        expected, _ = losses()
        actual, module = losses(recompute=1)
        assert actual == expected
        assert {layer.gradient_checkpointing for layer in module.model.layers if hasattr(layer, "mlp")} <= {True}
        assert expected[0] != expected[1]

    on_every_rank()
