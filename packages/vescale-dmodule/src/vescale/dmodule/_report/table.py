"""Text tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "table"]

UNITS = ("KiB", "MiB", "GiB", "TiB")


def bytes_text(num_bytes: float) -> str:
    """Return a number of bytes with three digits.

    Example:
        >>> bytes_text(1536), bytes_text(12)
        ('1.5 KiB', '12 B')
    """
    value, unit = float(num_bytes), "B"
    for larger in UNITS:
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int) -> str:
    """Lay out rows under a header, the first ``num_text`` columns to the left and the others to the right.

    The last row is a sum and stands under a rule of its own.

    Example:
        >>> print(table(["name", "count"], [["a", "10"], ["all", "10"]], num_text=1))
        name  count
        ----  -----
        a        10
        ----  -----
        all      10
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < num_text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows[:-1]), rule, line(rows[-1])])
