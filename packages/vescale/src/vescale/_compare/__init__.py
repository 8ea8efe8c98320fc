"""Record two runs, and name the first tensor that differs between them.

Files, each of which imports only those before it:

digest      a part of a tensor as numbers that do not depend on the layout
holdings    which part of which global tensor this rank holds
file        a record on disk: one file per rank
pending     what a step has recorded, until its rows are known
record      the context that records a training loop
merge       the files of all ranks as digests of global tensors
tolerance   how far rounding alone can take two runs apart
result      the first difference, and the page of text about it
find        the walk in program order, and what the first difference means
api         `compare`
"""

from .api import compare
from .file import RecordError
from .record import record
from .result import Comparison, Difference

__all__ = ["Comparison", "Difference", "RecordError", "compare", "record"]
