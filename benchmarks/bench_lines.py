"""Lines of code that parallelism costs: a training program of LLaMA-3, Mixtral and OPT against the same on one device.

The programs are in `lines/`: `NAME.py` for one device, `NAME_parallel.py` with its plan written out, `NAME_ready.py`
with a plan of the package, `NAME_derived.py` of a model for which the package has none and derives one. Each is run
first, tiny, on two ranks, and must give the losses of one device: one that does not work has no length. Then
`tools/count_lines.py` counts the lines beyond the program for one device.

Published figures are those that veScale (arXiv 2509.07003) reports for the changed lines of model and parallelization.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from measure import Result
from transformers import LlamaConfig, MixtralConfig, OPTConfig, PretrainedConfig

from vescale_testing import run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

from count_lines import lines_beyond  # noqa: E402 - it lies there

MEGATRON, TORCHTITAN, PAPER = "Megatron-style rewrite", "torchtitan", "veScale's paper"
PUBLISHED = {
    "LLaMA-3": {MEGATRON: 126, TORCHTITAN: 63, PAPER: 29},
    "Mixtral": {MEGATRON: 162, TORCHTITAN: 100, PAPER: 38},
}
FEWER = 0.784  # than a Megatron-style rewrite
VARIANTS = {"parallel": "plan written out", "ready": "ready plan", "derived": "derived plan"}
WORLD, STEPS = 2, 3
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROGRAMS = {"LLaMA-3": "llama3", "Mixtral": "mixtral", "OPT": "opt"}
MOST_DERIVED = 6  # lines, as with a ready plan


@dataclass(frozen=True)
class LineCounts(Result):
    """Lines beyond the program for one device.

    Attributes:
        lines: by model, then by variant.
    """

    lines: dict[str, dict[str, int]] = field(default_factory=dict)

    def table(self) -> str:
        """Return a markdown table of counts with the published ones, and whether the targets are met."""
        rows = ["| | " + " | ".join(self.lines) + " |", "|---|" + "---:|" * len(self.lines)]
        for name in (MEGATRON, TORCHTITAN, PAPER):
            numbers = [str(PUBLISHED[model][name]) if model in PUBLISHED else "-" for model in self.lines]
            rows.append(f"| {name} | " + " | ".join(numbers) + " |")
        for variant in VARIANTS.values():
            numbers = [str(self.lines[model].get(variant, "-")) for model in self.lines]
            rows.append(f"| this version, {variant} | " + " | ".join(numbers) + " |")
        return "\n".join([*rows, "", *(target for model in self.lines for target in self._targets(model))])

    def _targets(self, model: str) -> list[str]:
        targets = []
        for variant, count in self.lines[model].items():
            if model not in PUBLISHED:
                verdict = "met" if count <= MOST_DERIVED else "MISSED"
                targets.append(f"- {model}, {variant}: {count} lines (at most {MOST_DERIVED}): {verdict}")
                continue
            fewer = 1 - count / PUBLISHED[model][MEGATRON]
            met = fewer >= FEWER and count < PUBLISHED[model][PAPER]
            targets.append(
                f"- {model}, {variant}: {fewer:.1%} fewer than a {MEGATRON} (at least {FEWER:.1%}), "
                f"{count} against {PUBLISHED[model][PAPER]} lines of {PAPER}: {'met' if met else 'MISSED'}"
            )
        return targets


def run(_num_rounds: int) -> Result:
    """Run every program, then count."""
    counts: dict[str, dict[str, int]] = {}
    for model, name in PROGRAMS.items():
        expected = run_ranks(_losses, 1, name, timeout=120)[0]
        for variant, meaning in VARIANTS.items():
            if not _path(f"{name}_{variant}").exists():
                continue
            for rank, losses in enumerate(run_ranks(_losses, WORLD, f"{name}_{variant}", timeout=120)):
                if max(abs(a - e) for a, e in zip(losses, expected, strict=True)) > 1e-4:
                    raise RuntimeError(f"{name}_{variant} on rank {rank} gives losses {losses}, one device {expected}")
            counts.setdefault(model, {})[meaning] = len(lines_beyond(_source(name), _source(f"{name}_{variant}")))
    title = f"Lines of code beyond a program for one device (all programs ran on {WORLD} ranks with its losses)"
    return LineCounts(title, MEGATRON, {}, counts)


def _path(name: str) -> Path:
    return HERE / "lines" / f"{name}.py"


def _source(name: str) -> str:
    return _path(name).read_text(encoding="utf-8")


def _losses(name: str) -> list[float]:
    """Return the losses of a program with a tiny model."""
    return _load(name)(_tiny(name), STEPS)


def _load(name: str) -> Callable[[PretrainedConfig, int], list[float]]:
    spec = importlib.util.spec_from_file_location(f"lines_{name}", _path(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def _tiny(name: str) -> PretrainedConfig:
    if name.startswith("opt"):
        sizes = {key: SIZES[key] for key in SIZES if key not in ("intermediate_size", "num_key_value_heads")}
        return OPTConfig(**sizes, ffn_dim=SIZES["intermediate_size"], word_embed_proj_dim=SIZES["hidden_size"])
    return LlamaConfig(**SIZES) if name.startswith("llama3") else MixtralConfig(**SIZES, num_local_experts=4)
