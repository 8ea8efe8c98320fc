"""Why a collective is issued, read from the call stack: the user's line, DTensor's mesh, and the operator behind it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from .._torch import debugging as _torch
from ._source import SourceLine, callers, is_users, line_of

__all__ = ["CallSite", "call_site"]


@dataclass(frozen=True)
class CallSite:
    """What the call stack says.

    Attributes:
        line: the innermost line of the user's program, or None in a thread that no line of it started.
        mesh: the mesh over which DTensor communicates, or None where it is not DTensor that does.
        cause: the operator whose operands are made to fit, or "" where that is not the reason.
    """

    line: SourceLine | None
    mesh: DeviceMesh | None
    cause: str


def call_site() -> CallSite:
    """Return the call site of what runs in this thread."""
    line, mesh, cause = None, None, ""
    for frame in callers():
        if is_users(frame):
            line = line_of(frame)
            break
        mesh = mesh or _torch.mesh_in(frame)
        cause = cause or _torch.cause_of(frame)
    return CallSite(line, mesh, cause)
