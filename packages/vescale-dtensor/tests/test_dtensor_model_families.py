"""Unmodified Hugging Face models with sharded parameters: loss, logits and every gradient are those of one device.

The parameters are made DTensors by hand, column-, row- and vocabulary-parallel; the models run as they are, without
hooks and without plans. Labels ignore different numbers of tokens in different sequences.
"""

import contextlib
import re
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers.utils import logging

from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import keep_float64, ranks

logging.set_verbosity_error()

VOCABULARY = 99  # no number of ranks divides it
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 64}
GEMMA2 = {"head_dim": 6, "num_hidden_layers": 2, "sliding_window": 5, "query_pre_attn_scalar": 6}
SIZES = {
    "Mixtral": {**DECODER, "num_local_experts": 4},
    "Llama": {**DECODER, "attention_bias": True, "mlp_bias": True},
    "Qwen3": {**DECODER, "head_dim": 6},
    "Gemma2": {**DECODER, **GEMMA2},  # a sliding and a full layer; caps the scores and the logits
    "Phi3": DECODER,
    "GPT2": {**GPT2, "bos_token_id": None, "eos_token_id": None, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
}
CLASSES = {
    f: getattr(transformers, f + ("LMHeadModel" if f == "GPT2" else "ForCausalLM")) for f in SIZES
}  # imported once
COLUMN = r"\.(q|k|v|qkv|gate|up|gate_up)_proj\.(weight|bias)|embed_tokens\.weight|lm_head\.weight|experts\."
ROW = r"\.(o|down)_proj\.weight"
OF_GPT2 = {
    r"(wte|lm_head)\.weight": Shard(0),
    r"c_(attn|fc)\.weight": Shard(1),  # (in, out)
    r"c_(attn|fc)\.bias": Shard(0),
    r"c_proj\.weight": Shard(0),
}
PLACEMENTS = {**OF_GPT2, COLUMN: Shard(0), ROW: Shard(1)}


def build(family, attention, **changes):
    """A tiny model, the same on every rank."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES[family], **changes})
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with keep_float64():
        return CLASSES[family](config).train()


def distribute(model, mesh, shard):
    """Make every parameter a DTensor; the last mesh axis is tensor-parallel."""
    made = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                found = [p for pattern, p in PLACEMENTS.items() if re.search(pattern, f"{prefix}.{name}")]
                placements = [Replicate()] * (mesh.ndim - 1) + (found[:1] or [Replicate()])
                made[parameter] = nn.Parameter(shard(parameter.detach(), mesh, placements))
            setattr(module, name, made[parameter])
    return model


@dataclass(frozen=True)
class Pass:
    loss: torch.Tensor
    logits: torch.Tensor
    grads: dict[str, torch.Tensor]
    state: torch.Tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(model, distributed=lambda tensor: tensor, context=contextlib.nullcontext):
    """One forward and backward."""
    ids = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7], labels[1, 3], labels[2, -4:] = -100, -100, -100
    torch.manual_seed(5)
    with keep_float64(), context():
        output = model(input_ids=distributed(ids), labels=distributed(labels), use_cache=False)
        output.loss.backward()
    grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return Pass(whole(output.loss.detach()), whole(output.logits.detach()), grads, torch.get_rng_state())


def run_sharded(model, mesh, shard):
    batch = [Shard(0), *[Replicate()] * (mesh.ndim - 1)] if mesh.ndim > 1 else [Replicate()]
    return run(distribute(model, mesh, shard), lambda tensor: shard(tensor, mesh, batch), implicit_replication)


def assert_same_pass(actual, expected):
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-12)
    for name, gradient in expected.grads.items():
        distance = (actual.grads[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)
        assert distance < 1e-11, f"{name}: {distance}"
    assert torch.equal(actual.state, expected.state)


UNEVEN = {"num_attention_heads": 3, "num_key_value_heads": 3}
ONE_KEY_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1}
DROPOUT = {"attention_dropout": 0.1}
CASES = {
    "Mixtral": [("eager", DROPOUT), ("sdpa", UNEVEN)],
    "Llama": [("eager", UNEVEN), ("sdpa", DROPOUT | ONE_KEY_HEAD)],
    "Qwen3": [("eager", ONE_KEY_HEAD), ("sdpa", {})],
    "Gemma2": [("eager", DROPOUT), ("eager", UNEVEN)],  # this class has no other attention
    "Phi3": [("eager", UNEVEN), ("sdpa", {})],
    "GPT2": [("eager", {"n_head": 3, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}), ("sdpa", {})],
}


@pytest.mark.parametrize("family", CASES)
def test_tensor_parallel(family, shard):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for attention, changes in CASES[family]:
            expected = run(build(family, attention, **changes))
            assert_same_pass(run_sharded(build(family, attention, **changes), mesh, shard), expected)

    on_every_rank()


OVER_TWO_AXES = [("GPT2", "sdpa"), ("Qwen3", "sdpa")]


@ranks(4)
def test_data_and_tensor_parallel(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for family, attention in OVER_TWO_AXES:
        expected = run(build(family, attention))
        assert_same_pass(run_sharded(build(family, attention), mesh, shard), expected)


@ranks(4)
def test_stock_rules_raise_or_differ(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for family, attention in OVER_TWO_AXES:
        expected = run(build(family, attention))
        with disabled(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            assert_same_pass(run_sharded(build(family, attention), mesh, shard), expected)


@ranks(2)
def test_a_residual_added_on_every_rank_would_be_noticed(shard, monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = run(build("GPT2", "sdpa"))
    monkeypatch.setattr("vescale.dtensor._placements.hooks._whole_on_first", lambda tensor, *_, **__: tensor)
    with pytest.raises(AssertionError):
        assert_same_pass(run_sharded(build("GPT2", "sdpa"), mesh, shard), expected)
