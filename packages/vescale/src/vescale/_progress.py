"""Show the steps of a training run: a line per row, or a progress bar where tqdm is installed."""

from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, float]

_GIB = 2**30


class Lines:
    """One line per row.

    Args:
        write: called with each line.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def advance(self) -> None:
        """Count a step."""

    def show(self, row: Row) -> None:
        """Write the row."""
        self._write(f"step {row['step']:.0f}  {line(row)}")

    def close(self) -> None:
        """Do nothing."""


class Bar(Lines):
    """A progress bar with the newest row beside it."""

    def __init__(self, bar: Any) -> None:
        super().__init__(bar.write)
        self._bar = bar

    def advance(self) -> None:
        self._bar.update(1)

    def show(self, row: Row) -> None:
        self._bar.set_postfix_str(line(row))

    def close(self) -> None:
        self._bar.close()


def display(*, write: Callable[[str], object], progress: bool, num_steps: int | None) -> Lines:
    """Return a progress bar if it is wanted and tqdm is installed, else lines."""
    if not progress:
        return Lines(write)
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return Lines(write)
    return Bar(tqdm(total=num_steps, unit="step", dynamic_ncols=True))


def line(row: Row) -> str:
    """Return a row as a line for people.

    Example:
        >>> line({"step": 3, "loss": 2.5, "tokens_per_second": 123456.0, "mfu": 0.412})
        'loss 2.5000  123.5k tokens/s  MFU 41.2%'
    """
    parts = []
    if "loss" in row:
        parts.append(f"loss {row['loss']:.4f}")
    if "grad_norm" in row:
        parts.append(f"grad norm {row['grad_norm']:.3g}")
    if "tokens_per_second" in row:
        each = row.get("tokens_per_second_per_device")
        of_device = "" if each is None else f" ({_count(each)} per device)"
        parts.append(f"{_count(row['tokens_per_second'])} tokens/s{of_device}")
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    if "memory_peak_bytes" in row:
        parts.append(f"memory {row['memory_peak_bytes'] / _GIB:.2f} GiB")
    for name, said in (("exposed_communication", "communication"), ("pipeline_wait", "pipeline")):
        if name in row:
            parts.append(f"waits for {said} {row[name]:.1%}")
    return "  ".join(parts)


def _count(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.1f}"
