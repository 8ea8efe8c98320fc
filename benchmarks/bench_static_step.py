"""A whole training step of a LLaMA, hidden 1024, tensor parallel over two processes: static and compiled against stock.

Real kernels and real communication (gloo), one thread per process: forward, backward and AdamW. Stock is
`torch.distributed.tensor.parallel` with the same matrices sharded and the same boundaries. All cases start from the
same weights and train on the same tokens; the run stops if losses differ. AdamW is fused. For stock that gathers
parameters, because it leaves gradients of norms partial: so it has `foreach`, too. Times are of the clock: ranks wait
for each other, so run this where nothing else runs; the last column is the processor time of one rank.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import huggingface
import torch
from cases import MODES, check_same_losses
from measure import Result, time_in_turns, with_processor_time
from targets import Target, Targets
from torch import nn

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale_testing import run_ranks

WORLD, BATCH, SEQ, VOCABULARY = 2, 1, 128, 1024
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQ,
}
STOCK, STOCK_FOREACH = "stock", "stock, foreach"
CHECKED_STEPS = 3


def run(num_rounds: int) -> Result:
    """Measure on two forked gloo processes."""
    seconds, processor, note = run_ranks(_on_each_rank, WORLD, num_rounds, timeout=900)[0]
    shape = (
        f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, {BATCH} x {SEQ} tokens, float32, AdamW"
    )
    targets = (
        *(Target("vescale static", stock, at_most=1.0) for stock in (STOCK, STOCK_FOREACH)),
        Target("vescale compile", "vescale static", at_most=1.0),
    )
    title = f"Training step of a LLaMA on {WORLD} gloo ranks, sequence parallel ({shape})"
    remarks = {"processor, ms": {name: f"{1e3 * statistics.median(times):.1f}" for name, times in processor.items()}}
    return Targets(title, STOCK, seconds, dict.fromkeys(seconds, STOCK), targets, remarks, (note,))


def _on_each_rank(num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], str]:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    steps = {
        STOCK: _step(huggingface.parallelize_as_stock(_model(), mesh), fused=True),
        STOCK_FOREACH: _step(huggingface.parallelize_as_stock(_model(), mesh), foreach=True),
    }
    for mode in MODES:
        model = _model()
        plan = plans.plan_for(model, degree=WORLD, sequence_parallel=True)
        steps[f"vescale {mode}"] = _step(parallelize_module(model, mesh, plan, mode=mode), fused=True)
    note = check_same_losses({name: [step() for _ in range(CHECKED_STEPS)] for name, step in steps.items()}, STOCK)
    processor: dict[str, list[float]] = {name: [] for name in steps}
    timed = {name: with_processor_time(step, processor[name]) for name, step in steps.items()}
    seconds = time_in_turns(timed, num_rounds=num_rounds, num_warmup=1)
    return seconds, {name: times[1:] for name, times in processor.items()}, note


def _model() -> nn.Module:
    return huggingface.build("LLaMA", **SIZES)


def _step(model: nn.Module, **implementation: bool) -> Callable[[], float]:
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **implementation)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
