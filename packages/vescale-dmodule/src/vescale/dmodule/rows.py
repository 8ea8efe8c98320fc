"""For data parallelism, which gives every rank other rows of a batch: see `RowsProgram` and `PlannedRows`."""

from ._rows import JointCalls, PlannedRows, RowsProgram

__all__ = ["JointCalls", "PlannedRows", "RowsProgram"]
