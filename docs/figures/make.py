"""Draw the figures of the pages as SVG, from nothing but the standard library.

    python docs/figures/make.py          # writes the .svg files beside this script

A test compares the committed files with what this script draws.
"""

import itertools
from pathlib import Path

INK, MUTED, PAPER, LINE = "#1f2933", "#5f6c7b", "#ffffff", "#cbd2d9"
TINTS = {"tp": "#2f6fde", "dp": "#1e9e6a", "pp": "#d9822b", "base": "#52606d", "ckpt": "#8a5cc7"}
SANS = "font-family='Helvetica, Arial, sans-serif'"
MONO = "font-family='Menlo, Consolas, monospace'"


def text(x: float, y: float, content: str, *, size: int = 13, color: str = INK, anchor: str = "start", more: str = ""):
    """Return one line of text."""
    font = "" if "font-family" in more else SANS
    return (
        f"<text x='{x}' y='{y}' font-size='{size}' fill='{color}' text-anchor='{anchor}' {font} {more}>{content}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, *, fill: str = PAPER, stroke: str = LINE, radius: int = 8
) -> str:
    """Return a rounded rectangle."""
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='{radius}' fill='{fill}' stroke='{stroke}'/>"


def arrow(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """Return a line with a head at its end."""
    head = f"head-{color[1:]}"
    return (
        f"<marker id='{head}' viewBox='0 0 10 10' refX='10' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0L10 5L0 10z' fill='{color}'/></marker>"
        f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{color}' stroke-width='2.5' marker-end='url(#{head})'/>"
    )


def layer(x: float, y: float, width: float, name: str, lines: tuple[str, ...], color: str) -> str:
    """Return the card of one package: its import name on a colored band and what it does."""
    height = 34 + 18 * len(lines)
    parts = [
        box(x, y, width, height, stroke=color),
        f"<path d='M{x} {y + 24}v-16q0 -8 8 -8h{width - 16}q8 0 8 8v16z' fill='{color}'/>",
        text(x + width / 2, y + 17, name, color=PAPER, anchor="middle", more=f"font-weight='bold' {MONO}"),
    ]
    parts += [
        text(x + width / 2, y + 42 + 18 * row, line, size=12, color=MUTED, anchor="middle")
        for row, line in enumerate(lines)
    ]
    return "\n".join(parts)


def program(x: float, y: float) -> str:
    """Return the card with the user's own code."""
    code = (
        "model = Mixtral(config)",
        "",
        "for batch in data:",
        "    loss = model(batch).loss",
        "    loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    )
    parts = [text(x, y - 14, "your model, your loop", size=15, more="font-weight='bold'"), box(x, y, 232, 190)]
    parts += [
        text(x + 14, y + 32 + 23 * row, line, size=12, more=f"xml:space='preserve' {MONO}")
        for row, line in enumerate(code)
        if line
    ]
    return "\n".join(parts)


def ranks(x: float, y: float, stage: int) -> str:
    """Return one pipeline stage: its 2 x 2 ranks, dp down and tp across."""
    fill = "#fff7ec" if stage else "#ffffff"
    parts = [box(x, y, 156, 156, fill=fill, stroke=TINTS["pp"], radius=10)]
    for dp in range(2):
        for tp in range(2):
            left, top = x + 12 + 70 * tp, y + 12 + 70 * dp
            parts.append(box(left, top, 62, 62, fill="#eef3fb" if tp else "#e7f5ef", stroke=LINE, radius=6))
            rank = (stage * 2 + dp) * 2 + tp
            parts.append(text(left + 31, top + 36, f"rank {rank}", anchor="middle"))
    return "\n".join(parts)


def mesh(x: float, y: float) -> str:
    """Return the cube of eight ranks with its three named axes."""
    front = (x + 40, y + 66)
    parts = [
        text(x, y - 14, "a mesh with named axes", size=15, more="font-weight='bold'"),
        ranks(front[0] + 78, front[1] - 56, 1),
        ranks(*front, 0),
        arrow(front[0] + 12, front[1] + 178, front[0] + 150, front[1] + 178, TINTS["tp"]),
        text(front[0] + 78, front[1] + 198, "tp", color=TINTS["tp"], anchor="middle", more="font-weight='bold'"),
        arrow(front[0] - 18, front[1] + 12, front[0] - 18, front[1] + 150, TINTS["dp"]),
        text(front[0] - 38, front[1] + 86, "dp", color=TINTS["dp"], anchor="middle", more="font-weight='bold'"),
        arrow(front[0] + 172, front[1] + 156, front[0] + 240, front[1] + 106, TINTS["pp"]),
        text(front[0] + 224, front[1] + 148, "pp", color=TINTS["pp"], anchor="middle", more="font-weight='bold'"),
    ]
    return "\n".join(parts)


def layers(x: float, y: float) -> str:
    """Return the packages, each in the color of the axis it works along."""
    third = 138
    return "\n".join(
        [
            text(x, y - 14, "veScale: six parts, each useful alone", size=15, more="font-weight='bold'"),
            layer(
                x, y, 3 * third + 16, "vescale.plan", ("degrees, schedule and memory of a run, as data",), TINTS["base"]
            ),
            layer(x, y + 62, third, "vescale.pipe", ("stages, schedules",), TINTS["pp"]),
            layer(x + third + 8, y + 62, third, "vescale.optim", ("batches, ZeRO",), TINTS["dp"]),
            layer(x + 2 * third + 16, y + 62, third, "vescale.dmodule", ("shards of a layer",), TINTS["tp"]),
            layer(
                x, y + 124, 3 * third + 16, "vescale.dtensor", ("placements; randomness of one device",), TINTS["base"]
            ),
            layer(x, y + 186, 3 * third + 16, "vescale.ckpt", ("saved once, loaded under any layout",), TINTS["ckpt"]),
        ]
    )


def svg(width: int, height: int, *parts: str) -> str:
    """Return a picture of some parts on white paper."""
    size = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    paper = f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", paper, *parts, "</svg>", ""])


def overview() -> str:
    """Return the picture of the README: program, packages, mesh."""
    return svg(
        1080,
        350,
        program(24, 56),
        text(140, 278, "runs on every rank, unchanged,", color=MUTED, anchor="middle"),
        text(140, 297, "and gives the numbers of one device", color=MUTED, anchor="middle"),
        arrow(262, 151, 292, 151, TINTS["base"]),
        layers(304, 56),
        arrow(742, 151, 772, 151, TINTS["base"]),
        mesh(780, 56),
    )


def packages() -> str:
    """Return which package imports which, and what the others see of each other through protocols."""
    base, wide, low = TINTS["base"], 210, 56
    columns = [24 + column * (wide + 22) for column in range(4)]
    middle = [left + wide / 2 for left in columns]
    names = (
        ("vescale.plan", "what runs where, as data", "base"),
        ("vescale.pipe", "stages and schedules", "pp"),
        ("vescale.dmodule", "tensor, sequence, expert", "tp"),
        ("vescale.optim", "DDP, ZeRO, optimizers", "dp"),
    )
    span = 4 * wide + 66
    parts = [layer(24, 24, span, "vescale", ("one import, lazily: parallelize, generate_plan, save, load",), base)]
    for left, (name, line, tint) in zip(columns, names, strict=True):
        parts += [
            arrow(left + wide / 2, 24 + low, left + wide / 2, 118, base),
            layer(left, 120, wide, name, (line,), TINTS[tint]),
        ]
    two, half = columns[2], 2 * wide + 22
    parts += [layer(two, 226, half, "vescale.dtensor", ("placements, operators, randomness, deferred init",), base)]
    parts += [arrow(at, 172, at, 224, base) for at in middle[2:]]
    parts += [arrow(columns[3], 146, columns[3] - 20, 146, base)]
    parts += [
        layer(24, 226, half, "vescale.ckpt", ("asks any value for its boxes; safetensors on disk",), TINTS["ckpt"])
    ]
    parts += [arrow(234 + 11, 24 + low, 234 + 11, 224, base)]
    parts += [
        layer(24, 302, span, "torch", ("imported by all: DTensor, DeviceMesh, autograd, torch.distributed",), INK),
        text(
            24,
            380,
            "An arrow is an import. Packages without an arrow between them meet through protocols.",
            color=MUTED,
        ),
    ]
    return svg(960, 396, *parts)


STEP_COLUMNS = ("parallelize_module", "DDP", "forward", "backward", "optimizer.step")
STEP_ROWS = (
    (
        "a parameter",
        "tp",
        (
            ("becomes a DTensor:", "Shard(0) on tp"),
            ("takes a slot in a flat", "bucket, and a receiver"),
            ("its local parameter", "stands in the module"),
            ("receive(local, placements)", "fills its slot"),
            ("this rank updates its", "piece, then all-gathers"),
        ),
    ),
    (
        "a boundary",
        "dp",
        (
            ("a regex of the plan", "names it"),
            ("",),
            ("a recorded conversion:", "all-gather over tp"),
            ("its conjugate:", "reduce-scatter over tp"),
            ("",),
        ),
    ),
    (
        "a bucket",
        "pp",
        (
            ("",),
            ("is planned: which rank", "owns which part"),
            ("unsharded before use", "(ZeRO 3)"),
            ("complete: reduce-scatter", "over dp, during backward"),
            ("reads of a bucket in", "flight wait (guard)"),
        ),
    ),
    (
        "a random operator",
        "ckpt",
        (
            ("has a rule since import", "of vescale.dtensor"),
            ("gets this rank's window", "of the global batch"),
            ("draws the global values,", "keeps its own positions"),
            ("recomputation draws from", "the saved state again"),
            ("every rank's generator is", "where one device's is"),
        ),
    ),
)


def step() -> str:
    """Return one training step: what happens to a parameter, a boundary, a bucket and a random operator."""
    wide, high, gap, left, top = 186, 66, 30, 170, 64
    parts = []
    for column, title in enumerate(STEP_COLUMNS):
        at = left + column * (wide + gap)
        parts.append(text(at + wide / 2, 40, title, anchor="middle", more=f"font-weight='bold' {MONO}"))
    for row, (title, tint, cells) in enumerate(STEP_ROWS):
        y, color = top + row * (high + 18), TINTS[tint]
        parts.append(text(left - 14, y + high / 2 + 5, title, anchor="end", color=color, more="font-weight='bold'"))
        filled = [column for column, lines in enumerate(cells) if lines != ("",)]
        for column in filled:
            at = left + column * (wide + gap)
            parts.append(box(at, y, wide, high, stroke=color))
            for number, line in enumerate(cells[column]):
                parts.append(text(at + wide / 2, y + 29 + 19 * number, line, size=12, anchor="middle"))
        for before, after in itertools.pairwise(filled):
            start, stop = left + before * (wide + gap) + wide, left + after * (wide + gap)
            parts.append(arrow(start, y + high / 2, stop, y + high / 2, color))
    return svg(left + 5 * wide + 4 * gap + 24, top + 4 * (high + 18) + 4, *parts)


FIGURES = {"overview.svg": overview, "packages.svg": packages, "step.svg": step}


def main() -> None:
    """Write every figure beside this script."""
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
