"""Draw `losses.json` as docs/figures/exact.svg.

    python recipes/exact_layouts/figure.py

Left the losses of all trainings, right how far each is from that of one process in the same mode. The axis is linear
below 1e-8 and logarithmic above, so that 0 is on it.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "docs" / "figures" / "exact.svg"
COLORS = ("#1e9e6a", "#2f6fde", "#d9822b")
SIZES = (8, 5.5, 3)  # of points that lie on one another
INK, MUTED, LINE = "#1f2933", "#5f6c7b", "#cbd2d9"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.hashsalt": "exact",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(results: dict[str, dict[str, list[float]]]) -> plt.Figure:
    """Return the figure."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.9), gridspec_kw={"wspace": 0.26})
        for mode in ("ordinary", "exact"):
            (_, reference), *layouts = results[mode].items()
            steps = range(1, len(reference) + 1)
            left.plot(steps, reference, color=MUTED, linewidth=6, alpha=0.3)
            for (_, curve), color, size in zip(layouts, COLORS, SIZES, strict=True):
                left.plot(steps, curve, color=color, linewidth=1.2)
                apart = [abs(a - b) for a, b in zip(curve, reference, strict=True)]
                look = {"ms": size, "mfc": color, "mew": 0} if mode == "exact" else {"ms": 4, "mfc": "white"}
                right.plot(steps, apart, "o", color=color, linestyle="none", clip_on=False, zorder=3, **look)
        left.set(xlabel="step", ylabel="loss")
        right.set(xlabel="step", ylim=(0, 1e-3))
        right.set_yscale("symlog", linthresh=1e-8)
        right.set_yticks([0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
        for axes in (left, right):
            axes.grid(axis="y", color=LINE, linewidth=0.5)
            axes.set_xlim(0, len(reference) + 1)
        right.text(len(reference), 2.5e-9, "filled: Plan(exact=8), all of them 0", ha="right", color=MUTED)
        right.text(len(reference), 5e-4, "hollow: without it", ha="right", color=MUTED)
        names = [name for name, _ in layouts]
        handles = [plt.Line2D([], [], color=c, linewidth=3, label=n) for n, c in zip(names, COLORS, strict=True)]
        right.legend(handles=handles, frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, 0.99))
        left.set_title("Loss with dropout, float32", loc="left", fontsize=10.5, fontweight="bold")
        right.set_title("Distance to the loss of one process", loc="left", fontsize=10.5, fontweight="bold")
    return figure


def main() -> None:
    """Draw the figure and write it."""
    figure = draw(json.loads((HERE / "losses.json").read_text(encoding="utf-8")))
    with mpl.rc_context(STYLE):
        figure.savefig(TARGET, bbox_inches="tight", metadata={"Date": None})
    print(TARGET)


if __name__ == "__main__":
    main()
