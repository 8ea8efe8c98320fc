"""A random operator on a sharded DTensor: what it costs to draw the values that one device would draw.

On the CPU the stock generator is sequential. A rank that holds half of a tensor draws the other half, too, and drops
it; stock DTensor draws only its own half, with values that depend on the layout. One device is the bound to reach.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from measure import Result, time_in_turns

from vescale.dtensor import Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import run_ranks

ROWS, COLUMNS = 1024, 1024
ONE = "one device"


def run(num_rounds: int) -> Result:
    """Measure on two forked gloo processes."""
    seconds = run_ranks(_on_each_rank, 2, num_rounds, timeout=600)[0]
    return Result(f"bernoulli_(0.9) on {ROWS} x {COLUMNS} float32 elements, 2 ranks", ONE, seconds)


def _on_each_rank(num_rounds: int) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = torch.empty(ROWS, COLUMNS)
    rows, columns, replica = (distribute_tensor(plain, mesh, [p]) for p in (Shard(0), Shard(1), Replicate()))
    _check_equal_to_one_device(rows, columns, replica)

    def draw_as_stock() -> None:
        with disabled("random"):
            rows.bernoulli_(0.9)

    cases = {
        ONE: (lambda: plain.bernoulli_(0.9)) if dist.get_rank() == 0 else lambda: None,
        "vescale, Shard(0)": lambda: rows.bernoulli_(0.9),
        "vescale, Shard(1)": lambda: columns.bernoulli_(0.9),
        "vescale, Replicate": lambda: replica.bernoulli_(0.9),
        "stock torch, Shard(0)": draw_as_stock,
    }
    return time_in_turns(cases, num_rounds=num_rounds)


def _check_equal_to_one_device(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        torch.manual_seed(0)
        drawn = tensor.bernoulli_(0.9).full_tensor()
        torch.manual_seed(0)
        if not torch.equal(drawn, torch.empty(ROWS, COLUMNS).bernoulli_(0.9)):
            raise RuntimeError(f"{tensor.placements}: the draw is not the one of one device")
