"""Reduction of gradients: the backend's order of additions against ``reduction="ordered"``.

Backward of a dozen square layers on two and on four gloo ranks, in buckets of one layer, one thread per process. All
cases reduce the same gradients; the run stops if they differ by more than rounding. Besides the time, which is of the
clock, the table shows the processor time of one rank, and what its tensors take more during backward than before it.
Bytes on the wire are those of the table in `vescale/optim/_gradients/reduction.py`.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import torch
from measure import Result, time_in_turns, with_processor_time
from targets import Targets
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP
from vescale_testing import run_ranks

WORLDS, STAGES, REDUCTIONS = (2, 4), (0, 1, 2), ("backend", "ordered")
DEPTH, HIDDEN, BATCH = 12, 1024, 16
MIB = 2**20


def run(num_rounds: int) -> Result:
    """Measure on forked gloo processes."""
    seconds: dict[str, list[float]] = {}
    columns: dict[str, dict[str, str]] = {"processor, ms": {}, "more memory, MiB": {}}
    reference: dict[str, str] = {}
    for world in WORLDS:
        times, busy, peaks = run_ranks(_on_each_rank, world, num_rounds, timeout=1500)[0]
        prefix = f"{world} ranks, "
        for name, values in times.items():
            seconds[prefix + name] = values
            columns["processor, ms"][prefix + name] = f"{1e3 * statistics.median(busy[name]):.0f}"
            columns["more memory, MiB"][prefix + name] = f"{peaks[name] / MIB:.1f}"
            reference[prefix + name] = prefix + name.replace("ordered", "backend")
    shape = f"{DEPTH} layers, {HIDDEN} x {HIDDEN}, float32, buckets of {4 * HIDDEN**2 // MIB} MiB"
    title = f"Forward, backward and reduction of gradients, gloo ({shape})"
    return Targets(title, "backend", seconds, reference, (), columns)


def _on_each_rank(num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, int]]:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    models = {
        f"zero {zero}, {reduction}": DDP(_model(), mesh["dp"], zero=zero, reduction=reduction, bucket_bytes=1)
        for zero in STAGES
        for reduction in REDUCTIONS
    }
    _check_same_gradients(models)
    peaks = {name: _peak(model) for name, model in models.items()}
    processor: dict[str, list[float]] = {name: [] for name in models}
    timed = {name: with_processor_time(_step(model), processor[name]) for name, model in models.items()}
    seconds = time_in_turns(timed, num_rounds=num_rounds, num_warmup=1)
    return seconds, {name: times[1:] for name, times in processor.items()}, peaks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(DEPTH)])


def _step(model: DDP) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(BATCH, HIDDEN, generator=generator)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def _check_same_gradients(models: dict[str, DDP]) -> None:
    expected = None
    for name, model in models.items():
        _step(model)()
        parts = {fqn: (slot.part, slot.grad_part) for fqn, slot in model.slots().items()} if model.zero else {}
        if expected is None:
            expected = {fqn: slot.param.grad.flatten() for fqn, slot in model.slots().items()}
        for fqn, ((start, stop), part) in parts.items():
            torch.testing.assert_close(part, expected[fqn][start:stop], msg=lambda text, name=name: f"{name}: {text}")
        model.zero_grad()


def _peak(model: DDP) -> int:
    """Return how many bytes more tensors take in the backward than before the step."""
    before, most = _held(), 0

    def look(_param: nn.Parameter) -> None:
        nonlocal most
        most = max(most, _held())

    handles = [param.register_post_accumulate_grad_hook(look) for param in model.parameters()]
    _step(model)()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return most - before


def _held() -> int:
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and type(each).__name__ != "ShardedGradient":
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())
