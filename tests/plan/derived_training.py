"""One small training of a model with a derived plan, through `vescale.parallelize`, and on one process."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale import Plan
from vescale_testing import gather_full, keep_float64, run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
models = importlib.import_module("models")
sys.path.pop(0)

__all__ = ["OPTIMIZER", "assert_equal", "check", "models", "train_on_one", "train_on_ranks"]

OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1)
STEPS = 2


def train_on_one(family: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the record of one process."""
    model = models.build(family)
    with keep_float64():
        return record(family, model, model, OPTIMIZER(model.parameters()), seed)


def record(
    family: str, module: nn.Module, model: Any, optimizer: Any, seed: int = 1, plan: Plan | None = None
) -> dict[str, torch.Tensor]:
    """Train some steps, on the rows of this rank under a plan; return losses, parameters and the random state."""
    torch.manual_seed(seed)
    found = {}
    for step in range(STEPS):
        inputs = models.example(family, module, step)
        output = model(**rows_of_rank(inputs, plan))
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = gather_full(loss.detach() if plan is None else model.global_loss(loss))
    found |= {name: gather_full(p.detach()) for name, p in module.named_parameters()}
    return {**found, "random state": torch.get_rng_state().double()}


def rows_of_rank(inputs: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    """Return this rank's part of the batch, with any number of targets; ranks of ep share a part."""
    if plan is None or plan.dp == plan.ep:
        return inputs
    number, parts = dist.get_rank() // (plan.tp * plan.ep), plan.dp // plan.ep
    return {name: v.chunk(parts)[number] if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


def train_on_ranks(family: str, plan: Plan, module_plan: Any = None) -> dict[str, torch.Tensor]:
    """Return the record of the ranks of a plan, under which some parameter has shards."""
    module = models.build(family)
    with keep_float64():
        inputs = models.example(family, module, 0)
        model, optimizer = vescale.parallelize(
            plan, module, OPTIMIZER, module_plan=module_plan, example_inputs=inputs, row_wise=row_wise(module)
        )
        assert any(p.is_shard() for tensor in module.parameters() for p in getattr(tensor, "placements", ()))
        return record(family, module, model, optimizer, plan=plan)


def row_wise(module: nn.Module) -> list[str]:
    """Experts select rows by routes."""
    return [name for name, part in module.named_modules() if name.endswith(".experts")]


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare two records."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        distance = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert distance < 1e-10, f"{name}: {distance}"


def check(family: str, *plans: Plan) -> None:
    """Compare training under plans, one after the other on the same ranks, with one process."""
    expected = train_on_one(family)

    def on_a_rank() -> list[dict[str, torch.Tensor]]:
        return [train_on_ranks(family, plan) for plan in plans]

    for records in run_ranks(on_a_rank, plans[0].world_size, timeout=300):
        for found in records:
            assert_equal(found, expected)
