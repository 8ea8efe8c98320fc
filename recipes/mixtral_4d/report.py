"""What the run shows: a line per step, a progress bar, the table of differences, ``metrics.jsonl`` and ``loss.png``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from config import RECIPE, Config, Layout, resumed_layout
from tqdm import tqdm

__all__ = ["Report", "Step"]

HEADER = (
    f"{'run':>9} {'step':>5} {'loss':>12} {'reference':>12} {'difference':>11} {'grad norm':>10} "
    f"{'tokens/s':>9} {'MiB':>7}"
)


@dataclass(frozen=True)
class Step:
    """One optimizer step: mean loss of the global batch, norm before clipping, seconds, peak MiB of any rank."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    memory_mib: float


class Report:
    """Collects the steps of every run; rank 0 prints and writes, the others only collect."""

    def __init__(self, config: Config, vocab_size: int, *, printing: bool) -> None:
        self.config, self.printing, self.out = config, printing, Path(config.out)
        self.expected: dict[int, dict] = {}
        self.runs: dict[str, list[Step]] = {}
        self.layouts: dict[str, Layout] = {}
        self.parameter_rows: dict[str, tuple[float, str]] = {}
        middle = config.steps // 2
        self.bar = tqdm(
            total=2 * config.steps - middle, unit="step", disable=None if printing else True
        )  # None: only on a terminal
        if printing:
            self.metrics = (self.out / "metrics.jsonl").open("w")
            self._say(f"{RECIPE}: {config.preset}, {config.dtype}, vocabulary {vocab_size}, {config.layout}")
            self._say(f"  resumed at step {middle} under {resumed_layout(config)}; dropout {config.dropout}")

    def reference(self, rows: list[dict]) -> None:
        """Take the rows of the single-process run."""
        self.expected = {row["step"]: row for row in rows}
        if self.printing:
            tokens = self.config.batch * self.config.seq * len(rows) / sum(row["seconds"] for row in rows)
            self._say(f"  reference: {len(rows)} steps in one process, {tokens:,.0f} tokens/s")
            for row in rows:
                self._write({"run": "reference", **row})

    def start(self, name: str, layout: Layout) -> None:
        """Begin the run ``name``."""
        self.runs[name], self.layouts[name] = [], layout
        self._say(f"\n{name}: {layout}\n{HEADER}")

    def step(self, step: Step) -> None:
        """Show one step of the current run beside the reference."""
        name = next(reversed(self.runs))
        self.runs[name].append(step)
        if not self.printing:
            return
        expected = self.expected.get(step.step, {}).get("loss")
        speed = self.config.batch * self.config.seq / step.seconds
        columns = f"{'-':>12} {'-':>11}" if expected is None else f"{expected:12.8f} {step.loss - expected:11.2e}"
        sizes = f"{step.grad_norm:10.6f} {speed:9,.0f} {step.memory_mib:7.0f}"
        self._say(f"{name:>9} {step.step:5d} {step.loss:12.8f} {columns} {sizes}")
        self._write({"run": name, "reference_loss": expected, "tokens_per_s": speed, **dataclasses.asdict(step)})
        self.bar.update()

    def parameters(self, name: str, difference: float, where: str) -> None:
        """Take the largest relative difference of a parameter after the last step."""
        self.parameter_rows[name] = (difference, where)

    def finish(self) -> int:
        """Print the table of largest differences and the verdict; return the exit status."""
        self.bar.close()
        self.metrics.close()
        if not self.config.reference:
            print(f"{RECIPE}: DONE without a reference; checkpoint and metrics in {self.out}")
            return 0
        print(f"\nlargest relative differences from one process\n{'run':>9} {'quantity':>10} {'largest':>10}  where")
        for name, steps in self.runs.items():
            for quantity in ("loss", "grad_norm"):
                value, step = max((self._relative(s, quantity), s.step) for s in steps)
                print(f"{name:>9} {quantity:>10} {value:10.2e}  step {step}")
            value, where = self.parameter_rows[name]
            print(f"{name:>9} {'parameter':>10} {value:10.2e}  {where}")
        self._draw()
        steps = [s for run in self.runs.values() for s in run]
        absolute = max(abs(s.loss - self.expected[s.step]["loss"]) for s in steps)
        relative = max(self._relative(s, "loss") for s in steps)
        good = relative <= self.config.bound  # False for NaN
        sign = "<=" if good else "NOT <="
        verdict = "PASS" if good else "FAIL"
        print(
            f"{RECIPE}: {verdict} max |loss difference| {absolute:.2e}, "
            f"relative {relative:.2e} {sign} {self.config.bound:.0e} ({self.config.dtype} order of additions)",
            flush=True,
        )
        return 0 if good else 1

    def _relative(self, step: Step, quantity: str) -> float:
        expected = self.expected[step.step][quantity]
        return abs(getattr(step, quantity) - expected) / abs(expected)

    def _draw(self) -> None:
        """Write ``loss.png``: the curves over one another, and their differences below."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (top, bottom) = plt.subplots(
            2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
        )
        losses = [row["loss"] for row in self.expected.values()]
        top.plot(list(self.expected), losses, color="0.75", linewidth=6, label="one process, plain PyTorch")
        floor = torch.finfo(self.config.torch_dtype).eps / 10  # where equal losses are drawn on the logarithmic axis
        styles = {"4d": ("C0", "-"), "resumed": ("C3", "--")}
        for name, steps in self.runs.items():
            color, line = styles[name]
            x = [s.step for s in steps]
            top.plot(x, [s.loss for s in steps], color=color, linestyle=line, label=f"{name}: {self.layouts[name]}")
            differences = [max(self._relative(s, "loss"), floor) for s in steps]
            bottom.semilogy(x, differences, color=color, linestyle=line, marker=".", label=name)
        bottom.axhline(self.config.bound, color="0.5", linewidth=1)
        bottom.annotate("bound", (0, self.config.bound), textcoords="offset points", xytext=(0, -11), color="0.4")
        top.set(ylabel="loss", title=f"Mixtral ({self.config.preset}), {self.config.dtype}: the same training")
        bottom.set(xlabel="step", ylabel="relative difference\n(bottom: none)")
        top.legend()
        bottom.legend(loc="center right")
        figure.savefig(self.out / "loss.png", dpi=120)
        plt.close(figure)

    def _say(self, text: str) -> None:
        if self.printing:
            self.bar.write(text)

    def _write(self, row: dict) -> None:
        print(json.dumps(row), file=self.metrics, flush=True)
