"""For rows of a batch on several ranks or in micro-batches.

See `RowsProgram`, `PlannedRows`, `Rehearsal` and `mixing_on_shapes`. `in_dry_run` returns whether the calls in progress
are repetitions whose effects are undone.
"""

from ._rows import JointCalls, PlannedRows, Rehearsal, RowsProgram, mixing_on_shapes
from ._static.recording.dry_run import in_dry_run

__all__ = ["JointCalls", "PlannedRows", "Rehearsal", "RowsProgram", "in_dry_run", "mixing_on_shapes"]
