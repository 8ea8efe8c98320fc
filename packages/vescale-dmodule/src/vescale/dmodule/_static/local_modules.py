"""Modules whose code is right on local tensors only with help that any program would give them.

- ``nn.Embedding`` with a sharded vocabulary looks up the tokens of its own rows and has zeros for the others, so that
  the sum over ranks is the lookup of one device::

      tokens            7  2  5  0
      rows 0..3 here    .  v  .  v          rows 4..7 there   v  .  v  .

- a linear layer whose weight is sharded over its input gives partial sums: its bias must be added once, not by every
  rank.

Both do what the rules of ``vescale.dtensor`` do in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .patch import Row, attribute_rows

__all__ = ["local_forward", "local_rows", "silent_axes"]

# dim of the weight that is summed over, by class name: Hugging Face's Conv1D holds the transpose of a linear's weight
SUMMED_DIM = {"Linear": 1, "Conv1D": 0}


def local_rows(modules: Mapping[str, nn.Module], attributes: Mapping[str, Mapping[str, object]]) -> list[Row]:
    """Return the rows that make modules right on local tensors.

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
    """Return the axes along which only the first rank adds the parameter ``key`` of ``module``: a row-parallel bias."""
    if key != "bias":
        return ()
    weight, dim = getattr(module, "weight", None), _summed_dim(module)
    if dim is None or not isinstance(weight, DTensor) or weight.ndim != 2:
        return ()
    return tuple(axis for axis, placement in enumerate(weight.placements) if placement.is_shard(dim))


def _summed_dim(module: nn.Module) -> int | None:
    return next((SUMMED_DIM[c.__name__] for c in type(module).__mro__ if c.__name__ in SUMMED_DIM), None)


def local_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the forward of an embedding whose vocabulary is sharded, for local tensors; None for other modules."""
    weight = getattr(module, "weight", None)
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
    """Return the forward of a subclass, which scales what it looks up or so, with our lookup inside."""
    own = module.forward

    def forward(*args: object, **kwargs: object) -> Tensor:
        with _Lookups(lookup):
            return own(*args, **kwargs)

    return forward


def _first_row(weight: DTensor, axes: list[int]) -> int:
    """Return the first row that this rank holds: chunks of chunks, as several axes on one dim cut it."""
    first, size = 0, weight.shape[0]
    for axis in axes:
        chunk, coord = -(-size // weight.device_mesh.size(axis)), weight.device_mesh.get_local_rank(axis)
        start = min(chunk * coord, size)
        first, size = first + start, min(chunk, size - start)
    return first


class _Lookups(TorchFunctionMode):
    """Answer lookups of a module's own weight by those of this rank's rows."""

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
    """Forward of an embedding over a part of the vocabulary."""

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
