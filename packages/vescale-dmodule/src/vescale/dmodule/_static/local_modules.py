"""Modules whose code must change to be correct on local tensors.

- ``nn.Embedding`` with a sharded vocabulary looks up the tokens in its own rows and returns zeros for all others. The
  sum over ranks is then the lookup of one device::

      tokens            7  2  5  0
      rows 0..3, rank 0 .  v  .  v          rows 4..7, rank 1   v  .  v  .

- ``nn.MultiheadAttention`` whose weights are sharded over heads runs with the heads of this rank.
- A linear layer whose weight is sharded over its input returns partial sums. Its bias must be added by one rank only.

They match the operator rules of ``vescale.dtensor`` in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vescale.dtensor.extension import chunk

from .. import _torch
from .._execution.heads import forward_of_heads, has_part_of_heads
from .._execution.patch import Row, attribute_rows

__all__ = ["local_forward", "local_rows", "silent_axes", "summed_dim"]

# contracted dim of the weight, by class name: Hugging Face's Conv1D holds the transpose of a linear's weight
SUMMED_DIM = {"Linear": 1, "Conv1D": 0}


def local_rows(modules: Mapping[str, nn.Module], attributes: Mapping[str, Mapping[str, object]]) -> list[Row]:
    """Return the patch rows that make modules correct on local tensors.

    Args:
        modules: name -> module.
        attributes: module name -> dotted attribute -> its value on local tensors, from the plan.
    """
    rows: list[Row] = []
    for name, module in modules.items():
        rows += attribute_rows(module, attributes.get(name, {}))
        if (forward := local_forward(module)) is not None:
            rows.append((vars(module), "forward", forward))
    return rows


def silent_axes(module: nn.Module, key: str) -> tuple[int, ...]:
    """Return the axes along which only the first rank adds a parameter: those of the weight for a row-parallel bias."""
    if key != "bias":
        return ()
    weight, dim = _weight_of(module), summed_dim(module)
    if dim is None or not isinstance(weight, DTensor) or weight.ndim != 2:
        return ()
    return tuple(axis for axis, placement in enumerate(weight.placements) if placement.is_shard(dim))


def _weight_of(module: nn.Module) -> Tensor | None:
    """Return the parameter of that name. An attribute may be computed at each access, and change state by that."""
    return _torch.tensor_tables(module)[0].get("weight")


def summed_dim(module: nn.Module) -> int | None:
    """Return the dim of its weight over which a linear layer sums; None for other modules."""
    return next((SUMMED_DIM[c.__name__] for c in type(module).__mro__ if c.__name__ in SUMMED_DIM), None)


def local_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the local forward of an embedding with a sharded vocabulary, or of sharded heads; None for others."""
    if isinstance(module, nn.MultiheadAttention):
        return forward_of_heads(module) if has_part_of_heads(module.parameters()) else None
    weight = _weight_of(module)
    if not isinstance(module, nn.Embedding) or not isinstance(weight, DTensor):
        return None
    rows = [axis for axis, placement in enumerate(weight.placements) if placement == Shard(0)]
    if not rows or any(p.is_shard(0) and p != Shard(0) for p in weight.placements):
        return None
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return None
    lookup = _VocabularyShard(module, _first_row(weight, rows))
    return lookup if type(module).forward is nn.Embedding.forward else _in_forward_of(module, lookup)


def _in_forward_of(module: nn.Embedding, lookup: _VocabularyShard) -> Callable[..., Tensor]:
    """Return the forward of an embedding subclass (which may scale the rows, for example) with the local lookup."""
    own = module.forward

    def forward(*args: object, **kwargs: object) -> Tensor:
        with _Lookups(lookup):
            return own(*args, **kwargs)

    return forward


def _first_row(weight: DTensor, axes: list[int]) -> int:
    """Return the first row on this rank; several axes may cut the dim, each into chunks of chunks."""
    first, size = 0, weight.shape[0]
    for axis in axes:
        start, size = chunk(size, weight.device_mesh.size(axis), weight.device_mesh.get_local_rank(axis))
        first += start
    return first


class _Lookups(TorchFunctionMode):
    """Replace lookups in a module's own weight by lookups in this rank's rows."""

    def __init__(self, lookup: _VocabularyShard):
        super().__init__()
        self.lookup = lookup

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if func is functional.embedding and weight is self.lookup.module.weight:
            return self.lookup(args[0] if args else kwargs["input"])
        return func(*args, **kwargs)


class _VocabularyShard:
    """Forward of an embedding over this rank's shard of the vocabulary."""

    def __init__(self, module: nn.Embedding, first: int):
        self.module, self.first = module, first

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the argument is that of the module
        weight, padding = self.module.weight, self.module.padding_idx
        num_rows = weight.shape[0]
        elsewhere = (input < self.first) | (input >= self.first + num_rows)
        if num_rows == 0:
            return weight.new_zeros((*input.shape, weight.shape[1])) + weight.sum()
        here = None if padding is None or not 0 <= padding - self.first < num_rows else padding - self.first
        rows = functional.embedding((input - self.first).masked_fill(elsewhere, 0), weight, padding_idx=here)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)
