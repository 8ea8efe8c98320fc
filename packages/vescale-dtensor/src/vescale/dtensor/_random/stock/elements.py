"""Operators with one random number for each element of their inputs.

The stock CPU kernels fill a new tensor and do arithmetic on it. Here the fill is global and the arithmetic local::

    native_dropout(x, p)       mask = bernoulli_(1 - p) like x;  x * mask * 1 / (1 - p)
    bernoulli(p)               uniform_ < p, in float64 if p is, else in float32
    normal(mean, std)          normal_ * std + mean

The CUDA kernels of dropout and ``bernoulli(p)`` have element maps of their own. They are replayed in windows where a
test at first use finds that exact (see ``cuda_replay``); otherwise they run on the full tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import dispatch
from ..._torch.plain import counts_as_replicated
from ...errors import UnsupportedRandomOperator
from ..cuda_replay import replay_bernoulli, replay_native_dropout
from ..global_position import GlobalPosition, fills_memory, local_of, position_of
from .draw import draw_into
from .fills import check_out, copy_to_out, empty_like, fill, wrapped_like

__all__ = ["element_handlers"]

aten = torch.ops.aten


def element_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of all operators of this file."""
    return {
        aten.native_dropout.default: _native_dropout,
        aten.native_dropout.out: _native_dropout_out,
        aten.bernoulli.default: _bernoulli,
        aten.bernoulli.out: _bernoulli_out,
        aten.bernoulli.Tensor: _bernoulli_like,
        aten.bernoulli.Tensor_out: _bernoulli_like_out,
        aten.bernoulli_.Tensor: _bernoulli_,
        aten.normal.Tensor_float: _normal,
        aten.normal.float_Tensor: _normal,
        aten.normal.Tensor_Tensor: _normal,
        aten.normal.Tensor_float_out: _normal_out,
        aten.normal.float_Tensor_out: _normal_out,
        aten.normal.Tensor_Tensor_out: _normal_out,
    }


# ------------------------------------------------------------------------------------------------- dropout


def _native_dropout(op: dispatch.Op, args: tuple, _kwargs: dict) -> tuple[Tensor, Tensor]:
    x, p, train = (*args, True)[:3]
    if x.numel() == 0 and train is not False:  # stock torch draws nothing for an empty tensor
        position_of(op, x)
        return x, empty_like(x)
    if train is False:
        mask = empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
        local_of(mask).fill_(True)
        return x.clone(), mask
    local = local_of(x)
    mask = empty_like(x, dtype=torch.bool)
    position = position_of(op, x)
    if local.device.type != "cpu":
        out = empty_like(x)
        is_dense = position.is_contiguous or fills_memory(tuple(x.shape), x.stride())
        options = {"shape": position.shape, "layout": position.order, "is_dense": is_dense, "p": p, "train": train}
        if not replay_native_dropout(local, local_of(out), local_of(mask), position.boxed_views, **options):
            _dropout_full(position, local, (local_of(out), local_of(mask)), p, is_dense=is_dense)
        return out, mask
    draw_into(aten.bernoulli_.float, local_of(mask), position_of(op, mask), (1.0 - p,), {})
    scale = local_of(mask).to(local.dtype).mul_(1.0 / (1.0 - p) if p != 1 else 0.0)  # rounded as stock torch rounds
    return wrapped_like(x, scale.mul_(local)), mask


def _dropout_full(
    position: GlobalPosition, local: Tensor, results: tuple[Tensor, Tensor], p: float, *, is_dense: bool
) -> None:
    """Run the stock kernel on a full tensor that holds this rank's values and zeros."""
    if is_dense:
        full = torch.empty_permuted(position.shape, position.order, dtype=local.dtype, device=local.device)
    else:  # the kernel reads a tensor with gaps by single elements in logical order, as it does one out of alignment
        flat = torch.empty(math.prod(position.shape) + 1, dtype=local.dtype, device=local.device)
        full = flat[1:].view(position.shape)
    position.put(local, full.zero_())
    for result, drawn in zip(results, aten.native_dropout.default(full, p, True), strict=True):
        position.keep(drawn, result)


def _native_dropout_out(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    outs = kwargs["out0"], kwargs["out1"]
    for out in outs:
        check_out(op, out, args[0].shape, args[0])
    results = _native_dropout(aten.native_dropout.default, args, {})
    return tuple(copy_to_out(result, out) for result, out in zip(results, outs, strict=True))


# ------------------------------------------------------------------------------------------------- probabilities


def _bernoulli(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    (p,) = args
    return _bernoulli_(op, (empty_like(p, memory_format=torch.contiguous_format), p), kwargs)


def _bernoulli_out(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    (p,) = args
    check_out(op, kwargs["out"], p.shape, p)
    return _bernoulli_(op, (kwargs["out"], p), {"generator": kwargs.get("generator")})


def _bernoulli_like(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    like, p = args
    return _bernoulli_(op, (empty_like(like), p), kwargs)


def _bernoulli_like_out(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    check_out(op, kwargs["out"], args[0].shape, args[0])
    rest = {"generator": kwargs.get("generator")}
    return copy_to_out(_bernoulli_like(op, args, rest), kwargs["out"])


def _bernoulli_(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    tensor, p = args
    position = position_of(op, tensor)
    mine = _aligned_with(op, tensor, p)
    local = local_of(tensor)
    if local.device.type != "cpu":
        options = {"shape": position.shape, "layout": position.order, "generator": kwargs.get("generator")}
        can_replay = mine.shape == local.shape and position.is_contiguous
        if not (can_replay and replay_bernoulli(mine, local, position.boxed_views, **options)):
            _bernoulli_full(position, local, mine, kwargs)
        return tensor
    if not p.is_floating_point():
        raise RuntimeError(f"expected probabilities tensor to have floating type, got {p.dtype}")
    if not ((mine >= 0) & (mine <= 1)).all():
        raise RuntimeError(f"{op}: expected all probabilities to be in [0, 1]")
    uniform = torch.empty_like(local, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32)
    draw_into(aten.uniform_.default, uniform, position, (0.0, 1.0), kwargs)
    local.copy_(uniform < mine)
    return tensor


def _bernoulli_full(position: GlobalPosition, local: Tensor, mine: Tensor, kwargs: dict) -> None:
    """Draw the full tensor, with this rank's probabilities and 0.5 elsewhere."""
    new = torch.empty_permuted
    full = new(position.shape, position.order, dtype=mine.dtype, device=local.device).fill_(0.5)
    position.put(mine.expand(local.shape), full)
    drawn = new(position.shape, position.order, dtype=local.dtype, device=local.device)
    aten.bernoulli_.Tensor(drawn, full, **kwargs)
    position.keep(drawn, local)


def _aligned_with(op: dispatch.Op, tensor: Tensor, operand: Tensor) -> Tensor:
    """Return the local elements of ``operand``, broadcast, that belong to those of ``tensor``.

    An operand in other placements is redistributed, an implicit redistribution.

    Raises:
        UnsupportedRandomOperator: it is on another mesh, is a plain tensor beside a sharded one, or its shape does not
            broadcast.
    """
    if isinstance(operand, DTensor):
        if any(p.is_partial() for p in operand.placements):
            raise UnsupportedRandomOperator.for_tensor(
                op, operand, "redistribute to Shard or Replicate before the random operator"
            )
    elif operand.numel() == 1:
        return operand
    if torch.broadcast_shapes(tensor.shape, operand.shape) == tensor.shape:
        if not isinstance(tensor, DTensor) and not isinstance(operand, DTensor):
            return operand.expand(tensor.shape)
        if isinstance(tensor, DTensor) and not isinstance(operand, DTensor) and counts_as_replicated(operand):
            mesh = tensor.device_mesh
            operand = dispatch.wrap(operand, mesh, [Replicate()] * mesh.ndim, operand)
        if isinstance(tensor, DTensor) and isinstance(operand, DTensor) and tensor.device_mesh == operand.device_mesh:
            if tensor.shape != operand.shape:
                operand = operand.expand(tensor.shape)
            return dispatch.redistributed(operand, tensor.placements, for_op=op)
    raise UnsupportedRandomOperator.for_tensor(
        op, tensor, "give the tensor of its parameters the mesh of the result and a shape that broadcasts to its own"
    )


# ------------------------------------------------------------------------------------------------- means and deviations


def _normal(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """``normal(mean, std)``: the result has the memory format of a new contiguous tensor."""
    mean, std = _parameters(args)
    like = _result_like(mean, std)
    return _normal_into(op, empty_like(like, memory_format=torch.contiguous_format), mean, std, kwargs)


def _normal_out(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    mean, std = _parameters(args)
    like = _result_like(mean, std)
    check_out(op, kwargs["out"], like.shape, like)
    return _normal_into(op, kwargs["out"], mean, std, {"generator": kwargs.get("generator")})


def _parameters(args: tuple) -> tuple:
    return (*args, 1.0)[:2]


def _result_like(mean: object, std: object) -> Tensor:
    tensors = [each for each in (mean, std) if isinstance(each, Tensor)]
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    largest = max(tensors, key=lambda each: (isinstance(each, DTensor), each.ndim, each.numel()))
    return largest if largest.shape == shape else largest.expand(shape)


def _normal_into(op: dispatch.Op, out: Tensor, mean: object, std: object, kwargs: dict) -> Tensor:
    position_of(op, out)
    mine = [_aligned_with(op, out, each) if isinstance(each, Tensor) else each for each in (mean, std)]
    if isinstance(std, Tensor):
        if mine[1].numel() and not (mine[1] >= 0).all():
            raise RuntimeError("normal expects all elements of std >= 0.0")
        fill(aten.normal_.default, (out, 0.0, 1.0), kwargs)
        local_of(out).mul_(mine[1])
    else:
        fill(aten.normal_.default, (out, 0.0, std), kwargs)
    local_of(out).add_(mine[0])
    return out
