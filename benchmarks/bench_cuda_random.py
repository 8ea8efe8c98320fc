"""Random operators on shards of a CUDA tensor: what it costs to draw the values that one device would draw.

A row shard is replayed in windows by the stock kernels, so it should cost little more than the stock kernel on as many
elements (at most 1.5 times). A column shard meets every window and costs the whole draw, in bounded memory. One process
takes the part of one rank of eight; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import Result, time_in_turns

from vescale.dtensor._random.cuda_replay import replay_fill, replay_native_dropout

NUM_RANKS, RANK = 8, 3
SHAPE = (8192, 12_289)  # rows that are no multiple of a window
ROWS = ((RANK * SHAPE[0] // NUM_RANKS, 0), (SHAPE[0] // NUM_RANKS, SHAPE[1]))
COLUMNS = ((0, RANK * 1536), (SHAPE[0], 1536))
CALLS = 10
ONE = "normal_, stock, as many elements"
aten = torch.ops.aten


class _Skipped(Result):
    """What a machine without a CUDA device measures."""

    def table(self) -> str:
        return "skipped: needs a CUDA device"


def run(num_rounds: int) -> Result:
    """Measure on the current CUDA device; without one, return a result that says so."""
    title = f"normal_ and native_dropout on {SHAPE[0]} x {SHAPE[1]} float32 elements on CUDA, one rank of {NUM_RANKS}"
    if not torch.cuda.is_available():
        return _Skipped(title, ONE, {})
    torch.cuda.init()
    cases = _fills() | _dropouts()
    return Result(title, ONE, time_in_turns({name: _timed(f) for name, f in cases.items()}, num_rounds=num_rounds))


def _timed(draw: Callable[[], object]) -> Callable[[], None]:
    def case() -> None:
        for _ in range(CALLS):
            draw()
        torch.cuda.synchronize()

    return case


def _fills() -> dict[str, Callable[[], object]]:
    rows, columns = (torch.empty(box[1], device="cuda") for box in (ROWS, COLUMNS))
    _check_fills(rows, columns)
    return {
        ONE: lambda: rows.normal_(),
        "normal_, row shard": lambda: _fill(ROWS, rows),
        "normal_, column shard": lambda: _fill(COLUMNS, columns),
        "normal_, whole tensor, sliced": lambda: rows.copy_(_part(torch.empty(SHAPE, device="cuda").normal_(), ROWS)),
    }


def _dropouts() -> dict[str, Callable[[], object]]:
    x = torch.randn(ROWS[1], device="cuda")
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    return {
        "dropout, stock, as many elements": lambda: aten.native_dropout(x, 0.1, True),
        "dropout, row shard": lambda: _dropout(x, out, mask),
    }


def _fill(box: tuple, local: torch.Tensor) -> None:
    done = replay_fill(aten.normal_.default, [(box, local)], shape=SHAPE, dtype=local.dtype, device=local.device)
    if not done:
        raise RuntimeError("the draw was not replayed: see the warning above, or take a larger tensor")


def _dropout(x: torch.Tensor, out: torch.Tensor, mask: torch.Tensor) -> None:
    if not replay_native_dropout(x, out, mask, lambda tensor: [(ROWS, tensor)], shape=SHAPE, p=0.1):
        raise RuntimeError("the draw was not replayed: see the warning above, or take a larger tensor")


def _part(whole: torch.Tensor, box: tuple) -> torch.Tensor:
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]


def _check_fills(rows: torch.Tensor, columns: torch.Tensor) -> None:
    torch.manual_seed(0)
    whole = torch.empty(SHAPE, device="cuda").normal_()
    for box, local in ((ROWS, rows), (COLUMNS, columns)):
        torch.manual_seed(0)
        _fill(box, local)
        if not torch.equal(local, _part(whole, box)):
            raise RuntimeError(f"the shard {box} is not that of one device")
