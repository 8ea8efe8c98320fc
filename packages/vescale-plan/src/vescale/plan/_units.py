"""Format byte counts, counts and ratios, in the same way in plans, tables and errors."""

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` with a binary unit: ``1536 -> '1.50 KiB'``, ``80 * 2**30 -> '80.00 GiB'``."""
    value = float(num_bytes)
    for unit in BYTE_UNITS:
        if abs(value) < 1024 or unit == BYTE_UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the loop returns at the last unit")


def format_count(count: int) -> str:
    """Return ``count`` with a decimal unit, as in model cards: ``46_702_792_704 -> '46.70B'``."""
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.2f}{unit}"
    return str(count)


def format_percent(ratio: float) -> str:
    """Return a ratio as a percentage with one decimal: ``0.2 -> '20.0%'``."""
    return f"{100 * ratio:.1f}%"
