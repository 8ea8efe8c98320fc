"""A whole training step of a LLaMA, hidden 1024, tensor parallel over two processes: static and compiled against stock.

Real kernels and real communication (gloo), one thread per process: forward, backward and AdamW. Stock is
`torch.distributed.tensor.parallel` with the same matrices sharded and the same boundaries. All cases start from the
same weights and train on the same tokens; the run stops if losses differ. AdamW is fused. For stock that gathers
parameters, because it leaves gradients of norms partial: so it has `foreach`, too. Each case has processes of its own
(`turns.py`). Times are of the clock: ranks wait for each other, so run this where nothing else runs; the last column is
the processor time of one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import huggingface
import torch
from cases import MODES, check_same_losses
from measure import Result
from targets import Target, Targets
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from turns import steps_in_turns

from vescale.dmodule import parallelize_module, plans

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


def run(num_rounds: int) -> Result:
    """Measure on forked gloo processes."""
    makers = {
        STOCK: partial(_stock, fused=True),
        STOCK_FOREACH: partial(_stock, foreach=True),
        **{f"vescale {mode}": partial(_ours, mode) for mode in MODES},
    }
    steps = steps_in_turns(makers, WORLD, "tp", num_rounds=num_rounds)
    note = check_same_losses({name: each.losses for name, each in steps.items()}, STOCK)
    shape = (
        f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, {BATCH} x {SEQ} tokens, float32, AdamW"
    )
    targets = (
        *(Target("vescale static", stock, at_most=1.0) for stock in (STOCK, STOCK_FOREACH)),
        Target("vescale compile", "vescale static", at_most=1.0),
    )
    title = f"Training step of a LLaMA on {WORLD} gloo ranks, sequence parallel ({shape})"
    processor = {name: f"{1e3 * statistics.median(each.processor):.1f}" for name, each in steps.items()}
    seconds = {name: each.seconds for name, each in steps.items()}
    return Targets(title, STOCK, seconds, dict.fromkeys(seconds, STOCK), targets, {"processor, ms": processor}, (note,))


def _stock(mesh: DeviceMesh, **implementation: bool) -> Callable[[], float]:
    return _step(huggingface.parallelize_as_stock(_model(), mesh), **implementation)


def _ours(mode: str, mesh: DeviceMesh) -> Callable[[], float]:
    model = _model()
    plan = plans.plan_for(model, degree=WORLD, sequence_parallel=True)
    return _step(parallelize_module(model, mesh, plan, mode=mode), fused=True)


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
