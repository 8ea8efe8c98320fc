"""What a rank holds under data parallelism, per ZeRO stage: the memory of all tensors against the formulas.

A stack of transformer blocks and AdamW on gloo ranks, counted between backward and `step()`, when parameters, gradients
and optimizer state are all there. Formulas, in bytes per parameter, with N ranks:

    stage   float32, state 8           bfloat16 with float32 master weights, state 12
    0       4 + 4 + 8                  2 + 2 + 12
    1       4 + 4 + (4 + 8) / N        2 + 2 + (2 + 12) / N
    2       4 + (4 + 8) / N            2 + (2 + 12) / N
    3       (4 + 4 + 8) / N            (2 + 2 + 12) / N

Stage 1 keeps gradients between steps, and the reduced ones; for gradient accumulation, both are needed. Source:
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019), section 5.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from blocks import GPTBlock, stack
from measure import Result
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import held_bytes, run_ranks

WORLDS, STAGES = (2, 4), (0, 1, 2, 3)
DEPTH, HIDDEN, HEADS, BATCH, SEQ = 12, 256, 8, 1, 8
BUCKET_BYTES = 1 << 20
MIB = 2**20


@dataclass(frozen=True)
class Memory(Result):
    """Bytes of cases.

    Attributes:
        rows: case -> bytes that were counted, bytes by the formula, bytes by which they may differ.
        allowed: what these are, besides 2% of the formula.
        notes: lines below the table.
    """

    rows: dict[str, tuple[float, float, float]]
    allowed: str
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Return a markdown table, and whether all rows are within their bounds."""
        lines = ["| case | counted, MiB | formula, MiB | ratio |", "|---|---:|---:|---:|"]
        for case, (counted, formula, _) in self.rows.items():
            lines.append(f"| {case} | {counted / MIB:.2f} | {formula / MIB:.2f} | {counted / formula:.3f} |")
        off = [case for case, (counted, formula, bound) in self.rows.items() if abs(counted - formula) > bound]
        verdict = f"MISSED: {', '.join(off)}" if off else "met"
        below = [f"- within 2% and {self.allowed}: {verdict}", *(f"- {note}" for note in self.notes)]
        return "\n".join([*lines, "", *below])


def run(num_rounds: int) -> Result:
    """Count on forked gloo processes; ``num_rounds`` steps come before."""
    rows = {}
    for world in WORLDS:
        for dtype in (torch.float32, torch.bfloat16):
            for zero in STAGES:
                counted, num_parameters = run_ranks(_count, world, zero, dtype, min(num_rounds, 2), timeout=300)[0]
                formula = num_parameters * _bytes_per_parameter(zero, dtype, world)
                case = f"{world} ranks, zero {zero}, {str(dtype).removeprefix('torch.')}"
                rows[case] = counted, formula, 0.02 * formula + BUCKET_BYTES
    return Memory(
        f"Memory of a rank ({DEPTH} blocks, hidden {HIDDEN}, AdamW)",
        "formula",
        {},
        rows,
        f"one bucket ({BUCKET_BYTES / MIB:.0f} MiB)",
    )


def _bytes_per_parameter(zero: int, dtype: torch.dtype, world: int) -> float:
    value = dtype.itemsize
    state = 8 if dtype == torch.float32 else 12
    kept = [(2 * value + state, 0), (2 * value, value + state), (value, value + state), (0, 2 * value + state)]
    whole, shared = kept[zero]
    return whole + shared / world


def _count(zero: int, dtype: torch.dtype, num_steps: int) -> tuple[int, int]:
    gc.collect()
    before = held_bytes()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    model = stack(GPTBlock, DEPTH, hidden=HIDDEN, num_heads=HEADS, seq=SEQ).to(dtype)
    num_parameters = sum(p.numel() for p in model.parameters())
    model = DDP(model, mesh["dp"], zero=zero, bucket_bytes=BUCKET_BYTES)
    masters = {} if dtype == torch.float32 else {"master_dtype": torch.float32}
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4, **masters)
    for _ in range(num_steps):
        _backward(model, dtype)
        optimizer.step()
        optimizer.zero_grad()
    _backward(model, dtype)
    gc.collect()
    return held_bytes() - before, num_parameters


def _backward(model: nn.Module, dtype: torch.dtype) -> None:
    model(torch.ones(BATCH, SEQ, HIDDEN, dtype=dtype)).sum().backward()
