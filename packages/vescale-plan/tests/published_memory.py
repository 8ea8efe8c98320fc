"""Memory of published training runs, by the planner's own model with the choices of the systems that ran them.

Every term is something that these systems allocate; none is fitted to a row. On top of `estimate_memory`:

* TorchTitan's memory is what the allocator has reserved, the maximum over ranks. Shards, AdamW and sums of gradients
  are in float32, forward and backward in bfloat16.
* Its selective recomputation keeps the outputs of every second product of matrices and of attention. The compiler drops
  that of the last product of a block, which backward does not read.
* FSDP2 gathers a unit into one buffer, and copies it into its parameters. The buffer of the largest unit, embedding and
  head, stays with the stream of the gathers.
* The loss of sharded logits (``loss_parallel``) has four float32 tensors at its peak, the plain one three, a compiled
  one two of bfloat16.
* In a pipeline there are as many micro-batches as ranks, by default, and parameters stay gathered.
* With context parallelism each rank has 1/cp of the sequence, and FSDP shards over these ranks, too. Attention gathers
  keys and values of the full sequence, for all heads of the rank. Its backward adds gradients in float32: those of
  queries, and those of keys and values three times, as a rank adds to some, sends others and receives the next
  (``_templated_ring_attention_backward`` of torch, with its default ``convert_to_f32``).
* Megatron (issue 21) has float16 parameters and gradients, and float32 gradients, masters and moments: 20 bytes per
  parameter. Attention keeps its scores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from vescale.plan import Layout, ModelProfile, StateBytes, estimate_memory, profile

ROWS = json.loads(Path(__file__).with_suffix(".json").read_text())["rows"]
LLAMA = {  # hidden, feed-forward, layers, heads
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
GIB = 2**30


def predict(row: dict[str, Any]) -> float:
    """Return the bytes of the fullest rank of a published run."""
    return _megatron(row) if row["source"] == "sail-21" else _titan(row)


@functools.cache
def llama(name: str, sequence_length: int) -> ModelProfile:
    """Return the profile of a Llama 3.1 in bfloat16."""
    hidden, inner, layers, heads = LLAMA[name]
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    return profile(config, sequence_length=sequence_length)


def _titan(row: dict[str, Any]) -> float:
    cp, tp, pp = row.get("cp", 1), row.get("tp", 1), row.get("pp", 1)
    length, dp = row["sequence_length"] // cp, row["fsdp"] * cp
    found = llama(row["model"], length)
    if row["recompute"] == "selective":
        found = _selective(found, compiled=row.get("compile", False))
    found = _with_loss(found, sharded=tp > 1, compiled=row.get("compiled_loss", False))
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        zero=3,
        sequence_parallel=tp > 1,
        num_microbatches=pp,
        schedule=row.get("schedule", "1f1b"),
        recompute=1,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        reshard_after_forward=pp == 1,
    )
    batch = max(row["rows"], pp) * dp
    state = StateBytes(params=4, grads=4, optimizer=8)
    stages = estimate_memory(
        found, layout, global_batch_size=batch, sequence_length=length, state=state, loss_parallel=True
    )
    ring = _ring_attention(row["sequence_length"], LLAMA[row["model"]][0] // tp, cp) if cp > 1 else 0
    return max(stage.total for stage in stages) + _gather_buffer(found, tp) + ring


def _ring_attention(length: int, hidden: int, cp: int) -> int:
    """Return the bytes that attention over a sequence sharded ``cp`` times has beside those of one rank's."""
    whole, local = length * hidden, length // cp * hidden
    keys_and_values = 2 * 2 * (whole + local)  # gathered, and this rank's that were sent; bfloat16
    gradients = 4 * (local + 3 * 2 * local)
    return keys_and_values + gradients


def _gather_buffer(found: ModelProfile, tp: int) -> int:
    outside = [info for info in found.parameters if not 0 <= info.positions[0] < found.num_blocks]
    return sum(2 * info.numel // (tp if info.sharded else 1) for info in outside)


def _parts(found: ModelProfile, change: Any) -> ModelProfile:
    """Return a profile with other parts: ``change`` gets their place in the chain and the part."""
    activations = found.activations
    parts = tuple(change(place, part) for place, part in enumerate(activations.parts))
    return dataclasses.replace(found, activations=dataclasses.replace(activations, parts=parts))


def _selective(found: ModelProfile, *, compiled: bool) -> ModelProfile:
    """Return a profile in which recomputed blocks keep outputs of every second product and of attention."""

    def change(_: int, part: Any) -> Any:
        if len(part.products) != 8:
            return part
        query, _, value, attention, _, gate, _, down = part.products
        kept = [part.output, query, value, attention, gate, *([] if compiled else [down])]
        return dataclasses.replace(part, output=functools.reduce(_add, kept))

    return _parts(found, change)


def _add(a: Any, b: Any) -> Any:
    added = [
        dataclasses.replace(x, **{kind: getattr(x, kind) + getattr(y, kind) for kind in vars(x)})
        for x, y in ((a.fixed, b.fixed), (a.per_row, b.per_row))
    ]
    return type(a)(*added)


def _with_loss(found: ModelProfile, *, sharded: bool, compiled: bool) -> ModelProfile:
    """Return a profile with the tensors of another loss: the plain one has three of float32 at its peak."""
    last = found.activations.order[-1]
    copies = 4 / 3 if sharded else 1
    copies = 1 / 3 if compiled else copies  # two of bfloat16

    def change(place: int, part: Any) -> Any:
        if place != last:
            return part
        peaks = [
            dataclasses.replace(
                line, per_row=dataclasses.replace(line.per_row, vocabulary=int(copies * line.per_row.vocabulary))
            )
            for line in part.peaks
        ]
        return dataclasses.replace(part, peaks=tuple(peaks))

    return _parts(found, change)


# ------------------------------------------------------------------------------------------------------------ Megatron


class Block(nn.Module):
    """A layer of GPT with attention that keeps its scores, as Megatron's without FlashAttention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1)
        x = x + nn.functional.dropout(self.out((scores @ v).transpose(1, 2).reshape(rows, length, hidden)), 0.1)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))), 0.1)


class GPT(nn.Module):
    """GPT with untied embedding and head; the loss is computed in float32."""

    def __init__(self, hidden: int, layers: int, heads: int, vocab: int = 50304) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embed(tokens), 0.1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


@functools.cache
def gpt(sequence_length: int) -> ModelProfile:
    """Return the profile of the GPT of 6.2 billion parameters."""
    with torch.device("meta"):
        model = GPT(4096, 30, 32).to(torch.float16)
    return profile(model, sequence_length=sequence_length)


def _megatron(row: dict[str, Any]) -> float:
    layout = Layout(
        dp=1,
        tp=1,
        pp=row["pp"],
        num_microbatches=row["rows"] // row["microbatch_rows"],
        schedule=row.get("schedule", "1f1b"),
        stages_per_rank=row.get("stages_per_rank"),
    )
    stages = estimate_memory(
        gpt(row["sequence_length"]),
        layout,
        global_batch_size=row["rows"],
        sequence_length=row["sequence_length"],
        state=StateBytes(params=2, grads=2, optimizer=16),
    )
    return max(stage.total - stage.gradients for stage in stages)


def published(row: dict[str, Any]) -> float:
    """Return the bytes that a run has published."""
    return row["gib"] * GIB if "gib" in row else row["gb"] * 1e9


def table() -> Iterator[tuple[dict[str, Any], float, float]]:
    """Yield each published run with its GiB, and those that are predicted for it."""
    for row in ROWS:
        yield row, published(row) / GIB, predict(row) / GIB
