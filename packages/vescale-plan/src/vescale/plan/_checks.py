"""Accepted values of the planner, and the checks shared by its dataclasses.

An invalid value raises at construction, so every `Plan`, `Cluster` and `Constraints` is valid.
"""

from collections.abc import Collection

SCHEDULES = ("1f1b", "gpipe")
DEVICES = ("cpu", "cuda")
ZERO_STAGES = (0, 1, 2, 3)
DEFAULT_BUCKET_BYTES = 25 * 2**20


def check_int(owner: str, name: str, value: object, *, at_least: int) -> None:
    """Raise `ValueError` naming ``owner`` and the field unless ``value`` is an integer (no bool) >= ``at_least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{owner}: {name} must be an integer >= {at_least}, got {value!r}")


def check_bool(owner: str, name: str, value: object) -> None:
    """Raise `ValueError` naming ``owner`` and the field unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name} must be True or False, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: Collection) -> None:
    """Raise `ValueError` naming ``owner`` and the field unless ``value`` is one of ``choices`` (same type too)."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{owner}: {name} must be one of {listed}, got {value!r}")
