"""What rehearsals have found, for the calls that share it.

On local tensors a value is recognised by its place and its local shape. That is enough as long as one local shape at
one place always means the same. A sequence of 8 and one of 7 over two ranks both give the first rank 4. So calls whose
values look alike but lie differently have findings of their own, and the signature of a call chooses. Nearly all
programs have one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import Placement

from ..._compile.blocks import CompiledBlocks
from ..draws import Draw
from .observe import Crossing, Crossings

__all__ = ["Findings", "Recomputations"]

Placements = tuple[Placement, ...]

MANY = 1 << 16  # calls of parts that may still be recomputed


@dataclass(eq=False)
class Findings:
    """Layouts of values, as calls with some signatures have them.

    Attributes:
        crossings: by place and local shape.
        steps: conversions of boundaries, by place and local shape.
        draws: draws of sharded tensors, by module.
        tokens: how the tokens of experts lie, by name of the experts.
        blocks: compiled for these calls, None in static mode.
    """

    crossings: Crossings = field(default_factory=Crossings)
    steps: dict[str, dict[tuple[int, ...], Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    draws: dict[str, list[Draw]] = field(default_factory=dict)
    tokens: dict[str, Placements] = field(default_factory=dict)
    blocks: CompiledBlocks | None = None

    def fits(
        self,
        crossings: Iterable[Crossing],
        draws: Mapping[str, Iterable[Draw]],
        tokens: Mapping[str, Placements],
    ) -> bool:
        """Tell whether what another rehearsal found can be added."""
        if any(self.crossings.conflict(crossing) is not None for crossing in crossings):
            return False
        if any(self.tokens.get(name, layout) != layout for name, layout in tokens.items()):
            return False
        return all(draw.agrees(old) for name, new in draws.items() for draw in new for old in self.draws.get(name, ()))

    def add_draws(self, name: str, draws: Iterable[Draw]) -> None:
        """Add the draws of a module; of two that look the same, the one whose gradients are known is kept."""
        known = {draw.key: draw for draw in self.draws.get(name, ())}
        for draw in draws:
            old = known.get(draw.key)
            if old is None or all(gradient is None for gradient in old.gradients):
                known[draw.key] = draw
        self.draws[name] = list(known.values())


class Recomputations:
    """Remembers by which findings parts ran that activation checkpointing may run again, by their first operand.

    The operand is alive until then, so its address is its own. Parts that ran before there was a choice are not in it.
    """

    def __init__(self):
        self._calls: dict[tuple[str, int], Findings] = {}

    def note(self, name: str, args: tuple, kwargs: dict, findings: Findings) -> None:
        """Note a call of a part."""
        key = _key(name, args, kwargs)
        self._calls.pop(key, None)
        self._calls[key] = findings
        if len(self._calls) > MANY:
            del self._calls[next(iter(self._calls))]

    def find(self, name: str, args: tuple, kwargs: dict) -> Findings | None:
        """Return by which findings a part ran with these operands."""
        return self._calls.get(_key(name, args, kwargs))


def _key(name: str, args: tuple, kwargs: dict) -> tuple[str, int]:
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return name, 0 if first is None else first.data_ptr()
