"""Models for the planner's tests: a Mixtral-like tree and a plain GPT, built from torch alone."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class MixtralConfig:
    """The attributes a Hugging Face Mixtral config has, with the sizes of the 8x7b model."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    vocab_size: int = 32000
    attention_dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, config.hidden_size, bias=False)


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        experts, ffn, hidden = config.num_local_experts, config.intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, ffn))


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = Experts(config)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MoE(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)


class Mixtral(nn.Module):
    def __init__(self, config, *, tied=False):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class GPTBlock(nn.Module):
    """A block whose activations the formula describes: fused attention, optionally dropout and a gate."""

    def __init__(self, hidden, heads, ffn, *, gated=False, dropout=0.0):
        super().__init__()
        self.num_heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False) if gated else None

    def forward(self, x):
        batch, seq, hidden = x.shape
        normed = self.norm1(x)
        q, k, v = (w(normed).view(batch, seq, self.num_heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, hidden)
        x = x + F.dropout(self.o(attended), self.dropout)
        normed = self.norm2(x)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        return x + F.dropout(self.down(inner), self.dropout)


class GPT(nn.Module):
    def __init__(self, blocks, hidden, heads, ffn, vocab, *, gated=False, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads, ffn, gated=gated, dropout=dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)


@pytest.fixture
def build_mixtral():
    """Build a Mixtral-like model on the meta device: ``build_mixtral(num_hidden_layers=4, dtype=..., tied=...)``."""

    def build(*, dtype=torch.bfloat16, tied=False, **sizes):
        with torch.device("meta"):
            return Mixtral(MixtralConfig(**sizes), tied=tied).to(dtype)

    return build


@pytest.fixture
def build_gpt():
    """Build a real small GPT: ``build_gpt(blocks, hidden, heads, ffn, vocab, gated=..., dropout=...)``."""
    return GPT
