"""For data parallelism, which gives every rank other rows of a batch: see `RowsProgram`."""

from ._rows import RowsProgram

__all__ = ["RowsProgram"]
