"""Rules of the stream "philox" for operators that choose: ``randperm`` and ``multinomial``.

Both are defined by independent random numbers, one for each element of a tensor, so that rows can be drawn alone:

* ``randperm(n)`` sorts the positions by 63-bit words, equal words by position;
* ``multinomial`` without replacement takes the categories with the largest ``p / E``, where ``E`` is exponential: the
  first is category ``i`` with probability ``p[i] / sum(p)``, and so on with those that are left;
* ``multinomial`` with replacement looks up a uniform number for each sample in the cumulated probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..._torch.dispatch import wrap
from ...errors import UnsupportedRandomOperator
from ..global_position import local_of, position_of
from .elements import Draw
from .fills import Rule
from .values import OpenUnit, Uniform, Words64

__all__ = ["choice_rules"]

aten = torch.ops.aten


def choice_rules() -> dict[str, Rule]:
    """Return the rules, by operator name."""
    return {"randperm": _randperm, "randperm.generator": _randperm, "multinomial": _multinomial}


def _randperm(draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    if draw.windows:
        raise UnsupportedRandomOperator.for_tensor(
            draw.op, None, "call it outside random.local_batch, or draw a tensor whose dim 0 is the batch"
        )
    options = {key: value for key, value in kwargs.items() if key != "generator" and value is not None}
    dtype = options.pop("dtype", torch.int64)
    words = torch.empty(args[0], dtype=torch.int64, **options)
    draw.fill(Words64(), words, Tensor.copy_)
    return words.argsort(stable=True).to(dtype)


def _multinomial(draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    weights, num_samples, replacement = (*args, *(kwargs.get("replacement", False),) * (3 - len(args)))[:3]
    _check(draw, weights, num_samples, replacement)
    rows = _rows(weights)
    local = local_of(weights).double()
    if rows is None:  # this rank holds no row
        chosen = local.new_empty((0, num_samples), dtype=torch.int64)
    elif replacement:
        chosen = _with_replacement(draw, weights, local, num_samples)
    else:
        exponential = torch.empty_like(local)
        for unit, _, view in draw.each(OpenUnit(), weights, exponential):
            view.copy_(unit.log().neg_())
        chosen = (local / exponential).topk(num_samples, dim=-1).indices
    if not isinstance(weights, DTensor):
        return chosen
    like = torch.empty((*weights.shape[:-1], num_samples), dtype=torch.int64, device="meta")
    return wrap(chosen, weights.device_mesh, weights.placements, like)


def _with_replacement(draw: Draw, weights: Tensor, local: Tensor, num_samples: int) -> Tensor:
    unit = local.new_empty((*local.shape[:-1], num_samples))
    shape = (*weights.shape[:-1], num_samples)
    like = unit
    if isinstance(weights, DTensor):
        meta = torch.empty(shape, dtype=unit.dtype, device="meta")
        like = wrap(unit, weights.device_mesh, weights.placements, meta)
    for values, view in draw.each(Uniform(torch.float64), like):
        view.copy_(values)
    cumulated = local.cumsum(dim=-1)
    index = torch.searchsorted(cumulated, unit.mul_(cumulated[..., -1:]), right=True)
    # rounding may lift a sample to the total: it belongs to the last category that can be chosen
    last = (local > 0).to(torch.int64).mul_(torch.arange(local.shape[-1], device=local.device)).amax(-1, keepdim=True)
    return torch.minimum(index, last)


def _rows(weights: Tensor) -> int | None:
    local = local_of(weights)
    return None if local.numel() == 0 and isinstance(weights, DTensor) else local.shape[0]


def _check(draw: Draw, weights: Tensor, num_samples: int, replacement: bool) -> None:
    """Raise unless ``weights`` is a distribution and this rank holds full rows of it."""
    op = draw.op
    if weights.ndim not in (1, 2) or weights.shape[-1] == 0:
        raise RuntimeError(
            f"{op} expects weights of 1 or 2 dims with at least one category, got shape {tuple(weights.shape)}"
        )
    if not weights.dtype.is_floating_point:
        raise RuntimeError(f"{op} expects floating-point weights, got {weights.dtype}")
    if num_samples <= 0 or (not replacement and num_samples > weights.shape[-1]):
        raise RuntimeError(
            f"{op}: cannot take {num_samples} samples from {weights.shape[-1]} categories, replacement={replacement}"
        )
    position_of(op, weights, draw.windows, logical=True)
    if isinstance(weights, DTensor):
        if any(
            not p.is_replicate() and not (type(p) is Shard and p.dim < weights.ndim - 1) for p in weights.placements
        ):
            raise UnsupportedRandomOperator.for_tensor(op, weights, "redistribute so that every rank holds full rows")
    elif draw.windows and weights.ndim == 1:
        raise UnsupportedRandomOperator.for_tensor(op, weights, "give it the batch as dim 0")
    _check_values(op, local_of(weights), num_samples, replacement)


def _check_values(op: object, weights: Tensor, num_samples: int, replacement: bool) -> None:
    if weights.numel() == 0 or weights.device.type != "cpu":  # elsewhere the check would block the host
        return
    needed = 1 if replacement else num_samples
    if not bool(torch.isfinite(weights).all() & (weights >= 0).all() & ((weights > 0).sum(-1) >= needed).all()):
        raise RuntimeError(
            f"{op} expects finite weights >= 0 with at least {needed} positive ones in each row, and got others"
        )
