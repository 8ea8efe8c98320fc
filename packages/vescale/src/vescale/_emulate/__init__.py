"""All ranks of a plan in one process, for a debugger: threads that take turns, with gloo's order of additions.

turns.py      whose turn it is; what a process has once belongs to the rank that runs
store.py      by which ranks find each other
additions.py  the order of additions of gloo's ring
group.py      collectives and messages between the ranks of a group
emulate.py    the public function
"""

from .emulate import emulate

__all__ = ["emulate"]
