"""Write which combinations of feature, mode, ZeRO stage and pipeline run, and how the others are refused.

    python tools/support_matrix.py docs/support.md

Every combination is tried on four ranks with a small model: construction, one step of training, one update. Compile
mode is constructed only, as a compiler takes longer than everything else. A refusal is an exception of ours; its text
is on the page, so the page cannot promise what the code refuses.
"""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

WORLD_SIZE = 4
MODES = ("eager", "static", "compile")
STAGES = (0, 1, 2, 3)
PIPELINES = (1, 2)


class Net(nn.Module):
    """Three layers, the middle one sharded over tp; ``extra`` is what a feature adds after the first."""

    def __init__(self, extra: Callable[[], nn.Module] = nn.Identity):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), extra())
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of eight values for rows of eight values."""
        return self.last(self.down(self.up(self.first(x)).relu()))


def tied_in_a_stage() -> nn.Module:
    """Return a model with one weight in two layers, which a pipeline leaves on one stage."""
    model = Net(functools.partial(nn.Linear, 8, 8))
    model.first[1].weight = model.first[0].weight
    return model


def tied_across_stages() -> nn.Module:
    """Return a model with one weight in the first and the last layer."""
    model = Net()
    model.last.weight = model.first[0].weight
    return model


def frozen() -> nn.Module:
    """Return a model of which one layer is not trained."""
    model = Net()
    model.up.requires_grad_(False)
    return model


@dataclass(frozen=True)
class Feature:
    """A row of the page: how the model is made, and what else is asked for."""

    build: Callable[[], nn.Module] = Net
    deferred: bool = False
    num_microbatches: int = 1
    optimizer: str = "AdamW"
    clip_grad_norm: float | None = None


FEATURES = {
    "linear layers": Feature(),
    "deferred initialization": Feature(deferred=True),
    "dropout": Feature(functools.partial(Net, functools.partial(nn.Dropout, 0.1))),
    "BatchNorm": Feature(functools.partial(Net, functools.partial(nn.BatchNorm1d, 8))),
    "weights tied in a stage": Feature(tied_in_a_stage),
    "weights tied between first and last layer": Feature(tied_across_stages),
    "frozen weights": Feature(frozen),
    "gradient clipping": Feature(clip_grad_norm=1.0),
    "two micro-batches": Feature(num_microbatches=2),
    "dropout with two micro-batches": Feature(
        functools.partial(Net, functools.partial(nn.Dropout, 0.1)), num_microbatches=2
    ),
    "an optimizer that is not element-wise (LBFGS)": Feature(optimizer="LBFGS"),
}

Key = tuple[str, str, int, int]
Results = dict[Key, str]
"""Feature, mode, length of pp, ZeRO stage -> the refusal, "" where it runs."""


def try_all(features: Iterable[str]) -> Results:
    """Try every combination on the ranks of this process group; every rank returns the same."""
    from torch.distributed.tensor import Replicate, Shard

    import vescale

    plan = {
        "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
        "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [{"tp": Replicate()}]},
    }
    shapes = {1: (1, 2, 2), 2: (2, 2, 1)}
    names = ("pp", "dp", "tp")
    meshes = {pp: vescale.dtensor.init_device_mesh("cpu", shape, mesh_dim_names=names) for pp, shape in shapes.items()}
    results: Results = {}
    for name, mode, pp, zero in itertools.product(features, MODES, PIPELINES, STAGES):
        _, dp, tp = shapes[pp]
        try:
            choice = vescale.Plan(
                dp=dp,
                tp=tp,
                pp=pp,
                zero=zero,
                mode=mode,
                split=("up",) if pp > 1 else "uniform",
                num_microbatches=max(pp, FEATURES[name].num_microbatches),
            )
            _try(FEATURES[name], choice, plan if tp > 1 else {}, meshes[pp])
            # compile mode runs the static program, so it refuses what that refuses
            results[name, mode, pp, zero] = results[name, "static", pp, zero] if mode == "compile" else ""
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            results[name, mode, pp, zero] = f"{type(error).__name__}: {first_sentence(str(error))}"
        torch.distributed.barrier()
    return results


def find_all() -> list[Results]:
    """Return what each rank finds. Each feature has new processes, as engines leave process groups behind."""
    from vescale_testing import run_ranks

    by_rank: list[Results] = [{} for _ in range(WORLD_SIZE)]
    for name in FEATURES:
        for results, found in zip(by_rank, run_ranks(try_all, WORLD_SIZE, [name], timeout=300), strict=True):
            results |= found
    return by_rank


def _try(feature: Feature, plan: object, module_plan: dict, mesh: object) -> None:
    import vescale

    torch.manual_seed(0)
    model = vescale.deferred_init(feature.build) if feature.deferred else feature.build()
    optimizer_class = functools.partial(getattr(torch.optim, feature.optimizer), lr=0.1)
    model, optimizer = vescale.parallelize(
        plan,
        model,
        optimizer_class,
        clip_grad_norm=feature.clip_grad_norm,
        loss_fn=nn.functional.mse_loss,
        module_plan=module_plan,
        mesh=mesh,
    )
    if plan.mode == "compile":
        return
    x = torch.arange(64.0).view(8, 8) / 64
    model(**model.local_batch({"x": x, "target": x})).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def first_sentence(text: str) -> str:
    """Return the first line of an error text up to its first full stop; with the last line after a colon.

    >>> first_sentence("stage 1 failed: \\nTraceback\\nValueError: no; try yes. More")
    'stage 1 failed: ValueError: no; try yes'
    """
    first, *more = [line.strip() for line in text.strip().splitlines()]
    if first.endswith(":") and more:
        first = f"{first} {more[-1]}"
    return re.split(r"(?<=[a-z)])\.(?:\s|$)", first)[0].strip()


def page(results: Results) -> str:
    """Return docs/support.md for the results."""
    reasons = list(dict.fromkeys(reason for reason in results.values() if reason))
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    columns = list(itertools.product(PIPELINES, MODES))
    titles = [mode if pp == 1 else f"pipeline, {mode}" for pp, mode in columns]
    rows = [["feature", *titles]]
    rows += [[name, *(_cell(results, name, mode, pp, numbers) for pp, mode in columns)] for name in FEATURES]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    notes = [f"{number}. `{reason}`" for reason, number in numbers.items()]
    return "\n".join([HEAD, *lines, "", "## Refusals", "", *notes, ""])


def _cell(results: Results, name: str, mode: str, pp: int, numbers: dict[str, int]) -> str:
    here = {zero: results[name, mode, pp, zero] for zero in STAGES}
    runs = " ".join(str(zero) for zero, reason in here.items() if not reason)
    refused = _unique(numbers[reason] for reason in here.values() if reason)
    return " ".join(filter(None, [runs, *(f"[{number}]" for number in refused)]))


def _unique(values: Iterable[int]) -> list[int]:
    return sorted(set(values))


HEAD = """# What runs together

Each cell lists the ZeRO stages with which a feature trains in a mode, without a pipeline or in one of two stages. A
number in brackets is a refusal: an error before anything is computed differently. Without a pipeline the model is
sharded over `dp` and `tp`, in one over `pp` and `dp`; a pipeline has two micro-batches. Eager and static mode run a
step and an update. Compile mode is constructed; what static mode refuses, it refuses too. Modes differ where `tp` is
more than one: [test_training_is_that_of_one_process](../tests/dp_tp_pp/test_dp_tp_pp_modes.py) has pipelines over all
three axes.

`python tools/support_matrix.py docs/support.md` tries all of it and writes this page, and a test compares them.
"""


def main(path: str) -> None:
    """Write the page to ``path``."""
    Path(path).write_text(page(find_all()[0]), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/support_matrix.py PAGE.md")
    main(sys.argv[1])
