"""A training step under data parallelism: `vescale.optim` against torch's DistributedDataParallel and `fully_shard`.

A dozen transformer blocks run forward, backward and AdamW (foreach) on two and on four gloo ranks. Each rank has its
own part of the batch and one thread, and each case has its own processes (`turns.py`). All cases start from the same
weights and get the same data; the run stops if losses differ. Times are wall-clock times, because ranks wait for each
other: run this where nothing else runs. The last column is the processor time of one rank. It takes 10 GiB.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from blocks import GPTBlock, stack
from cases import check_same_losses
from measure import Result
from targets import Target, Targets
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from turns import steps_in_turns

from vescale.optim import DDP, DistributedOptimizer

WORLDS = (2, 4)
DEPTH, HIDDEN, HEADS, BATCH, SEQ = 12, 512, 8, 2, 64
STOCK_DDP, STOCK_SHARDED = "torch DistributedDataParallel", "torch fully_shard"


def run(num_rounds: int) -> Result:
    """Measure on forked gloo processes."""
    groups = {
        STOCK_DDP: {STOCK_DDP: _stock_ddp, **{f"vescale zero {zero}": partial(_ours, zero) for zero in range(3)}},
        STOCK_SHARDED: {STOCK_SHARDED: _stock_sharded, "vescale zero 3": partial(_ours, 3)},
    }
    seconds: dict[str, list[float]] = {}
    processor: dict[str, str] = {}
    reference: dict[str, str] = {}
    targets: list[Target] = []
    notes: list[str] = []
    for world in WORLDS:
        prefix = f"{world} ranks, "
        losses = {}
        for baseline, makers in groups.items():
            for name, steps in steps_in_turns(makers, world, "dp", num_rounds=num_rounds).items():
                losses[name] = steps.losses
                seconds[prefix + name] = steps.seconds
                processor[prefix + name] = f"{1e3 * statistics.median(steps.processor):.0f}"
                reference[prefix + name] = prefix + baseline
        notes.append(prefix + check_same_losses(losses, STOCK_DDP))
        for name, baseline in (("vescale zero 0", STOCK_DDP), ("vescale zero 3", STOCK_SHARDED)):
            targets.append(Target(prefix + name, prefix + baseline, at_most=1.0))
    shape = f"{DEPTH} blocks, hidden {HIDDEN}, {BATCH} x {SEQ} tokens per rank, float32, AdamW"
    return Targets(
        f"Training step under data parallelism, gloo ({shape})",
        "torch's own",
        seconds,
        reference,
        tuple(targets),
        {"processor, ms": processor},
        tuple(notes),
    )


def _model() -> nn.Module:
    return stack(GPTBlock, DEPTH, hidden=HIDDEN, num_heads=HEADS, seq=SEQ)


def _stock_ddp(mesh: DeviceMesh) -> Callable[[], float]:
    return _stock(DistributedDataParallel(_model(), process_group=mesh.get_group()), mesh)


def _stock_sharded(mesh: DeviceMesh) -> Callable[[], float]:
    model = _model()
    for block in model:
        fully_shard(block, mesh=mesh)
    return _stock(fully_shard(model, mesh=mesh), mesh)


def _stock(model: nn.Module, mesh: DeviceMesh) -> Callable[[], float]:
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True), mesh)


def _ours(zero: int, mesh: DeviceMesh) -> Callable[[], float]:
    model = DDP(_model(), mesh, zero=zero)
    return _step(model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4, foreach=True), mesh)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    x, y = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator) for _ in range(2))

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
