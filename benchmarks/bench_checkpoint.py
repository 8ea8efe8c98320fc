"""Checkpoints beside those of torch's DCP: save, load, and load under another layout, of 0.5 and 2 GiB.

Four gloo ranks save and load the same tensors, in turns: replicated on all ranks, sharded over them by rows, and half
of each. The other layout is sharded by columns; what was replicated is sharded by rows there. Both flush their files to
disk. Who goes first changes from round to round. `vescale.ckpt` also compares replicas between ranks in a save, and
checksums in a load; "unchecked" is without the first. Of asynchronous saves, what counts is the time for which training
stops; DCP has a process group of its own for them. Times are wall-clock times of rank 0: run this where nothing else
runs. It takes 14 GiB of memory and 20 GiB of disk. CRC-32 is that of zlib-ng if it is installed (`pip install vescale-
ckpt[fast]`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
import time
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

from vescale.ckpt import load, save, wait
from vescale_testing import run_ranks

WORLD = 4
SHAPE = 2048, 2048  # 16 MiB
NUM_TENSORS = {"0.5 GiB": 32, "2 GiB": 128}
LAYOUTS = ("replicated", "sharded", "mixed")
#: step -> the most that ours may take of DCP's time, by layout
STEPS = {
    "save": dict.fromkeys(LAYOUTS, 0.8),
    "load": dict.fromkeys(LAYOUTS, 0.8),
    "load, other layout": dict.fromkeys(LAYOUTS, 0.8),
    "stop for an asynchronous save": {"replicated": 0.1, "sharded": 0.5},
}
UNCHECKED = "ours, unchecked"
PAUSE = 2.0  # seconds before a save


def run(num_rounds: int) -> Result:
    """Measure on forked gloo ranks; the larger state is measured in a quarter of the rounds."""
    seconds: dict[str, list[float]] = {}
    reference: dict[str, str] = {}
    targets: list[Target] = []
    for (size, count), layout in itertools.product(NUM_TENSORS.items(), LAYOUTS):
        rounds = num_rounds if count == min(NUM_TENSORS.values()) else max(2, num_rounds // 4)
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(_on_a_rank, WORLD, Path(folder), layout, count, rounds, timeout=3000)[0]
        for step, at_most in STEPS.items():
            names = [name for name in ("DCP", "ours", UNCHECKED) if (step, name) in found]
            if not names:
                continue
            cases = {name: f"{size}, {layout}: {step}, {name}" for name in names}
            seconds |= {case: found[step, name] for name, case in cases.items()}
            reference |= dict.fromkeys(cases.values(), cases["DCP"])
            if layout in at_most:
                targets.append(Target(cases["ours"], cases["DCP"], at_most=at_most[layout]))
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
    saved, other = _state(layout, count, mesh), _other_layout(layout, count, mesh)
    same = saved  # a load writes the values that are there: each replicated state is 8 GiB on four ranks
    numbers = {name: itertools.count() for name in ("ours", "DCP", UNCHECKED)}
    background, running = dist.new_group(backend="gloo"), []
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

    def begin_dcp(state: dict, path: Path) -> None:
        running.append(dcp.async_save(state, checkpoint_id=path, process_group=background))

    def wait_dcp() -> None:
        running.pop().result()
        dist.barrier()

    def wait_ours() -> None:
        wait()
        dist.barrier()

    stop = "stop for an asynchronous save"

    def flush() -> None:
        """Let the disk end what earlier cases have left to do, and rest: some write slower after much was written."""
        if dist.get_rank() == 0:
            os.sync()
            time.sleep(PAUSE)

    steps: list[list[dict[object, Callable[[], object]]]] = [
        [
            {"flush": flush, ("save", "DCP"): saves("DCP", lambda state, path: dcp.save(state, checkpoint_id=path))},
            {
                "flush 2": flush,
                ("save", UNCHECKED): saves(UNCHECKED, lambda state, path: save(path, state, check_replicas=False)),
            },
            {"flush 3": flush, ("save", "ours"): saves("ours", lambda state, path: save(path, state))},
        ],
        [
            {("load", "DCP"): lambda: dcp.load(same, checkpoint_id=latest["DCP"])},
            {("load", "ours"): lambda: load(latest["ours"], same)},
        ],
        [
            {("load, other layout", "DCP"): lambda: dcp.load(other, checkpoint_id=latest["DCP"])},
            {("load, other layout", "ours"): lambda: load(latest["ours"], other)},
        ],
        [{"remove": remove_earlier}],
    ]
    if count == min(NUM_TENSORS.values()) or layout == "sharded":  # DCP copies all that ranks hold
        unchecked = saves(UNCHECKED, lambda s, path: save(path, s, check_replicas=False, async_=True))
        steps += [
            [
                {(stop, "DCP"): saves("DCP", begin_dcp), "DCP ends": wait_dcp},
                {(stop, UNCHECKED): unchecked, "unchecked ends": wait_ours},
                {(stop, "ours"): saves("ours", lambda s, path: save(path, s, async_=True)), "ours ends": wait_ours},
            ],
            [{"remove again": remove_earlier}],
        ]
    _check(_in_order(steps, 0), same, other)
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(1 + num_rounds):
        for key, times in time_in_turns(_in_order(steps, round_), num_rounds=1, num_warmup=0).items():
            if round_ and isinstance(key, tuple):
                seconds.setdefault(key, []).extend(times)
    return seconds


def _in_order(steps: list[list[dict]], round_: int) -> dict[object, Callable[[], object]]:
    """Return the cases of a round; in each step another begins every time, as disks slow down in long writes."""
    cases: dict[object, Callable[[], object]] = {}
    for step in steps:
        first = round_ % len(step)
        for case in step[first:] + step[:first]:
            cases |= case
    return cases


def _check(cases: dict, same: dict, other: dict) -> None:
    """Check that every load fills its state with the values of tensor i: all of them i + column."""
    for key, case in cases.items():
        step, *name = key if isinstance(key, tuple) else (key,)
        if not step.startswith("load"):
            case()
            continue
        state = same if step == "load" else other
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        case()
        for i, tensor in enumerate(state.values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, _value(i)), (step, name, i)


def _value(number: int) -> torch.Tensor:
    return torch.arange(float(SHAPE[1])).add(number).repeat(SHAPE[0], 1)


def _is_sharded(layout: str, number: int) -> bool:
    return layout == "sharded" or (layout == "mixed" and number % 2 == 1)


def _state(layout: str, count: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {
        f"w{i}": distribute_tensor(_value(i), mesh, [Shard(0)]) if _is_sharded(layout, i) else _value(i)
        for i in range(count)
    }


def _other_layout(layout: str, count: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return zeros in the other layout: shards of dim 0 become shards of dim 1, replicas shards of dim 0."""

    def zeros(number: int) -> torch.Tensor:
        return distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(int(_is_sharded(layout, number)))])

    return {f"w{i}": zeros(i) for i in range(count)}
