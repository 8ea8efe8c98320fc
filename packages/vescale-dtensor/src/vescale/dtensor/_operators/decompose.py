"""Run an operator by its definition: the simpler operators into which torch decomposes it.

**Composite operators** consist of other operators only. Outside inference mode autograd decomposes them before DTensor
dispatches them. Inference mode dispatches them undecomposed (``matmul``, ``reshape``, ``dropout``). Stock DTensor's own
or guessed rules for them gather operands that need no communication, and draw random numbers on the shard.
Decomposition gives the same operators and the same placements as outside inference mode.

**Operators with a definition.** A loss is a pointwise function and a mean. Stock DTensor uses such a definition only to
guess placements, then runs the operator itself on the shards: a mean is divided by the number of local elements.
This module runs the definition on the DTensors. Every step is an operator with a rule of its own, and results stay
sharded as far as those steps allow.
"""

from __future__ import annotations

from .._placements.rules import refuse_ragged
from .._torch import dispatch
from .gather import gather

__all__ = ["compose", "composite_handlers", "decompose"]


def composite_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handler of every composite operator."""
    return {op: decompose for op in dispatch.operators() if dispatch.is_composite(op)}


def decompose(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run the operators that define ``op``."""
    return op.decompose(*args, **kwargs)


def compose(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run torch's definition of ``op`` on the DTensors; an operator without one runs on full operands."""
    refuse_ragged(op, args, kwargs)
    definition = dispatch.decomposition(op)
    if definition is None:
        return gather(op, args, kwargs)
    return definition(*args, **kwargs)
