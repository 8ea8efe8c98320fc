"""The version of torch under test, and what packages say about other versions when they are imported."""

from __future__ import annotations

import subprocess
import sys

import torch

__all__ = ["torch_is_before", "warnings_at_import"]


def torch_is_before(version: str) -> bool:
    """Return whether torch is older than a version such as ``"2.14"``.

    For checks that stock torch is wrong, which say up to which version it is. Code that depends on a version asks what
    torch can do instead.
    """
    return _minor(torch.__version__) < _minor(version)


def warnings_at_import(*modules: str, torch_version: str) -> list[str]:
    """Return the lines that a new process logs when it imports some modules beside a torch of another version."""
    program = f"import torch; torch.__version__ = {torch_version!r}; import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=300, check=True)
    return [line for line in done.stderr.splitlines() if "veScale" in line]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
