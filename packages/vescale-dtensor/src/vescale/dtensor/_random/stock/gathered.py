"""Operators whose random numbers depend on values that other ranks hold. The input is gathered before the draw.

=====================================================  ============================================================
``poisson binomial _standard_gamma _sample_dirichlet``  rejection: an element takes a variable number of random numbers
``rrelu`` in training                                  draws for elements that are not positive only
``randperm(out=)``                                     each element depends on all others
``multinomial``                                        a row depends on all probabilities of the row
=====================================================  ============================================================

For all but the last, every rank gathers the full input, runs the stock operator and keeps its part; scratch has the
size of the global tensors. `multinomial` gathers rows only, where columns are sharded. Without replacement (or for one
sample) stock torch divides the probabilities by an exponential draw of their shape and takes the largest of each row.
With replacement its CPU kernel takes two words of the generator for each sample, row by row, for any probabilities.

Each gather is an implicit redistribution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..._placements.types import BlockShard
from ..._torch import dispatch
from ...errors import UnsupportedRandomOperator
from ..global_position import WINDOWS, GlobalPosition, local_of, position_of
from .draw import skip_words
from .fills import check_out, copy_to_out, empty_like, fill

__all__ = ["gathered_handlers"]

aten = torch.ops.aten

SAMPLERS = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


def gathered_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of all operators of this file."""
    table: dict[dispatch.Op, dispatch.Handler] = {}
    for name in SAMPLERS:
        op = dispatch.overload(name)
        table[op] = _sample
        table[dispatch.overload(f"{name}.out")] = functools.partial(_sample_out, op)
    return table | {
        aten.multinomial.default: _multinomial,
        aten.multinomial.out: _multinomial_out,
        aten.rrelu_with_noise.default: _rrelu,
        aten.rrelu_with_noise.out: _rrelu,
        aten.rrelu_with_noise_.default: _rrelu,
        aten.rrelu_with_noise_functional.default: _rrelu_functional,
        aten.randperm.out: _randperm,
        aten.randperm.generator_out: _randperm,
    }


def _full(op: dispatch.Op, tensor: Tensor) -> Tensor:
    """Return the global tensor with its own strides, gathered where it is sharded.

    Raises:
        UnsupportedRandomOperator: it is one part of a batch, whose other parts this rank does not have; the rank is
            outside the mesh; or torch does not gather placements of this kind.
    """
    position_of(op, tensor)
    if not isinstance(tensor, DTensor) or WINDOWS.get():
        way_out = "call it outside random.local_batch: its random numbers depend on the values of the whole batch"
    elif tensor.device_mesh.get_coordinate() is None:
        way_out = "this rank is not in its mesh, and the random numbers depend on its values: call it inside only"
    elif not all(
        isinstance(p, (Shard, BlockShard, Replicate)) or dispatch.is_strided_shard(p) for p in tensor.placements
    ):
        way_out = "redistribute it to Shard or Replicate first"
    else:
        full = dispatch.redistributed(tensor, [Replicate()] * tensor.device_mesh.ndim, for_op=op)
        if full.stride() == tensor.stride():
            return full
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=full.dtype, device=full.device).copy_(full)
    raise UnsupportedRandomOperator.for_tensor(op, tensor, way_out)


def _kept(op: dispatch.Op, full: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a full result, with the placements of an input of the same shape."""
    position = position_of(op, like, ())
    local = torch.empty_like(local_of(like), dtype=full.dtype, memory_format=torch.contiguous_format)
    position.keep(full, local)
    return dispatch.wrap(local, like.device_mesh, like.placements, full)


def _sample(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    like = _check_same(op, tensors)
    rest = [arg for arg in args if not isinstance(arg, Tensor)]
    drawn = op(*(_full(op, tensor) for tensor in tensors), *rest, **kwargs)
    if op is aten._sample_dirichlet.default or drawn.shape == like.shape:
        return _kept(op, drawn, like)
    raise AssertionError(f"{op} of {tuple(like.shape)} gave {tuple(drawn.shape)}")


def _check_same(op: dispatch.Op, tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors[1:]:
        check_out(op, tensor, first.shape, first)
    return first


def _sample_out(functional: dispatch.Op, op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    check_out(op, kwargs["out"], args[0].shape, args[0])
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    return copy_to_out(_sample(functional, args, rest), kwargs["out"])


# ------------------------------------------------------------------------------------------------- rrelu


def _rrelu(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """``rrelu_with_noise(x, noise, lower, upper, training)``, in place and with ``out`` alike; writes ``noise``."""
    x, noise, *rest = args
    out = x if op is aten.rrelu_with_noise_.default else kwargs.get("out")
    for target in (noise, out):
        if target is not None:
            check_out(op, target, x.shape, x)
    result, drawn = _rrelu_draw(op, x, noise, rest, {"generator": kwargs.get("generator")})
    if drawn is not None:
        copy_to_out(drawn, noise)
    return result if out is None else copy_to_out(result, out)


def _rrelu_functional(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    x, noise, *rest = args
    check_out(op, noise, x.shape, x)
    result, drawn = _rrelu_draw(op, x, noise, rest, kwargs)
    return result, noise.clone() if drawn is None else drawn


def _rrelu_draw(op: dispatch.Op, x: Tensor, like: Tensor, rest: list, kwargs: dict) -> tuple[Tensor, Tensor | None]:
    """Return the activation, and the noise where there is one, in the memory order of ``like``: torch draws into it."""
    lower, upper, training = (*rest, *(1 / 8, 1 / 3, False)[len(rest) :])
    if not training:
        return aten.leaky_relu.default(x.contiguous(), (lower + upper) / 2), None
    full = _full(op, x)
    noise = torch.empty_strided(like.shape, like.stride(), dtype=full.dtype, device=full.device)
    result = aten.rrelu_with_noise.default(full, noise, lower, upper, True, **kwargs)
    return _kept(op, result, x), _kept(op, noise, x)


# ------------------------------------------------------------------------------------------------- permutations


def _randperm(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    out = kwargs["out"]
    (n,) = args
    if tuple(out.shape) != (n,) or WINDOWS.get():
        raise UnsupportedRandomOperator.for_tensor(
            op, out, f"give `out` the shape {(n,)}, and call it outside random.local_batch"
        )
    position = position_of(op, out, ())
    local = local_of(out)
    position.keep(torch.randperm(n, generator=kwargs.get("generator"), dtype=out.dtype, device=local.device), local)
    return out


# ------------------------------------------------------------------------------------------------- multinomial


def _multinomial(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Draw ``num_samples`` category numbers (int64) from each row; rows that are sharded by columns are gathered."""
    p, num_samples, replacement = (*args, False)[:3]
    _check_arguments(p, num_samples, replacement)
    meta = op(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"), num_samples, replacement)
    windows = WINDOWS.get()
    if windows and p.ndim < 2:
        raise UnsupportedRandomOperator.for_tensor(op, p, "call it outside random.local_batch: it has no batch dim")
    rows = _with_full_rows(op, p)
    position = position_of(op, rows, windows)
    _check(local_of(rows))
    if replacement and num_samples > 1:
        drawn = _with_replacement(op, rows, position, num_samples, kwargs)
    else:
        drawn = _largest(rows, num_samples, kwargs)
    if not isinstance(rows, DTensor):
        return drawn
    return dispatch.wrap(drawn, rows.device_mesh, rows.placements, meta)


def _multinomial_out(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    p, out = args[0], kwargs["out"]
    check_out(op, out, torch.Size((*p.shape[:-1], args[1])), _with_full_rows(op, p))
    return copy_to_out(_multinomial(aten.multinomial.default, args, {"generator": kwargs.get("generator")}), out)


def _with_full_rows(op: dispatch.Op, p: Tensor) -> Tensor:
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
    if not all(
        isinstance(each, (Shard, BlockShard, Replicate)) or dispatch.is_strided_shard(each) for each in p.placements
    ):
        raise UnsupportedRandomOperator.for_tensor(op, p, "redistribute it to Shard(0) or Replicate first")
    return dispatch.wrap(dispatch.redistributed(p, kept, for_op=op), p.device_mesh, kept, p)


def _can_be_gathered(placement: Placement) -> bool:
    return isinstance(placement, (Shard, BlockShard, Replicate)) or dispatch.is_strided_shard(placement)


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
    if not local.numel():  # an empty shard may have any shape
        return torch.empty(0, num_samples, dtype=torch.int64, device=local.device)[: len(local)]
    q = torch.div(local, local_of(q))
    return q.argmax(dim=-1, keepdim=True) if num_samples == 1 else q.topk(num_samples).indices


def _with_replacement(
    op: dispatch.Op, rows: Tensor, position: GlobalPosition, num_samples: int, kwargs: dict
) -> Tensor:
    local, generator = local_of(rows), kwargs.get("generator")
    if local.device.type != "cpu":
        raise UnsupportedRandomOperator.for_tensor(op, rows, "draw one sample at a time, or without replacement")
    if rows.ndim == 1:
        if not position.pieces:
            skip_words(2 * num_samples, generator)
            return torch.empty(0, num_samples, dtype=torch.int64)
        return op(local, num_samples, True, generator=generator)
    drawn = torch.empty(len(local), num_samples, dtype=torch.int64)
    row = 0
    for (offsets, sizes), piece in zip(position.boxes, position.pieces, strict=True):
        skip_words(2 * num_samples * (offsets[0] - row), generator)
        first, row = piece.origin[0], offsets[0] + sizes[0]
        drawn[first : first + sizes[0]] = op(piece.view(local), num_samples, True, generator=generator)
    skip_words(2 * num_samples * (position.shape[0] - row), generator)
    return drawn
