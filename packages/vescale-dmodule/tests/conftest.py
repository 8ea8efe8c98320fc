"""Tiny Hugging Face models in float64, one training pass, and the comparison of two of them."""

from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from vescale_testing import keep_float64

logging.set_verbosity_error()

VOCABULARY = 255  # no number of ranks divides it
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
# the second layer has no experts
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "pad_token_id": None}
FAMILIES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**DECODER, "num_local_experts": 4}),
    "llama": (LlamaForCausalLM, LlamaConfig, DECODER),
    "mistral": (MistralForCausalLM, MistralConfig, {**DECODER, "sliding_window": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, DECODER),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**DECODER, "head_dim": 8}),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {**DECODER, **EXPERTS, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**DECODER, **EXPERTS, "head_dim": 8}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**DECODER, **GEMMA}),
    "gemma3_text": (Gemma3ForCausalLM, Gemma3TextConfig, {**DECODER, **GEMMA}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {**DECODER, "pad_token_id": None}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, DECODER),
    "gpt_neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        {name: size for name, size in DECODER.items() if name != "num_key_value_heads"},
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}
DROPOUTS = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
    "phi3": ("attention_dropout", "resid_pdrop", "embd_pdrop"),
}


def _build(family, *, attention="eager", dropout=0.0, dtype=torch.float64, **changes):
    make, configure, sizes = FAMILIES[family]
    rates = dict.fromkeys(DROPOUTS.get(family, ("attention_dropout",)), dropout)
    config = configure(**{**sizes, **rates, **changes})
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make(config).train()
    finally:
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Pass:
    """What one or more forward and backward passes gave.

    Attributes:
        losses: one per pass.
        logits: of the last pass.
        grads: whole gradients by name, accumulated over the passes; absent for frozen parameters.
        state: of the generator at the end.
    """

    losses: list[float]
    logits: torch.Tensor
    grads: dict[str, torch.Tensor]
    state: torch.Tensor


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _train(model, *, passes=1, tokens=17, **inputs):
    ids = torch.randint(0, VOCABULARY, (4, tokens), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    losses = []
    with keep_float64():
        for _ in range(passes):
            output = model(input_ids=ids, labels=ids, **inputs)
            output.loss.backward()
            losses.append(output.loss.item())
    grads = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Pass(losses, output.logits.detach(), grads, torch.get_rng_state())


def _assert_same_pass(actual, expected, *, bound=1e-10):
    assert not isinstance(actual.logits, DTensor)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=bound, atol=0)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=bound * expected.logits.abs().max().item())
    assert actual.grads.keys() == expected.grads.keys()
    for name, gradient in expected.grads.items():
        distance = (actual.grads[name] - gradient).abs().max() / gradient.abs().max()
        assert distance < bound, f"{name}: {distance}"
    assert torch.equal(actual.state, expected.state)


@pytest.fixture(scope="session")
def build():
    """`build("llama", attention=, dropout=, **config)`: a tiny model, the same on every rank."""
    return _build


@pytest.fixture(scope="session")
def train():
    """`train(model, passes=1)`: forward and backward on fixed tokens from a fixed seed, as a `Pass`."""
    return _train


@pytest.fixture(scope="session")
def assert_same_pass():
    """`assert_same_pass(actual, expected)`: losses, logits, gradients and generator state agree."""
    return _assert_same_pass
