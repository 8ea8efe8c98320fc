"""The origin of a collective, from the call stack: the user's line, DTensor's mesh, and the operator that caused it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from .._torch.debugging import cause_of, mesh_in
from ._source import SourceLine, callers, is_users, line_of

__all__ = ["CallSite", "call_site"]


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
    for frame in callers():
        if is_users(frame):
            line = line_of(frame)
            break
        mesh = mesh or mesh_in(frame)
        cause = cause or cause_of(frame)
    return CallSite(line, mesh, cause)
