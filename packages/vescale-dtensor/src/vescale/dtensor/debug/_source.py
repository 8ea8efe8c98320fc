"""The origin of a collective, from the call stack.

The source line is that of the first frame outside of torch and of veScale. The frames of torch up to there give
the mesh over which DTensor communicates, and the operator that caused an implicit redistribution.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch import debugging

__all__ = ["CallSite", "SourceLine", "call_site", "forward_line"]

# the last two hold the wrappers of decorated functions
LIBRARIES = ("torch", "vescale", "contextlib", "typing_extensions")
STACK_ENTRY = re.compile(r'File "(?P<path>.+)", line (?P<line>\d+), in (?P<function>.+)')


@dataclass(frozen=True)
class SourceLine:
    """A line of a program.

    Attributes:
        path: of the file, as Python names it.
        line: number of the line, from 1.
        function: name of the function it is in.
    """

    path: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line itself, or "" where the file cannot be read."""
        return linecache.getline(self.path, self.line).strip()

    @property
    def short(self) -> str:
        """File name and number: ``train.py:31``."""
        return f"{Path(self.path).name}:{self.line}"

    def __str__(self) -> str:
        inside = os.path.relpath(self.path) if self.path.startswith(os.getcwd() + os.sep) else self.path
        return f"{inside}:{self.line}"


def _callers() -> Iterator[FrameType]:
    """Yield the frames of this thread, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame belongs to neither torch nor veScale."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES


def _line_of(frame: FrameType) -> SourceLine | None:
    """Return the current line of a frame; None for the start of a thread, which belongs to no program."""
    if frame.f_globals.get("__name__") == "threading":
        return None
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def forward_line(stack: Sequence[str]) -> SourceLine | None:
    """Return the innermost line of the user's program in a formatted stack, outermost entry first."""
    installed = str(Path(torch.__file__).parent) + os.sep
    for entry in reversed(stack):
        match = STACK_ENTRY.search(entry)
        if match and not match["path"].startswith(installed) and f"{os.sep}vescale{os.sep}" not in match["path"]:
            return SourceLine(match["path"], int(match["line"]), match["function"])
    return None


@dataclass(frozen=True)
class CallSite:
    """The origin of a collective.

    Attributes:
        line: the innermost line of the user's program, or None in a thread without one.
        mesh: the mesh over which DTensor communicates, or None if other code communicates.
        cause: the operator whose operands are redistributed implicitly, or "".
    """

    line: SourceLine | None
    mesh: DeviceMesh | None
    cause: str


def call_site() -> CallSite:
    """Return the call site of the running code in this thread."""
    line, mesh, cause = None, None, ""
    for frame in _callers():
        if _is_users(frame):
            line = _line_of(frame)
            break
        mesh = mesh or debugging.mesh_in(frame)
        cause = cause or debugging.cause_of(frame)
    return CallSite(line, mesh, cause)
