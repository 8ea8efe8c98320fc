"""The table of a search: one row per layout, in the order of preference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ._layout import Layout
from ._typed_json import Size
from ._units import format_bytes, format_percent

CHOSEN: Final = "chosen"
FITS: Final = "fits"
OPEN: Final = "open"
REFUSED: Final = "refused"
_COLUMNS = (
    "dp",
    "tp",
    "pp",
    "ep",
    "zero",
    "micro-batches",
    "sp",
    "recompute",
    "bubble",
    "bytes per rank",
    "verdict",
)


@dataclass(frozen=True)
class Candidate:
    """One layout and its verdict.

    Attributes:
        layout: the degrees.
        verdict: ``"chosen"``, ``"fits"`` (later in the order of preference), ``"refused"``, or ``"open"``: it comes
            later, and was not examined.
        reason: of a refusal, or of an open verdict; empty otherwise.
        bytes_per_rank: estimate for the fullest rank; ``None`` if the layout was refused before the
            estimate, or is open.
    """

    layout: Layout
    verdict: Literal["chosen", "fits", "refused", "open"]
    reason: str = ""
    bytes_per_rank: Size | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, one per column of the table."""
        layout = self.layout
        num_bytes = self.bytes_per_rank
        counted = num_bytes is not None
        return (
            str(layout.dp),
            str(layout.tp),
            str(layout.pp),
            str(layout.ep) if layout.ep > 1 else "-",
            str(layout.zero) if counted else "any",
            str(layout.num_microbatches) if counted else "any",
            "yes" if layout.sequence_parallel else "-",
            _blocks(layout.recompute),
            format_percent(layout.bubble) if counted and layout.pp > 1 else "-",
            "-" if num_bytes is None else format_bytes(num_bytes),
            f"{self.verdict}: {self.reason}" if self.reason else self.verdict,
        )


def _blocks(recompute: int | tuple[str, ...] | None) -> str:
    if recompute is None or isinstance(recompute, tuple):
        return "-" if recompute is None else ", ".join(recompute)
    return "all" if recompute == 1 else f"1 of {recompute}"


def render(candidates: Sequence[Candidate], *, max_rows: int = 40) -> str:
    """Return the table as text: at most ``max_rows`` rows including the chosen one, and the number of omitted rows."""
    shown = list(candidates[:max_rows])
    chosen = next((candidate for candidate in candidates if candidate.verdict == CHOSEN), None)
    if chosen is not None and chosen not in shown:
        shown[-1] = chosen
    rows = [_COLUMNS, *(candidate.cells() for candidate in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    if len(candidates) > len(shown):
        lines.append(f"... and {len(candidates) - len(shown)} rows more")
    return "\n".join(lines)
