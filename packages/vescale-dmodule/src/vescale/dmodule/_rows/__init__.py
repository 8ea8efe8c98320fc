"""A module on this rank's rows, with the results that one device has on the rows of all ranks.

values     arguments for the rows of all ranks, and outputs to compare
call       the call in progress, and what is recorded of calls that mix rows
mode       operators that run on the rows of all ranks, and the gradients at their edges
recording  dry runs that show which operators mix rows
program    hooks of the module: record new calls, run recorded operators in later ones
"""

from .program import RowsProgram

__all__ = ["RowsProgram"]
