"""How long `plans.derive` takes for deep models: with a few layers that stand for the others, and with all of them.

Processor time of a derivation for two ranks, from a model on the meta device; median of three rounds in which the cases
take turns. A layer stands for others if it is like them: for the column of all layers, each has a number of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn

from vescale.dmodule.plans import DerivedPlan, derive

NUM_ROUNDS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
MODELS = {
    "LLaMA": lambda n: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=n, **SIZES)),
    "Mixtral": lambda n: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_hidden_layers=n, **SIZES, **EXPERTS)
    ),
}
DEPTHS = (4, 32)


@dataclass(frozen=True)
class Row:
    """Seconds of processor time for one model."""

    model: str
    num_layers: int
    few: float
    all: float


@dataclass(frozen=True)
class Times:
    """A table of times and their ratios."""

    title: str
    rows: Sequence[Row]

    def table(self) -> str:
        """Return a markdown table with one line per model and depth."""
        lines = ["| model | layers | few of them, s | all of them, s | ratio |", "|---|---:|---:|---:|---:|"]
        lines += [
            f"| {r.model} | {r.num_layers} | {r.few:.1f} | {r.all:.1f} | {r.few / r.all:.2f} |" for r in self.rows
        ]
        return "\n".join(lines)


def run(num_rounds: int) -> Times:  # noqa: ARG001 - a round takes minutes
    """Derive each model both ways; raise where the plans differ."""
    derive(_model("LLaMA", 2, is_numbered=False), degree=2)  # what is imported at the first call
    rows = []
    for name in MODELS:
        for depth in DEPTHS:
            found: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(NUM_ROUNDS):
                few, all_layers = (_derived(_model(name, depth, is_numbered=each), found[each]) for each in found)
                if few.plan != all_layers.plan or few.num_bytes != all_layers.num_bytes:
                    raise RuntimeError(f"{name} of {depth} layers: expected one plan, got\n{few}\nand\n{all_layers}")
            rows.append(Row(name, depth, *(statistics.median(found[each]) for each in found)))
    return Times("Derivation of deep models for two ranks, processor time", rows)


def _model(name: str, depth: int, *, is_numbered: bool) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name](depth)
    if is_numbered:
        for number, layer in enumerate(model.model.layers):
            layer.number_of_its_own = number + 0.5
    return model


def _derived(model: nn.Module, seconds: list[float]) -> DerivedPlan:
    start = time.process_time()
    found = derive(model, degree=2)
    seconds.append(time.process_time() - start)
    return found
