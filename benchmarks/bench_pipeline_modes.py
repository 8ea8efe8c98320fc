"""Stages and micro-batches in static mode beside eager mode: steps of a small LLaMA on gloo ranks, sharded over two.

The model is small, so that what a step costs the host is measured: four layers, hidden size 128, two rows of 32 tokens
in each of four micro-batches. Times are processor times of a rank, of forward, backward and AdamW, since ranks share
cores. Losses are compared before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from huggingface import build
from measure import Result, time_in_turns, with_processor_time
from targets import Target, Targets

import vescale
from vescale_testing import run_ranks

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 500,
}
ROWS, SEQ, MICROBATCHES = 8, 32, 4
MODES = ("eager", "static")
LAYOUTS = {
    "two stages, 1f1b": {"pp": 2},
    "four stages, zb_v": {"pp": 2, "schedule": "zb_v"},
    "one stage": {"pp": 1},
}


def run(num_rounds: int) -> Result:
    """Measure on forked gloo processes."""
    seconds: dict[str, list[float]] = {}
    for layout, options in LAYOUTS.items():
        of_modes = run_ranks(_on_a_rank, 2 * options["pp"], options, num_rounds, timeout=1500)[0]
        seconds |= {f"{layout}, {mode}": times for mode, times in of_modes.items()}
    reference = {name: name.replace("static", "eager") for name in seconds}
    targets = tuple(Target(name, of, at_most=1.0) for name, of in reference.items() if name != of)
    return Targets("Stages in static mode, processor time", "eager mode", seconds, reference, targets)


def _on_a_rank(options: dict, num_rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    steps = {mode: _step(vescale.Plan(tp=2, num_microbatches=MICROBATCHES, mode=mode, **options)) for mode in MODES}
    torch.testing.assert_close(*[step() for step in steps.values()], rtol=0, atol=0)
    processor: dict[str, list[float]] = {mode: [] for mode in steps}
    time_in_turns({m: with_processor_time(step, processor[m]) for m, step in steps.items()}, num_rounds=num_rounds)
    return {mode: times[-num_rounds:] for mode, times in processor.items()}


def _step(plan: vescale.Plan) -> Callable[[], float]:
    model, optimizer = vescale.parallelize(plan, build("LLaMA", **SIZES), partial(torch.optim.AdamW, lr=1e-3))
    tokens = torch.randint(SIZES["vocab_size"], (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    dist.barrier()

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
