"""Deferred initialization of whole models: equal to the eager constructor, and how much memory a rank needs for it.

Two models run over 4 ranks of tensor parallelism. Of a tiny Mixtral every element is compared. Of a LLaMA with 1.1
billion parameters (hidden 2048, 16 layers, vocabulary 32,768; 4.4 GB) every 997th element of each parameter is
compared. The eager model is built once, in its own process, and only the samples leave it. Memory is the increase of a
process's peak resident set while it runs `deferred_init` and `materialize`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from vescale.dtensor import Placement, Replicate, Shard, deferred_init, init_device_mesh, materialize
from vescale_testing import run_ranks

NUM_RANKS = 4
MIB = 2**20
Samples = dict[str, Tensor]

COLUMN = re.compile(r"(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj|gate_up_proj)(\.weight)?$")
ROW = re.compile(r"(o_proj|down_proj)(\.weight)?$")


@dataclass(frozen=True)
class Row:
    """What one rank needed for one model; lengths in bytes, times in seconds."""

    model: str
    rank: int
    shard_bytes: int
    peak_bytes: int
    seconds: float
    num_compared: int


@dataclass(frozen=True)
class Memory:
    """A benchmark's result that is a table of memory instead of times."""

    title: str
    rows: Sequence[Row]

    def table(self) -> str:
        """Return a markdown table with one line per model and rank."""
        lines = [
            "| model | rank | its shards, MiB | peak above start, MiB | peak / shards | seconds | elements equal |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows:
            ratio = row.peak_bytes / row.shard_bytes
            sizes = f"{row.shard_bytes / MIB:.1f} | {row.peak_bytes / MIB:.1f} | {ratio:.2f}"
            lines.append(
                f"| {row.model} | {row.rank} | {sizes} | {row.seconds:.1f} | {row.num_compared:,} of as many |"
            )
        return "\n".join(lines)


def run(num_rounds: int) -> Memory:  # noqa: ARG001 - every run needs the same memory
    """Build both models on four forked gloo processes; raise where an element differs from the eager constructor's."""
    rows = []
    for name, (construct, every) in MODELS.items():
        (samples,) = run_ranks(_eager_samples, 1, construct, every, timeout=600)
        rows += run_ranks(_on_each_rank, NUM_RANKS, name, construct, every, samples, timeout=600)
    return Memory(f"Deferred initialization over {NUM_RANKS} ranks, float32", rows)


# ------------------------------------------------------------------------------------------------- models


def _tiny_mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def _llama_1b() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32768,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tiny Mixtral": (_tiny_mixtral, 1),
    "LLaMA 1.1 B": (_llama_1b, 997),
}


def _placements(name: str, parameter: Tensor) -> list[Placement]:
    if parameter.ndim == 3:  # experts: (expert, rows, columns)
        return [Shard(0)]
    if COLUMN.search(name):
        return [Shard(0)]
    return [Shard(1)] if ROW.search(name) else [Replicate()]


# ------------------------------------------------------------------------------------------------- measuring


def _eager_samples(construct: Callable[[], nn.Module], every: int) -> Samples:
    torch.manual_seed(0)
    model = construct()
    return {name: parameter.detach().flatten()[::every].clone() for name, parameter in model.named_parameters()}


def _on_each_rank(name: str, construct: Callable[[], nn.Module], every: int, samples: Samples) -> Row:
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    before = _reset_peak()
    start = time.perf_counter()
    torch.manual_seed(0)
    model = deferred_init(construct)
    materialize(model, mesh, _placements)
    seconds = time.perf_counter() - start
    peak = _memory("VmHWM") - before
    shard_bytes = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    num_compared = sum(_compare(n, p.detach(), samples[n], every) for n, p in model.named_parameters())
    return Row(name, mesh.get_local_rank(), shard_bytes, peak, seconds, num_compared)


def _compare(name: str, parameter: Tensor, expected: Tensor, every: int) -> int:
    actual = parameter.full_tensor().flatten()[::every]
    if not torch.equal(actual, expected):
        raise RuntimeError(
            f"{name}: {int((actual != expected).sum())} of {expected.numel()} elements differ from eager"
        )
    return expected.numel()


def _reset_peak() -> int:
    """Make the peak start anew and return the present resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, flags=re.MULTILINE)
    return int(kib) * 1024
