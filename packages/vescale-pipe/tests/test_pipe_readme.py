"""The table of schedules in the README is that of the simulator."""

from pathlib import Path

from vescale.pipe import (
    Costs,
    dual_pipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    search_schedule,
    simulate,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)

README = Path(__file__).resolve().parents[1] / "README.md"
RANKS, MICROBATCHES = 8, 32
TIMES = [(1.0, 1.0, 1.0, 0.0), (1.0, 1.2, 0.8, 0.05), (1.0, 1.4, 0.6, 0.1)]


def searched(v, placement):
    def make(p, m, costs):
        sizes = {"stages_per_rank": v, "placement": placement, "effort": 500_000}
        return search_schedule(p, m, costs=costs, **sizes)

    return make


def fixed(make, *v):
    return lambda p, m, costs: make(p, m, *v)  # noqa: ARG005 - for any costs


ROWS = {
    "`gpipe`": (1, fixed(gpipe)),
    "`one_f_one_b`": (1, fixed(one_f_one_b)),
    "`looped_bfs`, 2 stages per rank": (2, fixed(looped_bfs, 2)),
    "`interleaved_1f1b`, 2": (2, fixed(interleaved_1f1b, 2)),
    "`interleaved_1f1b`, 4": (4, fixed(interleaved_1f1b, 4)),
    "`zb_h1`": (1, fixed(zb_h1)),
    "`zb_h2`": (1, fixed(zb_h2)),
    "`interleaved_zero_bubble`, 2": (2, fixed(interleaved_zero_bubble, 2)),
    "`interleaved_zero_bubble`, 4": (4, fixed(interleaved_zero_bubble, 4)),
    "`zb_v`": (2, fixed(zb_v)),
    "`dual_pipe_v`, nothing hidden": (2, fixed(dual_pipe_v)),
    "`v_half`": (2, lambda p, m, costs: v_half(p, m, costs=costs)),
    "`v_min`": (2, lambda p, m, costs: v_min(p, m, costs=costs)),
    "`search_schedule`, 2": (2, searched(2, "loop")),
    "`search_schedule`, 2, as a V": (2, searched(2, "V")),
    "`search_schedule`, 3": (3, searched(3, "loop")),
    "`search_schedule`, 5": (5, searched(5, "loop")),
}


def table():
    """Return bubbles of the makespan, and the peak of activations, as a table."""
    lines = [
        "| schedule | " + " | ".join("F {} I {} W {} hop {}".format(*row) for row in TIMES) + " | peak |",
        "|---|" + "---|" * (len(TIMES) + 1),
    ]
    for name, (v, make) in ROWS.items():
        results = []
        for *times, latency in TIMES:
            costs = Costs(*(time / v for time in times), latency)
            results.append(simulate(make(RANKS, MICROBATCHES, costs), costs))
        peak = max(max(result.peak_activations) for result in results)
        lines.append(f"| {name} | " + " | ".join(f"{r.bubble:.2%}" for r in results) + f" | {peak:g} |")
    return "\n".join(lines)


def test_the_table():
    made = table()
    assert made in README.read_text(encoding="utf-8"), f"expected this table in README.md:\n{made}"
