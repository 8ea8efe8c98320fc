"""Checkpoints beside those of torch's DCP: save, load, and load under another layout, of 0.5 and 2 GiB.

Four gloo ranks save and load the same tensors, in turns: replicated on all ranks, sharded over them by rows, and half
of each. The other layout is sharded by columns; what was replicated is sharded by rows there. Both flush their files to
disk. `vescale.ckpt` also compares replicas between ranks in a save, and checksums in a load. Times are wall-clock times
of rank 0: run this where nothing else runs. It takes 20 GiB of memory with the page cache, and 20 GiB of disk.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import Result, time_in_turns
from targets import Target, Targets
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale.ckpt import load, save
from vescale_testing import run_ranks

WORLD = 4
SHAPE = 2048, 2048  # 16 MiB
NUM_TENSORS = {"0.5 GiB": 32, "2 GiB": 128}
LAYOUTS = ("replicated", "sharded", "mixed")
STEPS = ("save", "load", "load, other layout")


def run(num_rounds: int) -> Result:
    """Measure on forked gloo ranks; the larger state is measured in a quarter of the rounds."""
    seconds: dict[str, list[float]] = {}
    reference: dict[str, str] = {}
    targets: list[Target] = []
    for (size, count), layout in itertools.product(NUM_TENSORS.items(), LAYOUTS):
        rounds = num_rounds if count == min(NUM_TENSORS.values()) else max(2, num_rounds // 4)
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(_on_a_rank, WORLD, Path(folder), layout, count, rounds, timeout=3000)[0]
        for step in STEPS:
            ours, theirs = (f"{size}, {layout}: {step}, {name}" for name in ("ours", "DCP"))
            seconds |= {theirs: found[step, "DCP"], ours: found[step, "ours"]}
            reference |= {theirs: theirs, ours: theirs}
            targets.append(Target(ours, theirs, at_most=0.8))
    gigabytes = {
        case: f"{NUM_TENSORS[case.partition(',')[0]] * 2**24 / 1e9 / statistics.median(own):.2f}"
        for case, own in seconds.items()
    }
    title = f"Checkpoints of {WORLD} gloo ranks on a local disk, tensors of 16 MiB"
    return Targets(title, "DCP", seconds, reference, tuple(targets), {"GB/s": gigabytes})


def _on_a_rank(folder: Path, layout: str, count: int, num_rounds: int) -> dict[tuple[str, str], list[float]]:
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (WORLD,))
    saved, same, other = _state(layout, count, mesh), _empty(layout, count, mesh, 0), _empty(layout, count, mesh, 1)
    numbers = {"ours": itertools.count(), "DCP": itertools.count()}
    latest: dict[str, Path] = {}

    def saves(name: str, write: Callable[[dict, Path], object]) -> Callable[[], None]:
        def run_once() -> None:
            latest[name] = folder / f"{name}-{next(numbers[name])}"
            write(saved, latest[name])

        return run_once

    def remove_earlier() -> None:
        if dist.get_rank() == 0:
            for path in set(folder.iterdir()) - set(latest.values()):
                shutil.rmtree(path)

    cases: dict[object, Callable[[], object]] = {
        ("save", "DCP"): saves("DCP", lambda state, path: dcp.save(state, checkpoint_id=path)),
        ("save", "ours"): saves("ours", lambda state, path: save(path, state)),
        ("load", "DCP"): lambda: dcp.load(same, checkpoint_id=latest["DCP"]),
        ("load", "ours"): lambda: load(latest["ours"], same),
        ("load, other layout", "DCP"): lambda: dcp.load(other, checkpoint_id=latest["DCP"]),
        ("load, other layout", "ours"): lambda: load(latest["ours"], other),
        "remove": remove_earlier,
    }
    _check(cases, same, other)
    return time_in_turns(cases, num_rounds=num_rounds, num_warmup=1)


def _check(cases: dict, same: dict, other: dict) -> None:
    """Check that every load fills its state with the values of tensor i: all of them i + column."""
    for (step, *name), case in ((key, case) for key, case in cases.items() if isinstance(key, tuple)):
        case()
        if step == "save":
            continue
        state = same if step == "load" else other
        for i, tensor in enumerate(state.values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, _value(i)), (step, name, i)
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


def _value(number: int) -> torch.Tensor:
    return torch.arange(float(SHAPE[1])).add(number).repeat(SHAPE[0], 1)


def _is_sharded(layout: str, number: int) -> bool:
    return layout == "sharded" or (layout == "mixed" and number % 2 == 1)


def _state(layout: str, count: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {
        f"w{i}": distribute_tensor(_value(i), mesh, [Shard(0)]) if _is_sharded(layout, i) else _value(i)
        for i in range(count)
    }


def _empty(layout: str, count: int, mesh: DeviceMesh, other: int) -> dict[str, torch.Tensor]:
    """Return zeros in the layout of the saved state, or in the other one."""

    def zeros(number: int) -> torch.Tensor:
        is_sharded = _is_sharded(layout, number)
        if not (is_sharded or other):
            return torch.zeros(SHAPE)
        return distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(int(is_sharded and other))])

    return {f"w{i}": zeros(i) for i in range(count)}
