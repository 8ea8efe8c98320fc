"""What a random operator on a shard costs on the CPU, next to drawing the whole tensor and slicing it.

A rank has to walk the draw of the global tensor; the bound to reach is one plain draw of that tensor and a copy of the
slice. That is the baseline here, dispatched through DTensor as our rule is ("global draw + slice"), so that the ratio
is about the rule and not about DTensor. Scratch is the memory that a call allocates beside its results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from measure import time_in_turns
from torch import Tensor

from vescale.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from vescale.dtensor._torch import dispatch as ours
from vescale_testing import run_ranks

SIZES = (64, 256, 1024, 2048)
aten = torch.ops.aten

DRAWS: dict[str, Callable[[Tensor], object]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "F.dropout": lambda x: F.dropout(x, 0.1),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
}
OPERATORS = {
    "uniform_": aten.uniform_.default,
    "normal_": aten.normal_.default,
    "F.dropout": aten.bernoulli_.float,
    "native_dropout": aten.native_dropout.default,
}


@dataclass(frozen=True)
class Comparison:
    """One operator on one shard: seconds of every round for the baseline and for our rule, and our scratch."""

    size: int
    name: str
    dim: int
    baseline: list[float]
    rule: list[float]
    scratch_bytes: int

    def row(self) -> str:
        """Return a row of the table."""
        reference, median = statistics.median(self.baseline), statistics.median(self.rule)
        times = f"{1e6 * reference:.1f} | {1e6 * median:.1f} | {median / reference:.2f}"
        return f"| {self.size} x {self.size} | {self.name} | {self.dim} | {times} | {self.scratch_bytes / 2**10:.0f} |"


@dataclass(frozen=True)
class Comparisons:
    """All of them, printed as one table."""

    title: str
    rows: list[Comparison]

    def table(self) -> str:
        """Return a markdown table of medians."""
        head = "| tensor | operator | sharded dim | global draw + slice, us | vescale, us | ratio | scratch, KiB |"
        return "\n".join([head, "|---|---|---:|---:|---:|---:|---:|", *(row.row() for row in self.rows)])


def run(num_rounds: int) -> Comparisons:
    """Measure on two forked gloo processes."""
    rows = run_ranks(_on_each_rank, 2, num_rounds, timeout=600)[0]
    return Comparisons("random operators on shards of float32 tensors, 2 ranks, microseconds a call", rows)


def _on_each_rank(num_rounds: int) -> list[Comparison]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return [
        _compare(name, distribute_tensor(torch.rand(size, size), mesh, [Shard(dim)]), dim, num_rounds)
        for size in SIZES
        for dim in (0, 1)
        for name in DRAWS
    ]


def _compare(name: str, x: DTensor, dim: int, num_rounds: int) -> Comparison:
    draw, repeats = DRAWS[name], max(1, 2**19 // x.numel())
    _check_equal_to_one_device(draw, x)
    cases = {
        "baseline": lambda: _with_handler(OPERATORS[name], _draw_and_slice(OPERATORS[name], x, dim), draw, x, repeats),
        "rule": lambda: _repeat(draw, x, repeats),
    }
    seconds = {
        case: [t / repeats for t in times] for case, times in time_in_turns(cases, num_rounds=num_rounds).items()
    }
    return Comparison(x.shape[0], name, dim, seconds["baseline"], seconds["rule"], _scratch_bytes(draw, x))


def _check_equal_to_one_device(draw: Callable[[Tensor], object], x: DTensor) -> None:
    plain = x.full_tensor()
    torch.manual_seed(0)
    sharded = draw(x)
    torch.manual_seed(0)
    expected = draw(plain)
    sharded, expected = (value[0] if isinstance(value, tuple) else value for value in (sharded, expected))
    if not torch.equal(sharded.full_tensor(), expected):
        raise RuntimeError(f"{x.placements}: the draw is not the one of one device")


def _repeat(draw: Callable[[Tensor], object], x: DTensor, repeats: int) -> None:
    for _ in range(repeats):
        draw(x)


def _with_handler(
    op: ours.Op, handler: ours.Handler, draw: Callable[[Tensor], object], x: DTensor, repeats: int
) -> None:
    table = ours.handler_table()
    saved, table[op] = table[op], handler
    try:
        _repeat(draw, x, repeats)
    finally:
        table[op] = saved


def _draw_and_slice(handled: ours.Op, x: DTensor, dim: int) -> ours.Handler:
    """Return the simplest handler that is right: draw everything, keep a slice."""
    mesh, placements, index = x.device_mesh, x.placements, x.device_mesh.get_local_rank()
    spec = ours.spec(x)
    mask_spec = ours.spec_like(spec, placements, torch.empty(x.shape, dtype=torch.bool, device="meta"))
    half = x.shape[dim] // mesh.size()
    is_dropout = handled is aten.native_dropout.default

    def handler(op: ours.Op, args: tuple, kwargs: dict) -> object:
        local = ours.local_tensor(args[0])
        whole = torch.zeros(x.shape) if is_dropout else torch.empty(x.shape)
        drawn = op(whole, *args[1:], **kwargs)
        if isinstance(drawn, Tensor):
            local.copy_(drawn.narrow(dim, index * half, half))
            return args[0]
        mask = drawn[1].narrow(dim, index * half, half).contiguous()
        out = local * mask * (1 / (1 - args[1]))
        return ours.from_spec(out, spec), ours.from_spec(mask, mask_spec)

    return handler


def _scratch_bytes(draw: Callable[[Tensor], object], x: DTensor) -> int:
    """Return the largest buffer that a call allocates for elements that it may not keep."""
    sizes = [0]

    def spy(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: object, **kwargs: object) -> Tensor:
            made = allocate(*args, **kwargs)
            sizes.append(made.numel() * made.element_size())
            return made

        return allocated

    with mock.patch.object(Tensor, "new_empty", spy(Tensor.new_empty)), mock.patch("torch.empty", spy(torch.empty)):
        draw(x)
    return max(sizes)
