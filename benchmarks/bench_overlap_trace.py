"""When the collectives of a data-parallel step run, next to the work of the rank: measured and drawn.

Rank 0 of two gloo ranks, one step of a stack of transformer blocks and the forward of the next, which the gathers of
ZeRO 1 and 2 run into. A collective is drawn from its launch to its end, as the backend's future reports it, a block
from its entry to its exit, in forward and in backward. The picture goes to `runs/data_parallel_overlap.svg`; the table
says for how much of the time in which a collective was under way the rank was in a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from blocks import GPTBlock, stack
from measure import Result
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._ranks.axis import Axis
from vescale_testing import run_ranks

DEPTH, HIDDEN, HEADS, BATCH, SEQ = 6, 512, 8, 4, 64
CASES = {
    "zero 0, overlap=False": {"zero": 0, "overlap": False},
    "zero 0": {"zero": 0},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
}
PICTURE = Path("runs/data_parallel_overlap.svg")
Span = tuple[str, float, float]  # what it is, begin and end in seconds since the step began


@dataclass(frozen=True)
class Overlap(Result):
    """Spans of one step.

    Attributes:
        spans: case -> spans: blocks, collectives and "step", that of the optimizer.
    """

    spans: dict[str, list[Span]]

    def table(self) -> str:
        """Return a markdown table."""
        lines = ["| case | step, ms | collectives under way, ms | in blocks |", "|---|---:|---:|---:|"]
        for case, spans in self.spans.items():
            under_way = _union((begin, end) for name, begin, end in spans if name.startswith("the "))
            computing = _union((begin, end) for name, begin, end in spans if name.startswith("block "))
            total = sum(end - begin for begin, end in under_way)
            hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in under_way for c, d in computing)
            whole = 1e3 * next(end for name, _, end in spans if name == "step")
            lines.append(f"| {case} | {whole:.0f} | {1e3 * total:.0f} | {hidden / total:.0%} |")
        return "\n".join([*lines, "", f"- drawn in {PICTURE}"])


def run(num_rounds: int) -> Result:
    """Trace the last of ``num_rounds`` steps, at most five, of each case, and draw them."""
    spans = {case: run_ranks(_trace, 2, settings, min(num_rounds, 5))[0] for case, settings in CASES.items()}
    _draw(spans)
    title = (
        f"Overlap of a training step, 2 gloo ranks ({DEPTH} blocks, hidden {HIDDEN}, {BATCH} x {SEQ} tokens per rank)"
    )
    return Overlap(title, "", {}, spans)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _trace(settings: dict[str, object], num_steps: int) -> list[Span]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    blocks = stack(GPTBlock, DEPTH, hidden=HIDDEN, num_heads=HEADS, seq=SEQ)
    model = DDP(blocks, mesh["dp"], bucket_bytes=8 << 20, **settings)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4)
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    spans: list[Span] = []
    clock = _Clock()
    _watch_collectives(clock, spans)
    _watch_blocks(blocks, clock, spans)
    for _ in range(max(num_steps, 2)):
        torch.distributed.barrier()
        spans.clear()
        clock.start()
        model(x).square().mean().backward()
        after_backward = clock()
        optimizer.step()
        optimizer.zero_grad()
        after_step = clock()
        model(x)  # the next forward, in which the last gathers end
    return [*spans, ("step", after_backward, after_step)]


class _Clock:
    """Seconds since `start`."""

    def __init__(self):
        self.began = 0.0

    def start(self) -> None:
        self.began = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self.began


def _watch_collectives(clock: _Clock, spans: list[Span]) -> None:
    start = Axis._start

    def watched(self: Axis, kind: str, what: str, collective: Callable, *tensors: object, **kwargs: object) -> object:
        begin = clock()
        pending = start(self, kind, what, collective, *tensors, **kwargs)
        works = getattr(pending._work, "works", [pending._work])
        ended = torch.futures.collect_all([work.get_future() for work in works])
        ended.then(lambda _: spans.append((f"the {kind}", begin, clock())))
        return pending

    Axis._start = watched


def _watch_blocks(blocks: nn.Sequential, clock: _Clock, spans: list[Span]) -> None:
    for number, block in enumerate(blocks):
        begun = {}
        block.register_forward_pre_hook(lambda *_, begun=begun: begun.update(forward=clock()))
        block.register_forward_hook(
            lambda *_, begun=begun, n=number: spans.append((f"block {n}", begun["forward"], clock()))
        )
        block.register_full_backward_pre_hook(lambda *_, begun=begun: begun.update(backward=clock()))
        block.register_full_backward_hook(
            lambda *_, begun=begun, n=number: spans.append((f"block {n}", begun["backward"], clock()))
        )


def _draw(all_spans: dict[str, list[Span]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "overlap"
    figure, axes = pyplot.subplots(len(all_spans), 1, figsize=(10, 1.35 * len(all_spans)), sharex=True)
    colors = {"the all-reduce": "#1e9e6a", "the reduce-scatter": "#1e9e6a", "the all-gather": "#d9822b"}
    for axis, (case, spans) in zip(axes, all_spans.items(), strict=True):
        for name, begin, end in spans:
            if name.startswith("block"):
                shade = "#2f6fde" if int(name.split()[1]) % 2 else "#7fa8ee"
                axis.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (1.05, 0.9), facecolors=shade)
            elif name == "step":
                axis.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (1.05, 0.9), facecolors="#cbd2d9")
            elif name in colors:
                axis.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (0.05, 0.9), facecolors=colors[name], alpha=0.6)
        axis.set_yticks([0.5, 1.5], ["collectives", "rank 0"], fontsize=8)
        axis.set_title(case, fontsize=9, loc="left", pad=2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "ms; blue: blocks: forward, backward, next forward; gray: optimizer; green: sums; orange: gathers", fontsize=8
    )
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})
