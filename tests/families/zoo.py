"""Train tiny models of many families on several ranks, and compare each with one process.

    python tests/families/zoo.py                                               # every family in every case
    python tests/families/zoo.py --families mamba bloom --cases "dp 3 static"

    dp 2, dp 3    the batch is a mesh axis of the program; on three ranks rows are uneven
    tp 2          every linear layer holds a part of its outputs, every embedding a part of its columns
    dp x tp       both
    derived 2     the plan that `vescale.dmodule.plans.derive` makes; on three ranks no heads divide
    ddp 2         `vescale.optim.DDP`, without a plan
    parts         micro-batches of `vescale.pipe.PipelineEngine`, with padding
    pp 2, pp 4    the same on ranks of one stage each, in 1F1B
    pp 2 loop     the same on two ranks of two stages each, in interleaved 1F1B; as a V: in ZB-V
    pp 2 V

A loss of a router mixes rows, so on stages such families have one micro-batch. Stages have equally many modules each,
or, with `--every-split`, begin once at each module. Dropout is on. After two steps losses, gradients and the random
state are those of one process. A case is right, is refused (one of our errors), obscure (another error) or wrong;
ranks may hang or die.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from families import FAMILIES, arguments, batch, build, even_batch
from torch import Tensor, nn

from vescale.dmodule import parallelize_module
from vescale.dmodule.plans import derive
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP
from vescale.pipe import PipelineEngine, PipelinePlan, split_units
from vescale_testing import RankFailure, gather_full, keep_float64, run_ranks

__all__ = ["CASES", "KINDS", "main", "run_family"]

SHAPES = {
    "dp 2": {"dp": 2},
    "dp 3": {"dp": 3},
    "tp 2": {"tp": 2},
    "dp x tp": {"dp": 2, "tp": 2},
}
CASES = {f"{name} {mode}": (axes, mode) for name, axes in SHAPES.items() for mode in ("eager", "static")}
DERIVED = {f"derived {degree}": {"tp": degree} for degree in (2, 3, 4)}
SHAPES |= {name: axes for name, axes in DERIVED.items() if axes not in SHAPES.values()}
CASES |= {f"{name} {mode}": (axes, mode) for name, axes in DERIVED.items() for mode in ("eager", "static")}
SHAPES |= {"parts": {"pp": 1}, "pp 2": {"pp": 2}, "pp 4": {"pp": 4}}
CASES["ddp 2"] = {"dp": 2}, "ddp"
CASES |= {name: (SHAPES[name], "1f1b") for name in ("parts", "pp 2", "pp 4")}
CASES |= {"pp 2 loop": ({"pp": 2}, "interleaved_1f1b"), "pp 2 V": ({"pp": 2}, "zb_v")}
STAGES_PER_RANK = {"1f1b": 1, "interleaved_1f1b": 2, "zb_v": 2}
KINDS = ("right", "refused", "obscure", "wrong", "hang", "died")
BAD = ("wrong", "hang", "died")
STEPS = 2
ROWS = 4
UNEVEN_ROWS = 5
TOLERANCE = 1e-9
TIMEOUT = 240.0


# ------------------------------------------------------------------------------------------------- one training


def train(
    model: nn.Module,
    num_rows: int,
    rows: slice = slice(None),
    *,
    make: Callable[[nn.Module, int, int], dict[str, Tensor]] = batch,
    call: Callable[..., Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the losses of the steps, the sums of gradients and the random state."""
    torch.manual_seed(1)
    found, plain = {}, getattr(model, "module", model)
    for step in range(STEPS):
        inputs = {name: value[rows] for name, value in make(plain, num_rows, step).items()} | arguments(plain)
        with keep_float64():
            loss = model(**inputs).loss if call is None else call(**inputs)
            loss.backward()
        found[f"loss {step}"] = gather_full(loss.detach())
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    found |= {f"gradient of {name}": gather_full(grad) for name, grad in gradients.items() if grad is not None}
    found["random state"] = torch.get_rng_state().double()
    return found


def train_on_ranks(family: str, case: str, starts: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the same of a model on this rank of a mesh; ``starts`` are the modules that begin stages."""
    axes, mode = CASES[case]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model, num_rows = build(family), num_rows_of(case)
    if "pp" in axes:
        mixes_rows = axes["pp"] > 1 and getattr(model.config, "output_router_logits", False)
        plan = PipelinePlan(mode, num_microbatches=1 if mixes_rows else 2, split=starts or "uniform")
        experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]  # they sort rows
        engine = PipelineEngine(model, mesh["pp"], plan, row_wise=experts, example_inputs=example_of(model))
        of_stages: list[Any] = [None] * mesh.size()
        dist.all_gather_object(of_stages, train(model, num_rows, make=even_batch, call=engine))
        return {name: value for found in of_stages for name, value in found.items()}
    if case.startswith("derived"):
        plan = derive(model, example_of(model), degree=axes["tp"]).plan
        return train(parallelize_module(model, mesh, plan, mode=mode), num_rows)
    if mode != "ddp":
        parallel = parallelize_module(model, mesh, plan_of(model, axes), mode=mode, allow_implicit=True)
        return train(parallel, num_rows)
    first = mesh.get_local_rank() * num_rows // mesh.size()
    mine = slice(first, first + num_rows // mesh.size())
    found = train(DDP(model, mesh), num_rows, mine)
    for step in range(STEPS):
        dist.all_reduce(found[f"loss {step}"])
        found[f"loss {step}"] /= mesh.size()
    return found


def splits_of(family: str, case: str, *, every: bool) -> list[list[str]]:
    """Return the modules that begin stages 1, 2, ...: one split into equal parts, or splits that have every start."""
    axes, mode = CASES[case]
    count = axes.get("pp", 1) * STAGES_PER_RANK.get(mode, 1) - 1
    if not count:
        return [[]]
    model = build(family)
    stages = split_units(model, PipelinePlan(), 2, example_inputs=example_of(model)).stages
    units = [unit for stage in stages for unit in stage]
    if every:
        return [units[first : first + count] for first in range(1, len(units) - count + 1)]
    return [[units[len(units) * stage // (count + 1)] for stage in range(1, count + 1)]]


def example_of(model: nn.Module) -> dict[str, Any]:
    """Return arguments of a call without a mask, whose elements code reads."""
    return batch(model, ROWS, 0) | arguments(model)


def num_rows_of(case: str) -> int:
    """Return the number of rows of a global batch."""
    return UNEVEN_ROWS if case.startswith("dp 3") else ROWS


def plan_of(model: nn.Module, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return a plan that fits on every model, whatever its code does between the layers."""
    parameters: dict[str, Any] = {}
    values: dict[str, Any] = {}
    if "dp" in axes:
        values["input"] = {name: {"dp": Shard(0)} for name in batch(model, 1, 0)}
    if "tp" in axes:
        num_uses = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for name, module in model.named_modules():
            if type(module) not in (nn.Linear, nn.Embedding) or num_uses[id(module.weight)] > 1:
                continue
            dim = 0 if type(module) is nn.Linear else 1
            if module.weight.shape[dim] % axes["tp"]:
                continue
            # a boundary replicates over the axes that it does not name
            layout: dict[str, Any] = {"tp": Replicate()}
            if "dp" in axes and "position" not in name:
                layout["dp"] = Shard(0)
            path = re.escape(name)
            parameters[rf"{path}\.(weight|bias)"] = {"tp": Shard(dim)}
            values[rf"{path}\.output"] = [layout]
            if type(module) is nn.Linear:
                values[rf"{path}\.input"] = [layout]
    return {"parameter": parameters, "forward": values}


# ------------------------------------------------------------------------------------------------- verdicts


def run_family(family: str, cases: Sequence[str], *, every_split: bool = False) -> dict[str, tuple[str, str]]:
    """Return, by case, its kind and what an error says; ranks of several cases on one mesh live through all of them."""
    found = {}
    timeout = TIMEOUT * (10 if every_split else 1)
    for axes in SHAPES.values():
        names = [case for case in cases if CASES[case][0] == axes]
        if not names:
            continue
        try:
            of_ranks = run_ranks(_on_a_rank, math.prod(axes.values()), family, names, every_split, timeout=timeout)
        except RankFailure as failure:
            text = str(failure).partition("\n")[0]
            found |= dict.fromkeys(names, ("hang" if "did not end" in text else "died", text))
        else:
            found |= {name: max((each[name] for each in of_ranks), key=_badness) for name in names}
    return {case: found[case] for case in cases}


def _badness(verdict: tuple[str, str]) -> tuple[int, bool]:
    kind, text = verdict
    return KINDS.index(kind), "another rank" not in text  # which says nothing of the cause


def _on_a_rank(family: str, cases: Sequence[str], every_split: bool) -> dict[str, tuple[str, str]]:
    warnings.filterwarnings("ignore")

    @functools.cache
    def alone(num_rows: int, make: Callable[[nn.Module, int, int], dict[str, Tensor]]) -> dict[str, Tensor]:
        return train(build(family), num_rows, make=make)

    def worst(case: str) -> tuple[str, str]:
        expected = alone(num_rows_of(case), even_batch if "pp" in CASES[case][0] else batch)
        try:
            splits = splits_of(family, case, every=every_split)
        except Exception as error:
            return _of_error(error)
        verdicts = [(*_verdict(family, case, starts, expected), starts) for starts in splits]
        kind, text, starts = max(verdicts, key=lambda verdict: KINDS.index(verdict[0]))
        if kind == "right" or not every_split:
            return kind, text
        count = sum(other == kind for other, *_ in verdicts)
        return kind, f"{count} of {len(splits)} splits, as that at {', '.join(starts)}: {text}"

    return {case: worst(case) for case in cases}


def _verdict(family: str, case: str, starts: Sequence[str], expected: Mapping[str, Tensor]) -> tuple[str, str]:
    try:
        actual = train_on_ranks(family, case, starts)
    except Exception as error:  # whatever it is, it is the finding
        return _of_error(error)
    if missing := expected.keys() ^ actual.keys():
        return "wrong", f"only one of both has {sorted(missing)[:3]}"
    for name, value in expected.items():
        difference = (actual[name] - value).abs().max().item() if value.numel() else 0.0
        if not difference <= TOLERANCE:
            return "wrong", f"{name} differs by {difference:.3g}"
    return "right", ""


def _of_error(error: Exception) -> tuple[str, str]:
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return ("refused" if _is_ours(error) else "obscure"), f"{type(error).__name__}: {error}{notes}"


def _is_ours(error: Exception) -> bool:
    """Return whether the error is of a type of ours, or our code raised it, or has added a way out."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    has_note = any(note.startswith("vescale.") for note in getattr(error, "__notes__", ()))
    return has_note or type(error).__module__.startswith("vescale") or "/vescale/" in raised_in


# ------------------------------------------------------------------------------------------------- all families


def main(given: Sequence[str] | None = None, tell: Callable[[str], None] = print) -> int:
    """Run the chosen families and cases and tell about each; return 1 if anything is wrong, hangs or dies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES, help="by default all")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="by default all of them")
    parser.add_argument("--every-split", action="store_true", help="let stages begin at every module once")
    parser.add_argument("--json", help="a file for all results")
    chosen = parser.parse_args(given)
    counts: dict[str, collections.Counter[str]] = {case: collections.Counter() for case in chosen.cases}
    results = {}
    for family in chosen.families:
        began = time.monotonic()
        results[family] = run_family(family, chosen.cases, every_split=chosen.every_split)
        for case, (kind, text) in results[family].items():
            counts[case][kind] += 1
            if kind != "right":
                first_line = text.partition("\n")[0]
                tell(f"{family}, {case}: {kind}: {first_line[:300]}")
        tell(f"{family}: {time.monotonic() - began:.0f} s")
        if chosen.json:
            Path(chosen.json).write_text(json.dumps(results, indent=1))
    for case, count in counts.items():
        tell(f"{case}: " + ", ".join(f"{count[kind]} {kind}" for kind in KINDS))
    return int(any(count[kind] for count in counts.values() for kind in BAD))


if __name__ == "__main__":
    sys.exit(main())
