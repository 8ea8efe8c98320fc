"""Tiny models that no ready plan knows, in float64, with dropout where they have it, and batches for them."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, FalconConfig, FalconForCausalLM, GptOssConfig, GptOssForCausalLM

__all__ = ["FAMILIES", "MODELS", "build", "example"]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))
zoo_families = importlib.import_module("families")
sys.path.pop(0)

VOCABULARY, WIDTH = 100, 32
DECODER = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def falcon(**changes: Any) -> nn.Module:
    """Return a Falcon; its three kinds have one key-value head, groups of heads, or ALiBi."""
    drops = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return FalconForCausalLM(FalconConfig(**{**DECODER, **drops, "bos_token_id": 1, "eos_token_id": 2, **changes}))


def clip() -> nn.Module:
    """Return a CLIP: a tower of tokens, a tower of images."""
    text = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    image = {**TOWER, "image_size": 16, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=16))


def gpt_oss() -> nn.Module:
    """Return a gpt-oss: attention with sinks, experts with biases."""
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    config = GptOssConfig(**{**DECODER, **sizes, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 2})
    config._attn_implementation = config._experts_implementation = "eager"
    return GptOssForCausalLM(config)


class Attention(nn.Module):
    """Attention as in nanoGPT: one projection for queries, keys and values, sizes from the input."""

    def __init__(self, width: int):
        super().__init__()
        self.n_head, self.n_embd = 4, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = self.drop((q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))).softmax(-1)) @ v
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width)))


class NanoBlock(nn.Module):
    """One layer."""

    def __init__(self, width: int):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """A language model as nanoGPT, its head tied to the embedding; returns its loss."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(NanoBlock(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """torch's own encoder with a loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "falcon": lambda: falcon(multi_query=True, parallel_attn=True),
    "falcon of groups": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon with alibi": lambda: falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "clip": clip,
    "gpt_oss": gpt_oss,
    "nanogpt": Nano,
    "encoder": Encoder,
}
OF_ZOO = ("opt", "bloom", "olmoe", "deepseek_v3", "t5", "vit", "bert", "whisper", "mamba", "mpt")
FAMILIES = (*MODELS, *OF_ZOO)


def build(family: str) -> nn.Module:
    """Return a tiny model in float64, in training mode, the same on every call."""
    if family in OF_ZOO:
        return zoo_families.build(family)
    torch.manual_seed(0)
    return MODELS[family]().double().train()


def example(family: str, model: nn.Module, step: int) -> dict[str, Any]:
    """Return the arguments of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (4, 12), generator=generator)
    if family in OF_ZOO:
        return zoo_families.batch(model, 4, step) | zoo_families.arguments(model)
    if family == "nanogpt":
        return {"idx": ids, "targets": ids.roll(-1, 1)}
    if family == "encoder":
        return {"x": torch.randn(4, 12, WIDTH, generator=generator, dtype=torch.float64)}
    if family == "clip":
        images = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"input_ids": ids, "pixel_values": images, "return_loss": True}
    return {"input_ids": ids, "labels": ids, "use_cache": False}
