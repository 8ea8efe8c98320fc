"""``multinomial``: one draw from each row of a tensor of probabilities.

Without replacement (or for one sample) stock torch divides the probabilities by an exponential draw of their shape and
takes the largest of each row; with replacement its CPU kernel takes two words of the generator for each sample, row by
row, whatever the probabilities are. Either way a rank needs whole rows, and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._torch import dispatch as _torch
from ...errors import UnsupportedRandomOperator
from ..global_position import WINDOWS, Place, place_of
from .draw import skip_words
from .fills import check_out, copy_to_out, empty_like, fill, local_of

__all__ = ["row_handlers"]

aten = torch.ops.aten


def row_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handlers of all operators of this file."""
    return {aten.multinomial.default: _multinomial, aten.multinomial.out: _multinomial_out}


def _multinomial(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Draw ``num_samples`` category numbers (int64) from each row; rows that are sharded by columns are gathered."""
    p, num_samples, replacement = (*args, False)[:3]
    _check_arguments(p, num_samples, replacement)
    meta = op(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"), num_samples, replacement)
    windows = WINDOWS.get()
    if windows and p.ndim < 2:
        raise UnsupportedRandomOperator.for_tensor(op, p, "draw it outside random.local_batch: it has no batch dim")
    rows = _with_whole_rows(op, p)
    place = place_of(op, rows, windows)
    _check(local_of(rows))
    if replacement and num_samples > 1:
        drawn = _with_replacement(op, rows, place, num_samples, kwargs)
    else:
        drawn = _largest(rows, num_samples, kwargs)
    if not isinstance(rows, DTensor):
        return drawn
    return _torch.wrap(drawn, rows.device_mesh, rows.placements, meta)


def _multinomial_out(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    p, out = args[0], kwargs["out"]
    check_out(op, out, torch.Size((*p.shape[:-1], args[1])), _with_whole_rows(op, p))
    return copy_to_out(_multinomial(aten.multinomial.default, args, {"generator": kwargs.get("generator")}), out)


def _with_whole_rows(op: _torch.Op, p: Tensor) -> Tensor:
    """Return ``p`` sharded over rows only."""
    if not isinstance(p, DTensor):
        return p
    if any(placement.is_partial() for placement in p.placements):
        raise UnsupportedRandomOperator.for_tensor(
            op, p, "redistribute to Shard or Replicate before the random operator"
        )
    kept = tuple(each if _is_over_rows(each, p.ndim) else Replicate() for each in p.placements)
    if kept == p.placements:
        return p
    if not all(isinstance(each, (Shard, Replicate)) or _torch.is_strided_shard(each) for each in p.placements):
        raise UnsupportedRandomOperator.for_tensor(op, p, "redistribute it to Shard(0) or Replicate first")
    return _torch.wrap(_torch.redistributed(p, kept, for_op=op), p.device_mesh, kept, p)


def _is_over_rows(placement: object, ndim: int) -> bool:
    return getattr(placement, "dim", None) == 0 and ndim == 2


def _check_arguments(p: Tensor, num_samples: int, replacement: bool) -> None:
    if p.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > p.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")


def _check(p: Tensor) -> None:
    if not p.numel():
        return
    if not ((p >= 0) & (p < float("inf"))).all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if (p.sum(dim=-1) == 0).any():
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


def _largest(rows: Tensor, num_samples: int, kwargs: dict) -> Tensor:
    local = local_of(rows)
    q = fill(aten.exponential_.default, (empty_like(rows), 1.0), kwargs)
    if not local.numel():  # nothing is held, in whatever shape the mesh gives to nothing
        return torch.empty(0, num_samples, dtype=torch.int64, device=local.device)[: len(local)]
    q = torch.div(local, local_of(q))
    return q.argmax(dim=-1, keepdim=True) if num_samples == 1 else q.topk(num_samples).indices


def _with_replacement(op: _torch.Op, rows: Tensor, place: Place, num_samples: int, kwargs: dict) -> Tensor:
    local, generator = local_of(rows), kwargs.get("generator")
    if local.device.type != "cpu":
        raise UnsupportedRandomOperator.for_tensor(op, rows, "draw one sample at a time, or without replacement")
    if rows.ndim == 1:
        if not place.pieces:
            skip_words(2 * num_samples, generator)
            return torch.empty(0, num_samples, dtype=torch.int64)
        return op(local, num_samples, True, generator=generator)
    drawn = torch.empty(len(local), num_samples, dtype=torch.int64)
    position = 0
    for (offsets, sizes), piece in zip(place.boxes, place.pieces, strict=True):
        skip_words(2 * num_samples * (offsets[0] - position), generator)
        first, position = piece.origin[0], offsets[0] + sizes[0]
        drawn[first : first + sizes[0]] = op(piece.view(local), num_samples, True, generator=generator)
    skip_words(2 * num_samples * (place.shape[0] - position), generator)
    return drawn
