"""What it costs that ranks compare what must be equal on all of them, in parts of a training step.

Two gloo ranks, one thread each. Data parallelism compares in every step, on an all-reduce that runs anyway, so what is
measured is the host's work alone: a case does it 100 times, and 0.5 of a step means 0.5%. Tensor parallelism compares
inputs and generator by a collective in every 100th call, so one comparison that takes half a step means 0.5%, too. In
eager mode on the CPU it also compares shapes in every call, by a collective of its own: 100 of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Result, time_in_turns
from targets import Target, Targets
from torch import Tensor, nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import run_ranks

HIDDEN, NUM_BLOCKS, ROWS = 512, 4, 256
PLAN = {
    "parameter": {r"\d+\.up\.weight": {"tp": Shard(0)}, r"\d+\.down\.weight": {"tp": Shard(1)}},
    "forward": {r"\d+\.up\.input": [[Replicate()]], r"\d+\.down\.output": [[Replicate()]]},
}
STEP = "step of data parallelism", "step of tensor parallelism", "the same, eager"
COMPARE = "100 times what it compares", "one comparison, of 100 steps", "100 comparisons of shapes"


class Block(nn.Module):
    """A feed-forward with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def run(num_rounds: int) -> Result:
    """Measure on two ranks; the times are those of rank 0."""
    seconds = run_ranks(_on_a_rank, 2, num_rounds, timeout=1500)[0]
    reference = dict(zip([*STEP, *COMPARE], [*STEP] * 2, strict=True))
    targets = tuple(Target(name, of, at_most=0.5) for name, of in zip(COMPARE, STEP, strict=True))
    return Targets("What comparisons of ranks cost", "the step", seconds, reference, targets)


def _on_a_rank(num_rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))
    data = DDP(_model(), mesh["tp"], zero=2)
    data_step = _step(data, x)
    tensor = parallelize_module(_model(), mesh["tp"], PLAN, mode="static")
    tensor_step = _step(tensor, x)
    checks = vars(tensor)["_vescale_execution"].checks

    data._calls._most_pending = 10**9  # its calls without a backward are no reason to meet

    def compare_data() -> None:
        for _ in range(100):
            data._calls.enter(data.module, (x,), {})
            data._calls.leave(data.module, (x,), None)
            data._reducer.checks.pair(data._reducer.checks.facts())

    def compare_tensor() -> None:
        checks.turns._num_calls = 0  # due
        checks.later_call((x,), {}, draws=True)

    eager = parallelize_module(_model(), mesh["tp"], PLAN, mode="eager")
    eager_step, eager_checks = _step(eager, x), vars(eager)["_vescale_execution"].checks

    def compare_eager() -> None:
        for _ in range(100):
            eager_checks.enter(eager, (x,), {})
            eager_checks.leave(None)

    eager_checks.enter(eager, (x,), {})  # the first call with these shapes reads values, too
    eager_checks.leave(None)
    steps, comparisons = (data_step, tensor_step, eager_step), (compare_data, compare_tensor, compare_eager)
    cases = dict(zip([*STEP, *COMPARE], [*steps, *comparisons], strict=True))
    return time_in_turns(cases, num_rounds=num_rounds)


def _model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def _step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
