"""Say once, at import, that veScale was not tested with the torch that is installed.

Each package that imports no sibling has this file. A process that imports several of them is told once.
"""

from __future__ import annotations

import logging

import torch

__all__ = ["TESTED", "warn_if_untested"]

TESTED = ("2.13", "2.14")
"""The first and the last version of torch with which the unit tests of all packages pass."""


def warn_if_untested() -> None:
    """Log one warning per process if torch is older or newer than the versions in :data:`TESTED`."""
    first, last = TESTED
    if _minor(first) <= _minor(torch.__version__) <= _minor(last):
        return
    logger = logging.getLogger("vescale.torch")  # of this message alone: after it the logger is silent
    logger.warning(
        "expected torch %s to %s, with which veScale is tested, got torch %s: values may differ from those of one "
        "device without an error; install a torch of this range",
        *(first, last, torch.__version__),
    )
    logger.disabled = True


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
