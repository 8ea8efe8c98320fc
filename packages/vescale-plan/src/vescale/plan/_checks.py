"""Accepted values of the planner, and the checks shared by its dataclasses.

An invalid value raises at construction, so every `Plan`, `Cluster` and `Constraints` is valid.
"""

import reprlib
from collections.abc import Collection

#: Schedules that the memory model and the search know.
SCHEDULES = ("1f1b", "gpipe")
#: Schedules for any number of stages per rank.
LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "auto")
#: Schedules with two stages per rank by default.
TWO_STAGES = ("zb_v", "dual_pipe_v", "interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs")
#: All names of ``vescale.pipe``.
ALL_SCHEDULES = (*SCHEDULES, "zb_h1", "zb_h2", "zb_v", "dual_pipe_v", *LOOPED)
DEVICES = ("cpu", "cuda")
ZERO_STAGES = (0, 1, 2, 3)
DEFAULT_BUCKET_BYTES = 25 * 2**20
#: Larger numbers are mistakes, and a search would try their divisors for hours.
MAX_DEVICES, MAX_BATCH = 2**24, 2**32


def check_int(owner: str, name: str, value: object, *, at_least: int, at_most: int = 2**63 - 1) -> None:
    """Raise `ValueError` naming ``owner`` and the field unless ``value`` is an integer between two others."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{owner}: expected an integer >= {at_least} for {name}, got {value!r}")
    if value > at_most:
        limit = "of 64 bits" if at_most == 2**63 - 1 else f"<= {at_most}"
        raise ValueError(f"{owner}: expected an integer {limit} for {name}, got {reprlib.repr(value)}")


def check_bool(owner: str, name: str, value: object) -> None:
    """Raise `ValueError` naming ``owner`` and the field unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: expected True or False for {name}, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: Collection) -> None:
    """Raise `ValueError` naming ``owner`` and the field unless ``value`` is one of ``choices`` (same type too)."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{owner}: expected one of {listed} for {name}, got {value!r}")


def check_batch(global_batch_size: int, *, dp: int, num_microbatches: int) -> None:
    """Raise `ValueError` with the nearest valid sizes unless the batch divides into equal parts."""
    check_int("check_batch", "global_batch_size", global_batch_size, at_least=1)
    parts = dp * num_microbatches
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        nearest = " or ".join(str(size) for size in (below, below + parts) if size > 0)
        raise ValueError(
            f"expected a multiple of dp * num_microbatches = {dp} * {num_microbatches} = {parts} as the global batch "
            f"size, got {global_batch_size}; use {nearest}"
        )
