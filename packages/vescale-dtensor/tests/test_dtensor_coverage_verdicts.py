"""The operator sweep sees what it is made to see: planted operators get the verdicts that they deserve."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

FOLDER = Path(__file__).resolve().parents[1] / "coverage"
sys.path.insert(0, str(FOLDER))
plan, report, samples, world = map(importlib.import_module, ("plan", "report", "samples", "world"))
sys.path.pop(0)


@dataclasses.dataclass
class Planted:
    """What a plan needs of an operator of torch's database."""

    name: str
    on_shards: Callable

    @property
    def full_name(self) -> str:
        return self.name

    def __call__(self, x):
        return self.on_shards(x) if isinstance(x, DTensor) else 2 * x


class Refusal(NotImplementedError):  # noqa: N818 - as those of the package
    __module__ = "vescale.planted"


def raise_on_one_rank(x):
    if dist.get_rank() == 1:
        raise ValueError("only here")
    return 2 * x


def raise_before_a_collective(x):
    return (2 * raise_on_one_rank(x)).redistribute(placements=[Replicate()] * x.device_mesh.ndim) / 2


def sleep_on_one_rank(x):
    if dist.get_rank() == 3:
        time.sleep(1000)
    return 2 * x


def die_on_one_rank(x):
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * x


def raise_on_all_ranks(_):
    raise ValueError("everywhere")


def refuse(_):
    raise Refusal("planted")


def replicated(x, value):
    return DTensor.from_local(value, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


PLANTED = {
    "right": (lambda x: 2 * x, "right"),
    "gathered": (lambda x: 2 * x.redistribute(placements=[Replicate()] * x.device_mesh.ndim), "right"),
    "value": (lambda x: 2 * x + 1e-6, "wrong"),
    "gradient": (lambda x: (2 * x).detach() + 0 * x, "wrong"),
    "no gradient": (lambda x: (2 * x).detach(), "wrong"),
    "dtype": (lambda x: (2 * x).float(), "wrong"),
    "shape": (lambda x: (2 * x).unsqueeze(0), "wrong"),
    "replicas": (lambda x: replicated(x, torch.full(x.shape, float(dist.get_rank()))).double(), "wrong"),
    "plain results": (lambda x: x.to_local(), "diverged"),
    "input written": (lambda x: (2 * x, x.detach().zero_())[0], "wrong"),
    "error on one rank": (raise_on_one_rank, "diverged"),
    "error before a collective": (raise_before_a_collective, "diverged"),
    "sleep on one rank": (sleep_on_one_rank, "diverged"),
    "death of one rank": (die_on_one_rank, "died"),
    "error on all ranks": (raise_on_all_ranks, "raised"),
    "refusal": (refuse, "refused"),
    "right after all that": (lambda x: 2 * x, "right"),
}


def planted_plan(name, on_shards):
    leaves, structure = samples.tree_flatten(((torch.arange(18.0, dtype=torch.float64).view(6, 3),), {}))
    sample = samples.Sample(tuple(leaves), structure, (0,), (True,), lambda result: result)
    cases = [plan.Case("0", "op", ("S0",)), plan.Case("0", "op", ("S1R",))]
    return plan.Plan(Planted(name, on_shards), {"0": sample}, cases)


@pytest.fixture(scope="module")
def tallies():
    plans = [planted_plan(name, on_shards) for name, (on_shards, _) in PLANTED.items()]
    made = {plan.name: report.Tally(plan) for plan in plans}
    for found in world.sweep(plans, workers=2, stock=False):
        made[found.plan.name].add(found)
    return made


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_operator_gets_its_verdict(tallies, name):
    expected = PLANTED[name][1]
    texts = [found.verdict.text for found in tallies[name].findings]
    assert tallies[name].counts[expected] == 2, (dict(tallies[name].counts), texts)


def test_gathering_is_told_from_staying_sharded(tallies):
    assert tallies["right"].state == "sharded"
    assert tallies["gathered"].state == "right"


def test_the_summary_counts_operators(tallies):
    line = report.summary(list(tallies.values()))
    assert line.startswith("17 operators: right 3 (sharded 2), refused 1, stopped by torch's own errors 1; ")
    assert "; 7 wrong, 4 diverged, 1 died (" in line
    assert "; 0 wrong, 0 diverged, 0 died (" in report.summary([tallies["right"], tallies["refusal"]])


STOCK = """
import sys; sys.path.insert(0, {folder!r})
import torch
from _torch import tree_flatten
from plan import Case, Plan
from samples import Sample
from world import sweep
class Write:
    name = full_name = "write"
    def __call__(self, x):
        y = x.clone()
        y[1].zero_()  # stock writes to a copy of the row
        return y
leaves, structure = tree_flatten(((torch.randn(8, 3, dtype=torch.float64),), {{}}))
sample = Sample(tuple(leaves), structure, (0,), (False,), lambda result: result)
cases = [Case("0", "op", ("R",)), Case("0", "op", ("S0",))]
print(*[found.verdict.kind for found in sweep([Plan(Write(), {{"0": sample}}, cases)], workers=1, stock=True)])
assert not any(name.startswith("vescale") for name in sys.modules)
"""


def test_stock_torch_is_seen_to_be_wrong():
    command = [sys.executable, "-c", STOCK.format(folder=str(FOLDER))]
    done = subprocess.run(command, text=True, capture_output=True, timeout=100, check=True)
    assert done.stdout.split() == ["right", "wrong"], done.stdout + done.stderr
