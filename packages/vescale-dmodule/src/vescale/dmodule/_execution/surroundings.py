"""What surrounds a call while it runs, for functions that activation checkpointing repeats in backward.

Hooks of modules open contexts again when backward repeats a module. Around a function no hook runs: the forward of a
layer of Hugging Face, or a method that a module checkpoints itself. So code that opens such a context says so with
`surround`, and a checkpoint that is made meanwhile enters what it gives around the repetition::

    forward     program opens, mode of module "h.0" at its 3rd operator  ->  checkpoint(function)
    backward    the same program, with the same layouts, from the 3rd operator of "h.0" on: function again
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from vescale.dtensor import extension

__all__ = ["surround", "surrounding"]

Make = Callable[[], AbstractContextManager]
Carrier = Callable[[], Make | None]
"""Returns what makes a context like the one that is open; None if there is nothing to repeat."""


class _Thread(threading.local):
    """What surrounds the running call in this thread, outermost first."""

    def __init__(self) -> None:
        self.carriers: list[Carrier] = []


_here = _Thread()


def surround(carrier: Carrier) -> contextlib.ExitStack:
    """Ask a carrier about checkpoints that are made until the result is closed; it is asked once, if it is there."""
    stack, carriers = contextlib.ExitStack(), _here.carriers
    if carrier not in carriers:
        carriers.append(carrier)
        stack.callback(carriers.remove, carrier)
    return stack


@contextlib.contextmanager
def surrounding(carrier: Carrier) -> Iterator[None]:
    """Ask a carrier about checkpoints that are made while the context is open."""
    with surround(carrier):
        yield


def _carry() -> Make | None:
    contexts = [make for carrier in _here.carriers if (make := carrier()) is not None]
    return functools.partial(_again, contexts) if contexts else None


@contextlib.contextmanager
def _again(contexts: Sequence[Make]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for make in contexts:
            stack.enter_context(make())
        yield


extension.carriers.append(_carry)
