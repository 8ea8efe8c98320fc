"""Transformer blocks written for one device, and their parallelization by plan and by torch's own styles.

`GPTBlock` has biases, layer norm and GELU. `LlamaBlock` has no biases, RMS norm, rotary positions and SwiGLU. They have
no code for ranks. The number of heads is `-1` in a view, as in Hugging Face's models, so they run on all heads and on a
rank's share of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as stock
from torch.nn import functional as F

__all__ = ["BLOCKS", "Attention", "GPTBlock", "LlamaBlock", "parallelize_as_stock", "plan", "stack"]

SEQ = 1  # activations are (batch, seq, hidden)


def rotary(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of rotary positions, each (seq, head_dim)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dim of ``x``, (batch, heads, seq, head_dim), by position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention of `num_heads` heads, with rotary positions where `cos` and `sin` are given."""

    def __init__(self, hidden: int, num_heads: int, *, bias: bool):
        super().__init__()
        self.head_dim = hidden // num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=bias) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        return self.out(self.mix(x, cos, sin))

    def mix(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Return the heads' outputs side by side, before the projection."""
        batch, seq, _ = x.shape
        q, k, v = (f(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, seq, -1)


class GeluMLP(nn.Module):
    """`down(gelu(up(x)))` with biases."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mix(x))

    def mix(self, x: Tensor) -> Tensor:
        """Return the inner activation."""
        return F.gelu(self.up(x))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` without biases."""

    def __init__(self, hidden: int):
        super().__init__()
        inner = 2 * hidden
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mix(x))

    def mix(self, x: Tensor) -> Tensor:
        """Return the inner activation."""
        return F.silu(self.gate(x)) * self.up(x)


class GPTBlock(nn.Module):
    """Pre-norm block of a GPT."""

    def __init__(self, *, hidden: int, num_heads: int, seq: int):  # noqa: ARG002 - the same call makes a LlamaBlock
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn, self.mlp = Attention(hidden, num_heads, bias=True), GeluMLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaBlock(nn.Module):
    """Pre-norm block of a LLaMA for sequences of `seq` tokens."""

    def __init__(self, *, hidden: int, num_heads: int, seq: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.attn, self.mlp = Attention(hidden, num_heads, bias=False), GatedMLP(hidden)
        cos, sin = rotary(seq, hidden // num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), self.cos, self.sin)
        return x + self.mlp(self.norm2(x))


BLOCKS: dict[str, Callable[..., nn.Module]] = {"GPT": GPTBlock, "LLaMA": LlamaBlock}


def stack(make: Callable[..., nn.Module], depth: int, *, hidden: int, num_heads: int, seq: int) -> nn.Sequential:
    """Return `depth` blocks in a row, the same on every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(make(hidden=hidden, num_heads=num_heads, seq=seq) for _ in range(depth)))


# ----------------------------------------------------------------------------------------------------- vescale


def plan(axis: str = "tp", *, whole: bool = False) -> dict[str, dict[str, object]]:
    """Return the plan of a stack of either block: tensor parallel over `axis`, sequence parallel between the blocks.

    The input and the output of the stack are sharded over the sequence; the output only inside, if it shall be `whole`.
    """
    cut, uncut = [{axis: Shard(SEQ)}], [{axis: Replicate()}]
    return {
        "parameter": {
            r"\d+\.attn\.(q|k|v)\..*": {axis: Shard(0)},
            r"\d+\.mlp\.(gate|up)\..*": {axis: Shard(0)},
            r"\d+\.(attn\.out|mlp\.down)\.weight": {axis: Shard(1)},
        },
        "forward": {
            r"input": cut,
            r"\d+\.(attn|mlp)\.input": uncut,
            r"\d+\.(attn\.out|mlp\.down)\.output": cut,
            **({r"output": uncut} if whole else {}),
        },
    }


# ----------------------------------------------------------------------------------------------------- stock torch


def parallelize_as_stock(
    model: nn.Module, mesh: DeviceMesh, *, local_outputs: bool = True, whole: bool = False
) -> nn.Module:
    """Parallelize a stack with torch's own styles.

    Args:
        model: of `stack`.
        mesh: of one axis.
        local_outputs: whether styles return plain local tensors where they can, as is their default and as torch's
            tutorial has it. Otherwise all activations are DTensors.
        whole: whether the stack takes and returns whole plain tensors; else shards of the sequence.
    """
    cut, uncut = Shard(SEQ), Replicate()
    enter = {"desired_input_layouts": (uncut,), "use_local_output": False}
    for block in model:
        rotary_tables = 2 if isinstance(block, LlamaBlock) else 0
        layouts = (cut, *[None] * rotary_tables)
        wanted = (uncut, *[None] * rotary_tables)
        column = stock.ColwiseParallel(use_local_output=local_outputs)
        row = stock.RowwiseParallel(output_layouts=cut, use_local_output=local_outputs)
        styles = {
            "norm1": stock.SequenceParallel(),
            "norm2": stock.SequenceParallel(),
            "attn": stock.PrepareModuleInput(**{**enter, "input_layouts": layouts, "desired_input_layouts": wanted}),
            "mlp": stock.PrepareModuleInput(input_layouts=(cut,), **enter),
            **dict.fromkeys(("attn.q", "attn.k", "attn.v", "mlp.up"), column),
            **dict.fromkeys(("attn.out", "mlp.down"), row),
        }
        if hasattr(block.mlp, "gate"):
            styles["mlp.gate"] = column
        stock.parallelize_module(block, mesh, styles)
        for name, buffer in block.named_buffers() if not local_outputs else ():
            setattr(block, name, DTensor.from_local(buffer, mesh, [uncut]))
    if whole:
        split = stock.PrepareModuleInput(
            input_layouts=(uncut,), desired_input_layouts=(cut,), use_local_output=local_outputs
        )
        gather = stock.PrepareModuleOutput(output_layouts=(cut,), desired_output_layouts=(uncut,))
        for style in (split, gather):
            stock.parallelize_module(model, mesh, style)
    return model
