"""Run random plans of many models: each trains as one process does, or is refused before a process group is used.

    python tests/plan/executability.py                                       # 200 plans of each of 20 models: hours
    python tests/plan/executability.py --models llama t5 --plans 10 --seed 3
    python tests/plan/executability.py --first 100 --out cases.jsonl         # the second half of them

A plan is drawn field by field, or made by ``vescale.generate_plan`` under random constraints for a random number of
ranks. After two steps of SGD with momentum and a third forward, losses and norms of gradients are those of one process.
A module plan that is derived twice from one model is the same, so it is derived once, before ranks are forked.
A case is

    right      it trains, and the numbers are those of one process
    refused    ``generate_plan`` or ``parallelize`` raises ValueError or TypeError while there is no process group
    late       one of these is raised on ranks, where process groups are used
    obscure    another error
    wrong      other numbers
    hang, died
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import vescale
from vescale import _module_plan
from vescale.dmodule import PlanError
from vescale.dmodule.plans import derive

sys.path.insert(0, str(Path(__file__).resolve().parent))
ranks = importlib.import_module("executability_ranks")
sys.path.pop(0)
families, Job = ranks.families, ranks.Job

__all__ = ["KINDS", "MODELS", "Case", "attempt", "attempts", "cases", "main"]

MODELS = """
    llama mistral qwen2 qwen3 gemma2 olmo2 phi3 gpt2 gpt_neox opt bloom bert t5 bart vit mixtral qwen2_moe qwen3_moe
    olmoe deepseek_v3
""".split()  # noqa: SIM905
KINDS = ("right", "refused", "late", "obscure", "wrong", "hang", "died")
ROUND = 10  # cases of a model before those of the next one
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_v", "interleaved_1f1b", "looped_bfs")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a plan: fields of `vescale.Plan`, or of `vescale.Constraints` with the number of ranks."""

    model: str
    fields: tuple[tuple[str, Any], ...]
    ranks: int = 0

    def __str__(self) -> str:
        how = f"generate_plan on {self.ranks}" if self.ranks else "Plan"
        return f"{self.model}: {how}({', '.join(f'{name}={value!r}' for name, value in self.fields)})"


# ------------------------------------------------------------------------------------------------------------ cases


def cases(model: str, count: int, seed: int) -> Iterator[Case]:
    """Yield random cases of a model, the same for the same arguments."""
    draw = random.Random(f"{seed} {model}")
    for number in range(count):
        ranks = draw.choice((1, 2, 2, 4))
        if number % 3 == 2:
            yield Case(model, tuple(_constraints(draw).items()), ranks)
        else:
            yield Case(model, tuple(_plan_fields(draw, ranks).items()))


def _constraints(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"memory_fraction": draw.choice((0.2, 0.5, 1.0)), "mode": draw.choice(("static", "eager"))}
    for name, choices in (("zero", (0, 1, 2, 3)), ("tp", (2,)), ("pp", (2,)), ("num_microbatches", (2,))):
        if draw.random() < 0.25:
            found[name] = draw.choice(choices)
    return found


def _plan_fields(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Return fields; of ten draws nine are those that ``Plan`` accepts, whatever the model is."""
    while True:
        fields, keeps_any = _fields(draw, ranks), draw.random() < 0.1
        try:
            vescale.Plan(**fields)
        except ValueError:
            if not keeps_any:
                continue
        return fields


def _fields(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Return fields of a plan for a number of ranks; most of them are defaults."""
    dp, tp, pp = draw.choice(list(_degrees(ranks)))
    fields: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "zero": draw.choice((0, 0, 1, 2, 3))}
    fields["mode"] = draw.choice(("static", "static", "eager"))
    fields["num_microbatches"] = draw.choice((1, 2)) if pp > 1 or draw.random() < 0.3 else 1
    if pp > 1:
        fields["schedule"] = draw.choice((*SCHEDULES, *SCHEDULES[:3] * 3))  # the others need more blocks
    if tp > 1:
        fields["sequence_parallel"] = draw.random() < 0.5
    for name, value in (
        ("ep", draw.choice((1, 2))),
        ("etp", tp),
        ("recompute", draw.choice((1, 2))),
        ("reduction", "ordered"),
        ("reshard_after_forward", False),
        ("dp_replicate", 2),
        ("clip_grad_norm", 0.5),
        ("random_stream", "philox"),
    ):
        if draw.random() < 0.15:
            fields[name] = value
    return fields


def _degrees(ranks: int) -> Iterator[tuple[int, int, int]]:
    for tp in (1, 2, 4):
        for pp in (1, 2):  # of blocks the models have two
            if ranks % (tp * pp) == 0:
                yield ranks // tp // pp, tp, pp


# --------------------------------------------------------------------------------------------------------- attempts


def attempt(case: Case) -> tuple[str, str]:
    """Return what becomes of a case, as one of `KINDS`, and the reason."""
    ((_, kind, text),) = attempts([case])
    return kind, text


def attempts(
    chosen: Iterable[Case], ended: dict[Job, tuple[str, str]] | None = None
) -> Iterator[tuple[Case, str, str]]:
    """Yield each case with what becomes of it, and the reason; those that are refused first.

    Equal plans of a model, drawn or generated, are run once; ``ended`` has those that were run before.
    """
    ended = {} if ended is None else ended
    runnable: dict[Job, list[Case]] = {}
    for case in chosen:
        try:
            job = Job(case.model, _plan(case))
        except (ValueError, TypeError) as error:
            yield case, "refused", str(error)
            continue
        if job not in ended and job not in runnable and (refusal := _refusal(job)) is not None:
            ended[job] = refusal
        if job in ended:
            yield case, *ended[job]
        else:
            runnable.setdefault(job, []).append(case)
    for size in sorted({job.plan.world_size for job in runnable}):
        jobs = [job for job in runnable if job.plan.world_size == size]
        for job, end in zip(jobs, ranks.run(jobs), strict=True):
            ended[job] = end
            yield from ((case, *end) for case in runnable[job])


class DeriveOnce:
    """Derive the plan of equal models, for equal inputs and axes, once; or refuse it."""

    def __init__(self) -> None:
        self._ends: dict[str, Any] = {}

    def __call__(self, model: Any, inputs: dict[str, Any] | None, **axes: Any) -> Any:
        sizes = {name: getattr(value, "shape", value) for name, value in (inputs or {}).items()}
        key = f"{model.config} {sizes} {axes}"
        if key not in self._ends:
            try:
                self._ends[key] = derive(model, inputs, **axes)
            except PlanError as error:
                self._ends[key] = error
        if isinstance(self._ends[key], PlanError):
            raise self._ends[key]
        return self._ends[key]


def _plan(case: Case) -> vescale.Plan:
    """Return the plan of a case, without the records of its search."""
    fields = dict(case.fields)
    if not case.ranks:
        return vescale.Plan(**fields)
    cluster = vescale.Cluster(case.ranks, memory_bytes=8 * 2**20, device="cpu")
    constraints = vescale.Constraints(global_batch_size=ranks.ROWS, sequence_length=families.TOKENS, **fields)
    plan = vescale.generate_plan(families.build(case.model), cluster, constraints)
    return dataclasses.replace(plan, memory=(), limit_bytes=None, table=())


def _refusal(job: Job) -> tuple[str, str] | None:
    """Return how ``parallelize`` refuses a plan in a process without a group; None if it only misses the processes."""
    if job.plan.world_size == 1:
        return None
    try:
        model = families.build(job.model)
        vescale.parallelize(job.plan, model, ranks.SGD, **ranks.arguments(job.plan, model))
    except (ValueError, TypeError) as error:
        if f"{job.plan.world_size} processes, got 1" in str(error):
            return None
        return "refused", str(error)
    except Exception as error:
        return "obscure", f"without a group: {type(error).__name__}: {error}"
    finally:
        assert not dist.is_initialized(), "a process group was made for a plan of several processes"
    raise AssertionError(f"expected parallelize to refuse one process for {job.plan.world_size}")


# ------------------------------------------------------------------------------------------------------- all of them


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Run random plans; return 1 if something is neither right nor refused, else 0."""
    parser = argparse.ArgumentParser(prog="executability.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="NAME", help="families of tests/families")
    parser.add_argument("--plans", type=int, default=200, help="plans of each model (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="leave out the plans before this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write each case as a line of JSON")
    options = parser.parse_args(arguments)
    counts = {model: collections.Counter[str]() for model in options.models}
    refusals: collections.Counter[str] = collections.Counter()
    waiting = {
        model: itertools.islice(cases(model, options.plans, options.seed), options.first, None)
        for model in options.models
    }
    for model, begun, case, kind, text in _in_rounds(waiting, options.plans - options.first):
        counts[model][kind] += 1
        if kind == "refused":
            refusals[text] += 1
        elif kind != "right":
            say(f"{kind}: {case}: {text}")
        if options.out:
            row = {"case": str(case), "kind": kind, "text": text, "seconds": round(time.monotonic() - begun, 1)}
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if sum(counts[model].values()) % ROUND == 0:
            say(f"{model}: {_counted(counts[model])}")
    total = sum(counts.values(), collections.Counter())
    say(f"all: {_counted(total)}")
    for text, count in refusals.most_common(5):
        say(f"refused {count} times: {text}")
    return int(any(total[kind] for kind in KINDS if kind not in ("right", "refused")))


def _in_rounds(waiting: dict[str, Iterator[Case]], num_plans: int) -> Iterator[tuple[str, float, Case, str, str]]:
    """Yield a model, when its round began, and what becomes of a case; some cases of a model, then of the next one."""
    ended: dict[Job, tuple[str, str]] = {}
    with mock.patch.object(_module_plan, "derive", DeriveOnce()):
        for _ in range(0, num_plans, ROUND):
            for model, left in waiting.items():
                begun = time.monotonic()
                for case, kind, text in attempts(itertools.islice(left, ROUND), ended):
                    yield model, begun, case, kind, text


def _counted(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
