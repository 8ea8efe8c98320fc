"""A training step under data parallelism: `vescale.optim` against torch's DistributedDataParallel and `fully_shard`.

A dozen transformer blocks on two and on four gloo ranks, each with its own part of the batch: forward, backward and
AdamW (foreach), one thread per process. All cases start from the same weights and see the same data; the run stops if
losses differ. Times are of the clock: ranks wait for each other, so run this where nothing else runs; the last column
is the processor time of one rank.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import torch
from blocks import GPTBlock, stack
from cases import check_same_losses
from measure import Result, time_in_turns, with_processor_time
from targets import Target, Targets
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import run_ranks

WORLDS = (2, 4)
DEPTH, HIDDEN, HEADS, BATCH, SEQ = 12, 512, 8, 2, 64
STOCK_DDP, STOCK_SHARDED = "torch DistributedDataParallel", "torch fully_shard"
STAGES = {f"vescale zero {zero}": zero for zero in range(4)}
BASELINES = dict.fromkeys(STAGES, STOCK_DDP) | {"vescale zero 3": STOCK_SHARDED}
CHECKED_STEPS = 3


def run(num_rounds: int) -> Result:
    """Measure on forked gloo processes."""
    seconds: dict[str, list[float]] = {}
    processor: dict[str, str] = {}
    reference: dict[str, str] = {}
    targets: list[Target] = []
    notes: list[str] = []
    for world in WORLDS:
        times, busy, note = run_ranks(_on_each_rank, world, num_rounds, timeout=1500)[0]
        prefix = f"{world} ranks, "
        seconds |= {prefix + name: values for name, values in times.items()}
        processor |= {prefix + name: f"{1e3 * statistics.median(values):.0f}" for name, values in busy.items()}
        reference |= {prefix + name: prefix + BASELINES.get(name, name) for name in times}
        for name in ("vescale zero 0", "vescale zero 3"):
            targets.append(Target(prefix + name, prefix + BASELINES[name], at_most=1.0))
        notes.append(prefix + note)
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


def _on_each_rank(num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], str]:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    steps = {STOCK_DDP: _stock(DistributedDataParallel(_model()))}
    steps |= {name: _ours(zero, mesh) for name, zero in STAGES.items() if zero < 3}
    sharded = _model()
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    steps[STOCK_SHARDED] = _stock(sharded)
    steps["vescale zero 3"] = _ours(3, mesh)
    note = check_same_losses({name: [step() for _ in range(CHECKED_STEPS)] for name, step in steps.items()}, STOCK_DDP)
    processor: dict[str, list[float]] = {name: [] for name in steps}
    timed = {name: with_processor_time(step, processor[name]) for name, step in steps.items()}
    seconds = time_in_turns(timed, num_rounds=num_rounds, num_warmup=1)
    return seconds, {name: times[1:] for name, times in processor.items()}, note


def _model() -> nn.Module:
    return stack(GPTBlock, DEPTH, hidden=HIDDEN, num_heads=HEADS, seq=SEQ)


def _stock(model: nn.Module) -> Callable[[], float]:
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))


def _ours(zero: int, mesh: object) -> Callable[[], float]:
    model = DDP(_model(), mesh["dp"], zero=zero)
    return _step(model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4, foreach=True))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x, y = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator) for _ in range(2))

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
