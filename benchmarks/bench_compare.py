"""What `vescale.record` costs: steps of training with and without it, and what it writes.

Each model takes four turns: ordinary steps, steps that are recorded, and two turns of a model whose record has ended.
The first of these finds caches that hold other data; the second shows what a record leaves behind: nothing. A step is
forward, backward, clipping and AdamW. The losses of all are compared bit for bit. LLaMA and Mixtral run in one process;
LLaMA also under plans on two gloo ranks, on the modules' own code and as a static program. One thread per rank.

A digest costs by elements, computing by elements times width, so a wider model pays less.

The last two columns are the bytes that a step adds to the file of a rank, and what 1,000 steps come to. A file never
exceeds ``max_bytes``, by default 1 GiB: the step that would, and those after it, are left out, and the file says so.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface import build
from measure import time_in_turns
from targets import Target, Targets
from torch import nn

import vescale
from vescale_testing import run_ranks

SEQ, VOCAB = 64, 512
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
}
WIDE = {**SIZES, "hidden_size": 512, "intermediate_size": 1376}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROWS = 8
NUM_STEPS = 1000
STEPS_PER_TURN = 4


@dataclass(frozen=True)
class _Model:
    """Family and sizes of a model, and the plan under which it runs, if any."""

    family: str
    sizes: dict[str, int]
    plan: vescale.Plan | None = None


MODELS = {
    "LLaMA": _Model("LLaMA", SIZES),
    "LLaMA, 4 times as wide": _Model("LLaMA", WIDE),
    "Mixtral": _Model("Mixtral", {**SIZES, **EXPERTS}),
    "LLaMA, tp=2, eager": _Model("LLaMA", SIZES, vescale.Plan(tp=2)),
    "LLaMA, tp=2, static": _Model("LLaMA", SIZES, vescale.Plan(tp=2, mode="static")),
    "LLaMA, dp=2, zero=3": _Model("LLaMA", SIZES, vescale.Plan(dp=2, zero=3)),
}


def run(num_rounds: int) -> Targets:
    """Measure in this process, then on two ranks; the times are those of rank 0."""
    seconds, sizes = _measure([name for name, model in MODELS.items() if model.plan is None], num_rounds)
    planned = [name for name, model in MODELS.items() if model.plan is not None]
    more_seconds, more_sizes = run_ranks(_measure, 2, planned, num_rounds, timeout=3000)[0]
    seconds, sizes = seconds | more_seconds, sizes | more_sizes
    return Targets(
        f"Recording ({ROWS} x {SEQ} tokens, float32)",
        "the ordinary step",
        seconds,
        {case: name for name in MODELS for case in _cases(name)},
        tuple(
            Target(case, name, at_most=bound)
            for name in MODELS
            for case, bound in zip(_cases(name)[1::2], (5.0, 1.05), strict=True)
        ),
        {
            "bytes per step": {_cases(name)[1]: f"{size:,.0f}" for name, size in sizes.items()},
            f"{NUM_STEPS:,} steps": {
                _cases(name)[1]: f"{NUM_STEPS * size / 2**20:,.0f} MiB" for name, size in sizes.items()
            },
        },
    )


def _cases(name: str) -> tuple[str, str, str, str]:
    return name, f"{name}, recorded", f"{name}, first after it", f"{name}, after it"


def _measure(names: list[str], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of all cases, and the bytes of a recorded step by model."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    sizes = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            _, _, ordinary = _make(MODELS[name])
            recorded_model, recorded_optimizer, recorded = _make(MODELS[name])
            stack.enter_context(vescale.record(Path(folder) / "recorded", recorded_model, recorded_optimizer))
            after_model, after_optimizer, after = _make(MODELS[name])
            with vescale.record(Path(folder) / "after", after_model, after_optimizer):
                first = after()
            losses = ordinary(), recorded(), first
            if len(set(losses)) != 1:
                raise AssertionError(f"{name}: expected one loss of all cases, got {losses}")
            file = Path(folder) / "recorded" / f"rank{dist.get_rank() if dist.is_initialized() else 0:05d}.jsonl"
            before = file.stat().st_size
            turns = (_several(step) for step in (ordinary, recorded, after, after))
            found = time_in_turns(dict(zip(_cases(name), turns, strict=True)), num_rounds=num_rounds, num_warmup=1)
            seconds |= {case: [each / STEPS_PER_TURN for each in every] for case, every in found.items()}
            sizes[name] = (file.stat().st_size - before) / (STEPS_PER_TURN * (num_rounds + 1))
    return seconds, sizes


def _several(step: Callable[[], float]) -> Callable[[], None]:
    """Return a turn: the first of its steps finds the caches as the last case left them."""

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
            step()

    return turn


def _make(case: _Model) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    model = build(case.family, **case.sizes)
    ids = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    if case.plan is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # all steps are alike
        batch = {"input_ids": ids, "labels": ids}
    else:
        made, optimizer = vescale.parallelize(
            case.plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=0.0), clip_grad_norm=1.0
        )
        model, batch = made, made.local_batch({"input_ids": ids, "labels": ids})

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        if case.plan is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return model, optimizer, step
