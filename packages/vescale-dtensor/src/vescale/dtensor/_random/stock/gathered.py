"""Operators that cannot be drawn in pieces: how many random numbers an element takes depends on values before it.

``poisson``, ``binomial``, the Gamma and Dirichlet samplers (rejection) and the training mode of ``rrelu`` (it draws for
elements that are not positive) are walked over the whole input by every rank, and each keeps its part. The input is
gathered first, an implicit redistribution; scratch is of the size of the global tensors. ``randperm`` into a sharded
``out`` is drawn whole, too: each of its elements depends on all others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._torch import dispatch as _torch
from ...errors import UnsupportedRandomOperator
from ..global_position import WINDOWS, place_of
from .fills import check_out, copy_to_out, local_of

__all__ = ["gathered_handlers"]

aten = torch.ops.aten

SAMPLERS = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


def gathered_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handlers of all operators of this file."""
    table: dict[_torch.Op, _torch.Handler] = {}
    for name in SAMPLERS:
        op = _torch.overload(name)
        table[op] = _sample
        table[_torch.overload(f"{name}.out")] = functools.partial(_sample_out, op)
    return table | {
        aten.rrelu_with_noise.default: _rrelu,
        aten.rrelu_with_noise.out: _rrelu,
        aten.rrelu_with_noise_.default: _rrelu,
        aten.rrelu_with_noise_functional.default: _rrelu_functional,
        aten.randperm.out: _randperm,
        aten.randperm.generator_out: _randperm,
    }


def _whole(op: _torch.Op, tensor: Tensor) -> Tensor:
    """Return the global tensor with its own strides, gathered where it is sharded.

    Raises:
        UnsupportedRandomOperator: it is a local batch, whose other parts this rank never sees; the calling rank is not
            in the mesh; or the placements are of a kind that torch does not gather.
    """
    place_of(op, tensor, WINDOWS.get())
    if not isinstance(tensor, DTensor) or WINDOWS.get():
        way_out = "draw it outside random.local_batch: its random numbers depend on the values of the whole batch"
    elif tensor.device_mesh.get_coordinate() is None:
        way_out = "this rank is not in its mesh, and the random numbers depend on its values: call it inside only"
    elif not all(isinstance(p, (Shard, Replicate)) or _torch.is_strided_shard(p) for p in tensor.placements):
        way_out = "redistribute it to Shard or Replicate first"
    else:
        whole = _torch.redistributed(tensor, [Replicate()] * tensor.device_mesh.ndim, for_op=op)
        if whole.stride() == tensor.stride():
            return whole
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
    raise UnsupportedRandomOperator.for_tensor(op, tensor, way_out)


def _kept(op: _torch.Op, whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a whole result, placed like an input of the same shape."""
    place = place_of(op, like, ())
    local = torch.empty_like(local_of(like), dtype=whole.dtype, memory_format=torch.contiguous_format)
    place.keep(whole, local)
    return _torch.wrap(local, like.device_mesh, like.placements, whole)


def _sample(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    like = _check_same(op, tensors)
    rest = [arg for arg in args if not isinstance(arg, Tensor)]
    drawn = op(*(_whole(op, tensor) for tensor in tensors), *rest, **kwargs)
    if op is aten._sample_dirichlet.default or drawn.shape == like.shape:
        return _kept(op, drawn, like)
    raise AssertionError(f"{op} of {tuple(like.shape)} gave {tuple(drawn.shape)}")


def _check_same(op: _torch.Op, tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors[1:]:
        check_out(op, tensor, first.shape, first)
    return first


def _sample_out(functional: _torch.Op, op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    check_out(op, kwargs["out"], args[0].shape, args[0])
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    return copy_to_out(_sample(functional, args, rest), kwargs["out"])


# ------------------------------------------------------------------------------------------------- rrelu


def _rrelu(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    """``rrelu_with_noise(x, noise, lower, upper, training)``, in place and with ``out`` alike; writes ``noise``."""
    x, noise, *rest = args
    out = x if op is aten.rrelu_with_noise_.default else kwargs.get("out")
    for target in (noise, out):
        if target is not None:
            check_out(op, target, x.shape, x)
    result, drawn = _rrelu_draw(op, x, rest, {"generator": kwargs.get("generator")})
    if drawn is not None:
        copy_to_out(drawn, noise)
    return result if out is None else copy_to_out(result, out)


def _rrelu_functional(op: _torch.Op, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    x, noise, *rest = args
    check_out(op, noise, x.shape, x)
    result, drawn = _rrelu_draw(op, x, rest, kwargs)
    return result, noise.clone() if drawn is None else drawn


def _rrelu_draw(op: _torch.Op, x: Tensor, rest: list, kwargs: dict) -> tuple[Tensor, Tensor | None]:
    """Return the activation, and the noise where there is one."""
    lower, upper, training = (*rest, *(1 / 8, 1 / 3, False)[len(rest) :])
    if not training:
        return aten.leaky_relu.default(x.contiguous(), (lower + upper) / 2), None
    whole = _whole(op, x)
    noise = torch.empty_like(whole)
    result = aten.rrelu_with_noise.default(whole, noise, lower, upper, True, **kwargs)
    return _kept(op, result, x), _kept(op, noise, x)


# ------------------------------------------------------------------------------------------------- permutations


def _randperm(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    out = kwargs["out"]
    (n,) = args
    if tuple(out.shape) != (n,) or WINDOWS.get():
        raise UnsupportedRandomOperator.for_tensor(
            op, out, f"give `out` the shape {(n,)}, and call it outside random.local_batch"
        )
    place = place_of(op, out, ())
    local = local_of(out)
    place.keep(torch.randperm(n, generator=kwargs.get("generator"), dtype=out.dtype, device=local.device), local)
    return out
