"""How other packages hand local gradients to DDP: an attribute of the parameter, and nothing imported on either side.

A gradient of a tensor-parallel parameter is often a partial sum over the tensor-parallel ranks: that of a norm under
sequence parallelism, of a replicated bias. Whoever computes gradients outside autograd's own accumulation (static mode
of ``vescale.dmodule`` computes with plain leaves) need not reduce it first, one small collective per parameter and
micro-batch: DDP takes it as it is, and sums all of them together (`_partials.py`).

    parameter._vescale_takes_gradients     a `Taker`; missing where nobody takes gradients
        known      keys of the hooks in the parameter's tables that can do with a partial gradient. Who installs such
                   hooks adds their keys. A hook that is not in it, a user's, must see a reduced gradient: then nothing
                   partial may be left to the hooks, and `take` must not be called, as it calls no hooks
        own        those of DDP; when they are gone from the tables, so is the taker
        more       set by who calls `take`: a function that tells, while a gradient arrives by autograd at the parameter
                   itself, whether `take` will be called in the same backward
        take       one local gradient, while backward runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import Placement

from .._attributes import ParameterAttribute

__all__ = ["Taker"]


class Taker(ParameterAttribute):
    """What takes the local gradients of one parameter.

    Args:
        own: Keys of DDP's hooks.
        deliver: Takes a local gradient, its placements, and whether more will come.

    Attributes:
        own: See above, likewise `known` and `more`.
    """

    def __init__(self, own: Iterable[int], deliver: Callable[[Tensor, Sequence[Placement], bool], None]):
        self.own = frozenset(own)
        self.known = set(self.own)
        self.more: Callable[[], bool] | None = None
        self._deliver = deliver

    def take(self, local: Tensor, placements: Sequence[Placement], *, more: bool = False) -> None:
        """Take a gradient, which may be a partial sum, while backward runs.

        Args:
            local: This rank's part, of the shape of the parameter's local tensor; it is copied or added.
            placements: What it is to the whole gradient, one placement per mesh dim of the parameter.
            more: Whether another gradient of the parameter will come in this backward, on this rank.
        """
        self._deliver(local, placements, more)

    def knows(self, keys: Iterable[int]) -> bool:
        """Tell whether all hooks of the parameter, by their keys, can do with a partial gradient."""
        return self.known.issuperset(keys)

    def comes_more(self) -> bool:
        """Tell whether `take` will be called again in the running backward."""
        return self.more is not None and self.more()
