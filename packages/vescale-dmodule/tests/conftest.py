"""Tiny Hugging Face models in float64, one training pass and the comparison of two; one program in all modes."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # before ranks are forked: it takes seconds
import torch._inductor.compile_fx
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
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

from vescale.dmodule import Repeat, parallelize_module
from vescale.dtensor import Replicate, Shard
from vescale_testing import gather_full, keep_float64

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


def _shard_batch(plan, axis):
    """The logits are whole again, because the loss, which no boundary follows, is a mean over the batch."""

    def with_batch(entry):
        if isinstance(entry, Repeat):
            return dataclasses.replace(entry, entry=with_batch(entry.entry))
        if isinstance(entry, list):
            return [with_batch(inner) for inner in entry]
        return {**entry, axis: Shard(0)}

    forward = {key: with_batch(entry) for key, entry in plan["forward"].items() if key != r"lm_head\.output"}
    return {**plan, "forward": {**plan["forward"], **forward, "input": {"input_ids": {axis: Shard(0)}}}}


@pytest.fixture(scope="session")
def shard_batch():
    """`shard_batch(plan, "dp")`: a ready plan with the batch sharded over another axis from the tokens to the head."""
    return _shard_batch


class Graphs:
    """A compiler that runs what it gets as it is, and keeps it; also the backward if `differentiates`."""

    def __init__(self):
        self.forward, self.backward, self.differentiates = [], [], False

    def clear(self):
        self.forward, self.backward = [], []

    def __call__(self, module, inputs):
        if not self.differentiates:
            self.forward.append(module)
            return module.forward

        def keep(graphs):
            def compiler(graph, _inputs):
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            return compiler

        return aot_autograd(fw_compiler=keep(self.forward), bw_compiler=keep(self.backward))(module, inputs)


@pytest.fixture
def graphs(compile_with):
    """The graphs that compile mode gives to the compiler, which leaves them as they are."""
    kept = Graphs()
    compile_with(kept)
    return kept


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


# ------------------------------------------------------------------------------------------- one program, all modes


def _results(model, use):
    """What a program leaves behind: what it returned, gradients, buffers and the random stream, as whole tensors."""
    torch.manual_seed(7)
    found = {name: gather_full(value) for name, value in use(model).items()}
    found |= {f"gradient {n}": gather_full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"parameter {n}": gather_full(p) for n, p in model.named_parameters()}
    found |= {f"buffer {n}": gather_full(b) for n, b in model.named_buffers()}
    return found | {"random stream": torch.get_rng_state()}


def _assert_same_results(actual, expected, *, bound):
    """`bound` is relative to the largest element of a tensor; 0 asks for equal bits."""
    assert actual.keys() == expected.keys(), set(actual) ^ set(expected)
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        assert actual[name].dtype == value.dtype, name
        distance = (actual[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        allowed = bound * value.double().abs().max().item() if bound and value.is_floating_point() else 0.0
        assert distance <= allowed, f"{name} differs by {distance}"


def _in_all_modes(make, plan, mesh, use, *, modes=("eager", "static"), bound=1e-12, bitwise=True):
    """Run `use(model)` on the plain module, then on a parallelized one per mode, and compare; return the last model.

    Args:
        make: makes the module, from a fixed seed.
        plan: of the parallelized modules.
        use: the program; returns named tensors. Gradients, buffers and the random stream are compared, too.
        bound: of a mode against the plain module, relative.
        bitwise: whether the modes must agree in all bits.
    """
    before, model = {}, None
    for mode in ("plain", *modes):
        torch.manual_seed(0)
        model = make()
        if mode != "plain":
            parallelize_module(model, mesh, plan, mode=mode)
        found = _results(model, use)
        for earlier, expected in before.items():
            _assert_same_results(found, expected, bound=bound if earlier == "plain" or not bitwise else 0)
        before[mode] = found
    return model


@pytest.fixture(scope="session")
def in_all_modes():
    """`in_all_modes(make, plan, mesh, use)`: one program on the plain module and in every mode, compared."""
    return _in_all_modes


class TinyAttention(nn.Module):
    """Attention of heads of 4, as many as its projections give. (The gradient of a bias of keys would be rounding.)"""

    def __init__(self, width, dropout):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=n != 1) for n in range(4))
        self.dropout = dropout

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:-1], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) / 2).softmax(-1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TinyBlock(nn.Module):
    """One layer, norms first."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = TinyAttention(width, dropout)
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(self.up(self.norm2(x)).relu()))


class TinyTransformer(nn.Module):
    """A language model with 6 heads, for 2 or 3 ranks; its loss has no gradient for itself but the sum of squares."""

    def __init__(self, layers=2, width=24, vocabulary=19, dropout=0.0, tied=False, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(TinyBlock(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    @staticmethod
    def plan(sequence_parallel=False):
        """Column and row parallel layers; between them pieces of the sequence, if wanted."""
        column, row, whole = {"tp": Shard(0)}, {"tp": Shard(1)}, [{"tp": Replicate()}]
        between = [{"tp": Shard(1)}] if sequence_parallel else whole
        return {
            "parameter": {
                r"(embed|head)\.weight": column,
                r".*\.(q|k|v|up)\.(weight|bias)": column,
                r".*\.(out|down)\.weight": row,
            },
            "forward": {
                r"embed\.output": between,
                r"layers\.\d+\.(attention|up)\.input": whole,
                r"layers\.\d+\.(attention|down)\.output": between,
                r"head\.input": whole,
                r"head\.output": whole,
            },
        }

    @staticmethod
    def ids(batch=2, length=8, seed=1):
        """Tokens, the same everywhere."""
        return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def tiny():
    """A small transformer: `tiny(dropout=...)`, `tiny.plan(sequence_parallel)`, `tiny.ids(batch, length)`."""
    return TinyTransformer
