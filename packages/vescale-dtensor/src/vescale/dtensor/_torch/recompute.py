"""Activation checkpointing: backward repeats a function in what surrounded its first run.

``torch.utils.checkpoint`` restores generators, autocast and the device. Hooks of modules restore what they open, but
only around the modules inside of the function, not around its own code::

    forward    | hook opens a context |  checkpoint(function)  |     dropout in it: in the context
    backward                             function again              dropout in it: nothing is open

So code that opens contexts which change what operators do registers a `Carrier`. It is asked when a checkpoint is made,
and what it returns is entered around the repetition. Where nothing is open, the function is passed on as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch.utils import checkpoint

from .patches import AttributePatch, PatchGroup

__all__ = ["Carrier", "carriers", "checkpoint_patch"]

Carrier = Callable[[], "Callable[[], AbstractContextManager] | None"]
"""Returns what makes a context like the one around it; None if there is none."""

carriers: list[Carrier] = []


def checkpoint_patch() -> PatchGroup:
    """Return the patch of both kinds of checkpoints, reentrant and not."""
    name = "_checkpoint_without_reentrant_generator"
    since_2_14 = f"{name}_impl"
    return PatchGroup(
        "torch.utils.checkpoint: CheckpointFunction, _checkpoint_without_reentrant_generator",
        [
            AttributePatch((checkpoint.CheckpointFunction,), "forward", _reentrant),
            AttributePatch((checkpoint,), since_2_14 if hasattr(checkpoint, since_2_14) else name, _not_reentrant),
        ],
    )


def _not_reentrant(stock: Callable) -> Callable:
    def generator(fn: Callable, *args: object, **kwargs: object) -> Iterator[None]:
        return stock(_carried(fn), *args, **kwargs)  # which calls it in backward only

    return generator


def _reentrant(stock: Callable) -> staticmethod:
    def forward(ctx: object, run_function: Callable, *args: object) -> object:
        carried = _carried(run_function)
        result = stock(ctx, run_function, *args)
        ctx.run_function = carried
        return result

    return staticmethod(forward)


def _carried(function: Callable) -> Callable:
    """Return a function that runs in what surrounds this call."""
    contexts = [make for carrier in carriers if (make := carrier()) is not None]
    if not contexts:
        return function

    def run(*args: object, **kwargs: object) -> object:
        with contextlib.ExitStack() as stack:
            for make in contexts:
                stack.enter_context(make())
            return function(*args, **kwargs)

    return run
