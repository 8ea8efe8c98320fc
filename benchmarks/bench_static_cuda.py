"""The overhead table on a GPU: one rank of two LLaMA-3-8B layers at tp 8, with the gaps between its kernels.

With a fake process group one GPU computes what a rank of eight computes, and collectives return at once. The table
shows whether kernels of this size hide the cost of Python: it has the time between the first and the last kernel of a
step in which no kernel runs. bfloat16, forward and backward, wall-clock time up to the last kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import huggingface
import torch
import torch.distributed as dist
from bench_static_models import HAND, STOCK, model_cases
from measure import Result, time_in_turns
from targets import Target, Targets
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dtensor import init_device_mesh

WORLD, BATCH, SEQ = 8, 1, 2048
SIZES = {
    "vocab_size": 1024,  # embedding and head are not what is measured
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQ,
}
TITLE = f"Forward and backward of {SIZES['num_hidden_layers']} layers of LLaMA-3-8B on one rank of tp {WORLD}"


class _Skipped(Result):
    """What a machine without a CUDA device measures."""

    def table(self) -> str:
        return "skipped: needs a CUDA device"


def run(num_rounds: int) -> Result:
    """Measure on the current CUDA device; without one, return a result that says so."""
    if not torch.cuda.is_available():
        return _Skipped(TITLE, HAND, {})
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("tp",))
        tokens = torch.randint(SIZES["vocab_size"], (BATCH, SEQ), device="cuda")
        cases = {name: make() for name, make in model_cases(_model, tokens, mesh).items()}
        steps = {name: _finished(case.step) for name, case in cases.items()}
        seconds = time_in_turns(steps, num_rounds=num_rounds)
        gaps = {name: _gaps(step) for name, step in steps.items()}
    finally:
        dist.destroy_process_group()
    targets = (Target("vescale static", HAND, at_most=1.15), Target(STOCK, "vescale static", at_least=1.0))
    remarks = {"kernels, and time without one": gaps}
    return Targets(TITLE, HAND, seconds, dict.fromkeys(seconds, HAND), targets, remarks)


def _model() -> nn.Module:
    return huggingface.build("LLaMA", **SIZES).to("cuda", torch.bfloat16)


def _finished(step: Callable[[], object]) -> Callable[[], None]:
    def finished() -> None:
        step()
        torch.cuda.synchronize()

    return finished


def _gaps(step: Callable[[], None]) -> str:
    """Return how many kernels a step launches, and how long none of them runs between the first and the last."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    idle, until = 0.0, ranges[0][0]
    for start, end in ranges:
        idle += max(0.0, start - until)
        until = max(until, end)
    return f"{len(ranges)}, {idle / 1e3:.2f} of {(until - ranges[0][0]) / 1e3:.2f} ms"
