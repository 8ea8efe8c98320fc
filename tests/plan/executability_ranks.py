"""Train many plans on the same ranks, one after another, each in process groups of its own.

    parent    fork ranks ──────────────────────────────── read answers ─ fork again after a failure ─ ...
    rank                  groups, train, answer, close │ groups, train, answer, close │ ...

Every rank writes its answer into a file before it begins the next plan, so a plan that hangs or kills a rank takes no
other answer with it. Such a rank ends by itself after `TIMEOUT`; a rank whose plan fails ends, too, because its peers
may still wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import json
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vescale
from vescale_testing import RankFailure, keep_float64, run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))
families = importlib.import_module("families")
sys.path.pop(0)

__all__ = ["ROWS", "SGD", "Job", "arguments", "families", "run"]

STEPS, ROWS = 2, 8
TOLERANCE = 1e-10
TIMEOUT = 300.0  # seconds on a busy machine
BATCH = 20  # jobs of one start of ranks
STARTS = 5  # of ranks that do not meet: gloo may lose a connection on a busy machine
NO_CONNECTION = "Gloo connectFullMesh failed"
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Job:
    """A plan, and the name of the model that it trains."""

    model: str
    plan: vescale.Plan


def run(jobs: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """Yield how each job ends, one of the kinds of `executability`, and the reason; all have one number of ranks."""
    waiting, failures = list(jobs), 0
    while waiting:
        ended = _run_some(waiting[:BATCH])
        if not ended:  # the ranks have not met
            failures += 1
            ended = [("died", f"no process group in {failures} starts")] if failures == STARTS else []
        waiting = waiting[len(ended) :]
        yield from ended


def arguments(plan: vescale.Plan, model: Any) -> dict[str, Any]:
    """Return arguments of ``parallelize`` that the plan does not have: without a limit norms are measured alone."""
    inputs = {"example_inputs": _batch(model, 0)}
    return inputs if plan.clip_grad_norm is not None else {**inputs, "clip_grad_norm": 1e30}


def _run_some(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """Start ranks, and return the ends of jobs up to the first that fails."""
    world_size, failure = jobs[0].plan.world_size, ""
    with tempfile.TemporaryDirectory(prefix="executability-") as name:
        folder = Path(name)
        try:
            run_ranks(_serve, world_size, jobs, folder, timeout=TIMEOUT * len(jobs) + 60)
        except RankFailure as error:
            failure = str(error)
        ended: list[tuple[str, str]] = []
        for number, job in enumerate(jobs):
            answers = [path for rank in range(world_size) if (path := _answer(folder, number, rank)).exists()]
            found = [json.loads(path.read_text()) for path in sorted(answers, key=lambda path: path.stat().st_mtime_ns)]
            raised = [answer for answer in found if "kind" in answer]
            if not raised and len(found) == world_size:
                reference = _reference(job.model, job.plan.random_stream, job.plan.clip_grad_norm)
                ended.append(_compare(reference, found[0]))
                continue
            if any(NO_CONNECTION in answer["text"] for answer in raised) or (not found and NO_CONNECTION in failure):
                return ended
            if raised:
                ended.append((raised[0]["kind"], raised[0]["text"]))
                if world_size == 1:
                    continue
            else:
                stacks = "".join(path.read_text()[:2000] for path in sorted(folder.glob(f"stacks.{number}.*")))
                ended.append(("hang", stacks) if "Timeout" in stacks else ("died", failure[-3000:]))
            break
    return ended


def _answer(folder: Path, number: int, rank: int) -> Path:
    return folder / f"answer.{number}.{rank}"


def _stacks(folder: Path, number: int, rank: int) -> Path:
    return folder / f"stacks.{number}.{rank}"


# ----------------------------------------------------------------------------------------------------------- a rank


def _serve(jobs: Sequence[Job], folder: Path) -> None:
    """Run jobs on a rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, job in enumerate(jobs):
        vescale.dtensor.random.set_stream("torch")  # the plan before may have left another
        with _watched(_stacks(folder, number, rank)):
            if dist.is_initialized():
                dist.destroy_process_group()  # and all that were made in it
            if world_size > 1:
                _open_group(folder / f"store.{number}", rank, world_size)
            found = _train_by(job)
        written = _answer(folder, number, rank)
        part = written.with_name(f"{written.name}.part")
        part.write_text(json.dumps(found))
        part.rename(written)
        if "kind" in found and world_size > 1:
            raise RuntimeError(found["text"])  # the others do not wait for this rank any longer


@contextlib.contextmanager
def _watched(path: Path) -> Iterator[None]:
    """End the process, and write its stacks, if the body takes longer than `TIMEOUT`."""
    with path.open("w") as file:
        faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _open_group(store: Path, rank: int, world_size: int) -> None:
    """Make the default group; one process makes its own."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=2 * TIMEOUT),
    )


def _train_by(job: Job) -> dict[str, Any]:
    """Return losses and norms of a rank, or the kind of an error and its text."""
    plan = job.plan
    try:
        model = families.build(job.model)
        parallel, optimizer = vescale.parallelize(plan, model, SGD, **arguments(plan, model))

        def call(batch: dict[str, Any]) -> torch.Tensor:
            loss = parallel(**parallel.local_batch(batch)).loss
            return loss if plan.dp == 1 else _MeanOverRanks.apply(loss)

        return _train(model, call, optimizer)
    except Exception as error:
        ours = isinstance(error, ValueError | TypeError | RuntimeError) and "expected" in str(error)
        text = f"{type(error).__name__}: {error}"
        if not ours:
            return {"kind": "obscure", "text": text + traceback.format_exc()[-1500:]}
        return {"kind": "late" if dist.is_initialized() else "refused", "text": text}


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


# ------------------------------------------------------------------------------------------------------ one process


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
