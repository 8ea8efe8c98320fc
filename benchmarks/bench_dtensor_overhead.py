"""What the rules of `vescale.dtensor` cost in eager mode: a transformer block of DTensors with and without them.

One process of four, on a fake process group: collectives return at once, so what is timed is the work of one rank's
Python and C++ per operator. The block is small for the same reason. It is written for stock DTensor: attention as
matmul and softmax, no dropout (what exact random numbers cost is measured by `random`).

Every case runs the same block forward and backward, with the same collectives; only the rules in force differ. The
ratio is to stock torch with the same parallelism in the same run, and should be at most 1.05. Times are processor time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from measure import Result
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    debug,
    disabled,
    distribute_tensor,
    init_device_mesh,
    strict,
)

WORLD, BATCH, LENGTH, HIDDEN, HEADS = 4, 2, 32, 128, 8
STEPS = 4  # in a round

# parameters that are sharded, and along which dim
SHARDED = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}


class Block(nn.Module):
    """A GPT block on DTensors whose activations between its parts are `between`: replicated, or cut along the length.

    Attributes:
        between: placement of the activations, (batch, length, hidden).
    """

    def __init__(self, mesh: DeviceMesh, between: Shard | Replicate):
        super().__init__()
        self.between = [between]
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        for name, module in self.named_children():
            for key, parameter in list(module.named_parameters()):
                placement = _placement(name, key)
                setattr(module, key, nn.Parameter(distribute_tensor(parameter.data, mesh, [placement])))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self._mlp(self.norm2(x))

    def _attention(self, x: Tensor) -> Tensor:
        whole = x.redistribute(placements=[Replicate()])
        q, k, v = (f(whole).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(HIDDEN // HEADS)).softmax(-1)
        mixed = (scores @ v).transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN)
        return self.out(mixed).redistribute(placements=self.between)

    def _mlp(self, x: Tensor) -> Tensor:
        whole = x.redistribute(placements=[Replicate()])
        return self.down(F.gelu(self.up(whole))).redistribute(placements=self.between)


def _placement(module: str, key: str) -> Shard | Replicate:
    if module not in SHARDED or (SHARDED[module] == 1 and key == "bias"):
        return Replicate()
    return Shard(SHARDED[module])


@dataclass(frozen=True)
class Overheads(Result):
    """Times whose ratio is to the stock case of the same group.

    Attributes:
        stock: for every case, the one that counts as 1.
    """

    stock: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """Return a markdown table: median, the middle half of all rounds, and the ratio of medians to stock torch."""
        lines = ["| case | median, ms | middle half, ms | ratio to stock |", "|---|---:|---:|---:|"]
        for case, seconds in self.seconds.items():
            low, median, high = statistics.quantiles(seconds, n=4)
            ratio = median / statistics.median(self.seconds[self.stock[case]])
            lines.append(f"| {case} | {1e3 * median:.2f} | {1e3 * low:.2f} to {1e3 * high:.2f} | {ratio:.3f} |")
        return "\n".join(lines)


def run(num_rounds: int) -> Result:
    """Measure in this process, on a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        cases: dict[str, Callable[[], None]] = {}
        stock: dict[str, str] = {}
        for parallelism, between in (("tensor parallel", Replicate()), ("with sequence parallel", Shard(1))):
            step = _step(mesh, between)
            _check_same_communication(step)
            for rules, context in _contexts().items():
                cases[f"{parallelism}, {rules}"] = _in(context, step)
                stock[f"{parallelism}, {rules}"] = f"{parallelism}, stock torch"
        seconds = _time_in_turns(cases, num_rounds)
    finally:
        dist.destroy_process_group()
    shape = f"{BATCH} x {LENGTH} x {HIDDEN}, {HEADS} heads, tp {WORLD}"
    title = f"{STEPS} times a block of DTensors forward and backward, {shape}"
    return Overheads(title, "tensor parallel, stock torch", seconds, stock)


def _time_in_turns(cases: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, list[float]]:
    """Run all cases once per round and return the processor time of each, without a first round that fills caches.

    Nothing waits for another process here, so processor time is all there is, and other programs change it least.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(num_rounds + 1):
        for name, case in cases.items():
            start = time.process_time()
            case()
            if round_:
                seconds[name].append(time.process_time() - start)
    return seconds


def _contexts() -> dict[str, Callable[[], AbstractContextManager]]:
    return {
        "stock torch": disabled,
        "vescale": contextlib.nullcontext,
        "vescale in strict()": strict,
        "vescale in comm_log()": debug.comm_log,
    }


def _step(mesh: DeviceMesh, between: Shard | Replicate) -> Callable[[], None]:
    torch.manual_seed(0)
    block = Block(mesh, between)
    x = distribute_tensor(torch.randn(BATCH, LENGTH, HIDDEN), mesh, [between]).requires_grad_()
    gradient = DTensor.from_local(torch.ones_like(x.to_local()), mesh, [between])

    def step() -> None:
        block.zero_grad()
        block(x).backward(gradient)

    return step


def _check_same_communication(step: Callable[[], None]) -> None:
    """Stop where the rules change what a step communicates; values mean nothing on a fake process group."""

    def collectives() -> list[tuple]:
        with debug.comm_log() as log:
            step()
        return [(r.operator, r.shape, r.phase, r.cause) for r in log]

    with disabled():
        stock = collectives()
    if not stock or collectives() != stock:
        raise RuntimeError(f"the rules change what the block communicates, which is {stock} in stock torch")


def _in(context: Callable[[], AbstractContextManager], step: Callable[[], None]) -> Callable[[], None]:
    def case() -> None:
        with context():
            for _ in range(STEPS):
                step()

    return case
