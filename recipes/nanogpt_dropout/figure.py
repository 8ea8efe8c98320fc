"""Draw `losses.json` as docs/figures/nanogpt_dropout.svg.

    python recipes/nanogpt_dropout/figure.py

Left the losses, right how far each training is from the one of one process; a distance of 0 is drawn at 1e-16.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "docs" / "figures" / "nanogpt_dropout.svg"
COLORS = {"dp 4": "#1e9e6a", "tp 4": "#2f6fde", "dp 2 x tp 2": "#d9822b"}
INK, MUTED, LINE = "#1f2933", "#5f6c7b", "#cbd2d9"
OURS, STOCK = "vescale.dtensor", "stock randomness"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.hashsalt": "nanogpt",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(losses: dict[str, list[float]]) -> plt.Figure:
    """Return the figure of the trainings of one configuration, by name."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.9), gridspec_kw={"wspace": 0.26})
        reference = losses["one process"]
        steps = range(1, len(reference) + 1)
        left.plot(steps, reference, color=MUTED, linewidth=6, alpha=0.3)
        for layout, color in COLORS.items():
            left.plot(steps, losses[f"{layout}, {STOCK}"], color=color, linewidth=1.3)
            left.plot(steps, losses[f"{layout}, {OURS}"], color=INK, linewidth=1.3)
            for name, fill in ((OURS, color), (STOCK, "white")):
                distances = [abs(a - b) for a, b in zip(losses[f"{layout}, {name}"], reference, strict=True)]
                shown = [max(d, 1e-16) for d in distances]
                right.plot(steps, shown, "o", ms=4.5, color=color, mfc=fill, linestyle="none")
        left.set(xlabel="step", ylabel="loss")
        right.set(xlabel="step", yscale="log", ylim=(4e-17, 1))
        for axes in (left, right):
            axes.grid(axis="y", color=LINE, linewidth=0.5)
            axes.set_xlim(0.3, len(reference) + 0.7)
            axes.set_xticks([1, 5, 10, 15, 20])
        annotate(left, right, reference)
    return figure


def annotate(left: plt.Axes, right: plt.Axes, reference: list[float]) -> None:
    """Label the lines and the two groups of points."""
    handles = [
        plt.Line2D([], [], color=MUTED, linewidth=6, alpha=0.3, label="one process"),
        plt.Line2D([], [], color=INK, linewidth=1.3, label=f"{OURS}, all three"),
        *(plt.Line2D([], [], color=color, linewidth=1.3, label=f"{n}, {STOCK}") for n, color in COLORS.items()),
    ]
    left.legend(handles=handles, frameon=False, fontsize=8.5, loc="lower left")
    last = len(reference)
    right.text(last, 1.6e-1, f"{STOCK}: other masks", ha="right", color=MUTED)
    right.text(last, 1e-14, f"{OURS}: order of additions", ha="right", color=MUTED)
    left.set_title("Loss with dropout 0.1 everywhere, float64", loc="left", fontsize=10.5, fontweight="bold")
    right.set_title("Distance to the loss of one process", loc="left", fontsize=10.5, fontweight="bold")


def main() -> None:
    """Draw the figure and write it."""
    results = json.loads((HERE / "losses.json").read_text(encoding="utf-8"))
    figure = draw(results["12 heads, float64"])
    with mpl.rc_context(STYLE):
        figure.savefig(TARGET, bbox_inches="tight", metadata={"Date": None})
    print(TARGET)


if __name__ == "__main__":
    main()
