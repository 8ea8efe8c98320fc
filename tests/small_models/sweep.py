"""Train small models on data-parallel ranks, and compare each with one process.

    python tests/small_models/sweep.py                                       # every model in every case
    python tests/small_models/sweep.py --models drop_path queue --cases "ddp 2"

    ddp 2, ddp 3    `vescale.optim.DDP`, without a plan
    plan eager      data-parallel ranks of a module with a plan over two tensor-parallel ranks
    plan static

Every model runs with and without statistics of rows behind its layer. After three steps losses, parameters, buffers and
the random state are those of one process. A model is right, is refused (an error before the step ends) or wrong; ranks
may hang or die. The ranks of a case train all models one after the other.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from small import CASES as MODELS
from small import TOKENS, WIDTH, Case

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, init_device_mesh
from vescale.optim import DDP
from vescale_testing import RankFailure, gather_full, run_ranks

for name in ("draws", "losses", "statistics_of_rows", "layers", "backward"):
    importlib.import_module(name)

__all__ = ["CASES", "MODELS", "main", "run"]

#: Data-parallel ranks, tensor-parallel ranks, mode.
CASES = {
    "ddp 2": (2, 1, ""),
    "ddp 3": (3, 1, ""),
    "plan eager": (2, 2, "eager"),
    "plan static": (2, 2, "static"),
}
STEPS, ROWS = 3, 4  # rows of a rank
TOLERANCE = 1e-10
Found = tuple[str, str]  # the kind, and the error


def run(case: str, names: Sequence[str] = (), *, timeout: float = 600.0) -> dict[str, Found]:
    """Return what models do in a case, by their names; with statistics of rows as "NAME, norm"."""
    num_ranks, degree, _ = CASES[case]
    found = run_ranks(_train_all, num_ranks * degree, case, list(names or MODELS), timeout=timeout)
    return {name: max(each[name] for each in found) for name in found[0]}


def _train_all(case: str, names: Sequence[str]) -> dict[str, Found]:
    size, degree, mode = CASES[case]
    mesh = init_device_mesh("cpu", (size, degree), mesh_dim_names=("dp", "tp"))
    found = {}
    for name in names:
        for mixes_rows in (False, True):
            key = f"{name}, norm" if mixes_rows else name
            found[key] = _compared(MODELS[name], mesh, mode, mixes_rows=mixes_rows)
    return found


def _compared(case: Case, mesh: dist.DeviceMesh, mode: str, *, mixes_rows: bool) -> Found:
    dp = mesh["dp"]
    batches = list(_batches(dp.size() * ROWS))
    expected = _trained(case.build(mixes_rows=mixes_rows), batches)
    first = dp.get_local_rank() * ROWS
    try:
        model = case.build(mixes_rows=mixes_rows)
        if mode:
            plan = {"parameter": {r".*": {"tp": Replicate()}}}
            model = parallelize_module(model, mesh["tp"], plan, mode=mode, allow_implicit=True)
        found = _trained(model, [batch[first : first + ROWS] for batch in batches], DDP(model, dp))
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}"
    dist.all_reduce(found["losses"], group=dp.get_group())
    found["losses"] /= dp.size()
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        if not difference < TOLERANCE:
            return "wrong", f"{name} differs by {difference:.2g}"
    return "right", ""


def _batches(num_rows: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield torch.randn(num_rows, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def _trained(model: nn.Module, batches: Sequence[Tensor], call: Callable[[Tensor], Tensor] | None = None) -> dict:
    """Return losses, parameters, buffers and the random state after some steps of gradient descent."""
    torch.manual_seed(1)
    random.seed(3)
    np.random.seed(3)
    losses = []
    for batch in batches:
        loss = (call or model)(batch)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.05 * parameter.grad)
                    parameter.grad = None
        losses.append(gather_full(loss.detach()))
    named = [*model.named_parameters(), *model.named_buffers()]
    values = {name: gather_full(value.detach()).double() for name, value in named}
    return values | {"losses": torch.stack(losses), "the random state": torch.get_rng_state().double()}


def main(arguments: Sequence[str] | None = None, tell: Callable[[str], object] = print) -> int:
    """Run the sweep; return 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[], help="parts of names")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    given = parser.parse_args(arguments)
    names = [name for name in MODELS if not given.models or any(part in name for part in given.models)]
    is_bad = False
    for case in given.cases:
        try:
            found = run(case, names)
        except RankFailure as error:
            tell(f"{case}: {error}")
            is_bad = True
            continue
        for name, (kind, text) in found.items():
            if kind != "right":
                tell(f"{name}, {case}: {kind}: {text}")
        counts = collections.Counter(kind for kind, _ in found.values())
        tell(f"{case}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "wrong")))
        is_bad |= bool(counts["wrong"])
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
