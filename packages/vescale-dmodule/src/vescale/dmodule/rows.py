"""For rows of a batch on several ranks or in micro-batches: see `RowsProgram`, `PlannedRows` and `Rehearsal`."""

from ._rows import JointCalls, PlannedRows, Rehearsal, RowsProgram

__all__ = ["JointCalls", "PlannedRows", "Rehearsal", "RowsProgram"]
