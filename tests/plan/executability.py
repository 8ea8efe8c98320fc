"""Run random plans of many models: each trains as one process does, or is refused before a process group is used.

    python tests/plan/executability.py                                       # 200 plans of each of 20 models: hours
    python tests/plan/executability.py --models llama t5 --plans 10 --seed 3

A plan is drawn field by field, or made by ``vescale.generate_plan`` under random constraints for a random number of
ranks. After two steps of SGD with momentum and a third forward, losses and norms of gradients are those of one process.
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
import functools
import importlib
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vescale
from vescale_testing import RankFailure, keep_float64, run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))
families = importlib.import_module("families")
sys.path.pop(0)

__all__ = ["KINDS", "MODELS", "Case", "attempt", "cases", "main"]

MODELS = """
    llama mistral qwen2 qwen3 gemma2 olmo2 phi3 gpt2 gpt_neox opt bloom bert t5 bart vit mixtral qwen2_moe qwen3_moe
    olmoe deepseek_v3
""".split()  # noqa: SIM905
KINDS = ("right", "refused", "late", "obscure", "wrong", "hang", "died")
STEPS, ROWS = 2, 8
TOLERANCE = 1e-10
TIMEOUT = 180.0
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
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
            yield Case(model, tuple(_fields(draw, ranks).items()))


def _constraints(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"memory_fraction": draw.choice((0.2, 0.5, 1.0)), "mode": draw.choice(("static", "eager"))}
    for name, choices in (("zero", (0, 1, 2, 3)), ("tp", (2,)), ("pp", (2,)), ("num_microbatches", (2,))):
        if draw.random() < 0.25:
            found[name] = draw.choice(choices)
    return found


def _fields(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Return fields of a plan for a number of ranks; most of them are defaults."""
    dp, tp, pp = draw.choice(list(_degrees(ranks)))
    fields: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "zero": draw.choice((0, 0, 1, 2, 3))}
    fields["mode"] = draw.choice(("static", "static", "eager"))
    fields["num_microbatches"] = draw.choice((1, 2)) if pp > 1 or draw.random() < 0.3 else 1
    if pp > 1:
        fields["schedule"] = draw.choice(SCHEDULES)
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
        for pp in (1, 2, 4):
            if ranks % (tp * pp) == 0:
                yield ranks // tp // pp, tp, pp


# ------------------------------------------------------------------------------------------------------- one attempt


def attempt(case: Case, *, timeout: float = TIMEOUT) -> tuple[str, str]:
    """Return what becomes of a case, as one of `KINDS`, and the reason."""
    try:
        plan = _plan(case)
    except (ValueError, TypeError) as error:
        return "refused", str(error)
    reason = _refusal(plan, case.model)
    if reason is not None:
        return reason
    try:
        found = run_ranks(_train_on_rank, plan.world_size, plan, case.model, timeout=timeout)
    except RankFailure as failure:
        text = str(failure)
        return ("hang" if "did not end" in text else "died"), text[-600:]
    for kind, text in (each for each in found if isinstance(each, tuple)):
        return kind, text
    return _compare(_reference(case.model, getattr(plan, "random_stream", "torch"), plan.clip_grad_norm), found[0])


def _plan(case: Case) -> vescale.Plan:
    fields = dict(case.fields)
    if not case.ranks:
        return vescale.Plan(**fields)
    cluster = vescale.Cluster(case.ranks, memory_bytes=8 * 2**20, device="cpu")
    constraints = vescale.Constraints(global_batch_size=ROWS, sequence_length=families.TOKENS, **fields)
    return vescale.generate_plan(families.build(case.model), cluster, constraints)


def _refusal(plan: vescale.Plan, model: str) -> tuple[str, str] | None:
    """Return how ``parallelize`` refuses a plan in a process without a group; None if it only misses the processes."""
    if plan.world_size == 1:
        return None
    try:
        vescale.parallelize(plan, families.build(model), SGD, **_arguments(plan))
    except (ValueError, TypeError) as error:
        if f"{plan.world_size} processes, got 1" in str(error):
            return None
        return "refused", str(error)
    except Exception as error:
        return "obscure", f"without a group: {type(error).__name__}: {error}"
    finally:
        assert not dist.is_initialized(), "a process group was made for a plan of several processes"
    raise AssertionError(f"expected parallelize to refuse one process for {plan.world_size}")


def _arguments(plan: vescale.Plan) -> dict[str, Any]:
    """Return arguments of ``parallelize`` that the plan does not have: without a limit norms are measured alone."""
    return {} if plan.clip_grad_norm is not None else {"clip_grad_norm": 1e30}


def _train_on_rank(plan: vescale.Plan, name: str) -> dict[str, float] | tuple[str, str]:
    """Return losses and norms of a rank, or the kind of an error and its text."""
    try:
        model = families.build(name)
        arguments = {"example_inputs": _batch(model, 0), **_arguments(plan)}
        parallel, optimizer = vescale.parallelize(plan, model, SGD, **arguments)

        def call(batch: dict[str, Any]) -> torch.Tensor:
            loss = parallel(**parallel.local_batch(batch)).loss
            return loss if plan.dp == 1 else _MeanOverRanks.apply(loss)

        return _train(model, call, optimizer)
    except Exception as error:
        ours = isinstance(error, ValueError | TypeError | RuntimeError) and "expected" in str(error)
        text = f"{type(error).__name__}: {error}"
        return ("late" if ours else "obscure"), text if ours else text + traceback.format_exc()[-1500:]


class _MeanOverRanks(torch.autograd.Function):
    """The mean of the losses of all ranks, equal along tp and pp; the gradient is that of the rank's own loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grads[0]


def _train(model: Any, call: Callable[[dict[str, Any]], torch.Tensor], optimizer: Any) -> dict[str, float]:
    """Return the losses and norms of two steps, and the loss after them."""
    torch.manual_seed(1)
    found = {}
    for step in range(STEPS + 1):
        batch = _batch(model, step)
        with keep_float64():
            loss = call(batch)
            found[f"loss {step}"] = float(loss.detach())
            if step == STEPS:
                break
            loss.backward()
        optimizer.step()
        norm = optimizer.grad_norm
        found[f"norm {step}"] = float(getattr(norm, "full_tensor", lambda norm=norm: norm)())
        optimizer.zero_grad()
    return found


def _batch(model: Any, step: int) -> dict[str, Any]:
    """Return inputs of a step in which every row has equally many counted targets."""
    inputs = families.batch(model, ROWS, step)
    if "input_ids" in inputs:
        inputs["labels"] = inputs["input_ids"].clone()
        inputs["labels"][:, 4] = -100
    return inputs | families.arguments(model)


@functools.cache
def _reference(name: str, random_stream: str, limit: float | None) -> dict[str, float]:
    """Return the same of the unmodified model in one process."""
    (found,) = run_ranks(_train_alone, 1, name, random_stream, limit, timeout=TIMEOUT)
    return found


class _Plain:
    """An optimizer that clips, and keeps the norm."""

    def __init__(self, model: Any, limit: float | None) -> None:
        self.model, self.limit, self.optimizer = model, limit, SGD(model.parameters())
        self.grad_norm = torch.tensor(0.0)

    def step(self) -> None:
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit or 1e30)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def _train_alone(name: str, random_stream: str, limit: float | None) -> dict[str, float]:
    model = families.build(name)
    with vescale.dtensor.random.stream(random_stream):
        return _train(model, lambda batch: model(**batch).loss, _Plain(model, limit))


def _compare(expected: dict[str, float], found: dict[str, float]) -> tuple[str, str]:
    for name, value in expected.items():
        if not math.isclose(found[name], value, rel_tol=TOLERANCE):
            return "wrong", f"{name}: expected {value!r}, got {found[name]!r}"
    return "right", ""


# ------------------------------------------------------------------------------------------------------- all of them


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Run random plans; return 1 if something is neither right nor refused, else 0."""
    parser = argparse.ArgumentParser(prog="executability.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="NAME", help="families of tests/families")
    parser.add_argument("--plans", type=int, default=200, help="plans of each model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write each case as a line of JSON")
    options = parser.parse_args(arguments)
    counts: collections.Counter[str] = collections.Counter()
    for model in options.models:
        begun = time.monotonic()
        of_model: collections.Counter[str] = collections.Counter()
        for case in cases(model, options.plans, options.seed):
            kind, text = attempt(case)
            of_model[kind] += 1
            if kind not in ("right", "refused"):
                say(f"{kind}: {case}: {text}")
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps({"case": str(case), "kind": kind, "text": text}) + "\n")
        counts += of_model
        say(f"{model}: {_counted(of_model)} in {time.monotonic() - begun:.0f} s")
    say(f"all: {_counted(counts)}")
    return int(any(counts[kind] for kind in KINDS if kind not in ("right", "refused")))


def _counted(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
