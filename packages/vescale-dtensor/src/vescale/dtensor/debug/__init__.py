"""Inspect a program on DTensors: its communication, its layouts and its values.

- :func:`comm_log` records every collective with its bytes, mesh axis, module and source line;
- :func:`explain` draws which rank holds which elements;
- :func:`show` prints global values, as a collective.
"""

from ._comm_log import comm_log
from ._explain import explain
from ._records import CommLog, CommRecord
from ._repr import show

__all__ = ["CommLog", "CommRecord", "comm_log", "explain", "show"]
