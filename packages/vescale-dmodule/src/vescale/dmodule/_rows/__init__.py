"""A module on this rank's rows, with the results that one device has on the rows of all ranks.

values     arguments for the rows of all ranks, and outputs to compare
joint      recordings that all ranks make together, and their errors
calls      hooks of the module: record each new call before it runs
call       plain modules: the call in progress, and what is recorded of calls that mix rows
mode       plain modules: operators that run on the rows of all ranks, and the gradients at their edges
recording  plain modules: dry runs that show which operators mix rows
program    plain modules: run recorded operators in later calls
planned    modules with a plan: the rows are one more mesh axis of their programs
rehearsal  calls of a pipeline: find what mixes rows, without the other rows
on_shapes  the same before there is a process group, as far as shapes show it
"""

from .calls import JointCalls
from .on_shapes import mixing_on_shapes
from .planned import PlannedRows
from .program import RowsProgram
from .rehearsal import Rehearsal

__all__ = ["JointCalls", "PlannedRows", "Rehearsal", "RowsProgram", "mixing_on_shapes"]
