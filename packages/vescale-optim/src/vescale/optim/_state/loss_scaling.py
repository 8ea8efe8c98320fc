"""Loss scaling by ``torch.amp.GradScaler``: every rank finds the same infinities, and skips the same steps.

The scaler reads ``param.grad`` of the tensors in the optimizer's groups. A `DistributedOptimizer` has parts of
parameters in its groups, the gradients are in the buckets, and each rank has only its own. So each iteration over the
list of a group sets stand-ins for the gradients of its tensors. The one operator that the scaler runs on these
stand-ins unscales all gradients:

    unscale          multiply this rank's parts by 1 / scale; found = 1 if any is not finite
    agree            all-reduce (max) of found, one number, over all ranks that hold other parts

The rest is torch's: ``scaler.step`` skips if infinities were found, ``scaler.update`` adjusts the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._ranks.axis import Axis
from .pieces import Piece

__all__ = ["PieceList", "Unscaler"]


class Unscaler:
    """Unscale the gradients of pieces, alike on all ranks.

    Args:
        pieces: All pieces of the optimizer.
        axes: Function that returns the axes whose ranks hold other parts or other parameters.
    """

    def __init__(self, pieces: Sequence[Piece], axes: Callable[[], Sequence[Axis]]):
        self.pieces = pieces
        self._axes = axes
        self._grads = {piece.tensor: _Scaled(piece, self) for piece in pieces if piece.tensor is not piece.param}
        self._done = False
        local = [_torch.local_tensor(piece.param) for piece in pieces]
        pairs = zip(local, pieces, strict=True)
        self._devices = {param.device for param, piece in pairs if param.device.type != piece.tensor.device.type}

    def attach(self) -> None:
        """Set a stand-in on every piece that has a gradient."""
        self._done = False
        for tensor, grad in self._grads.items():
            tensor.grad = None if grad.piece.param.grad is None else grad
            grad.piece.loaded = None

    def unscale(self, found: Tensor, inverse_scale: Tensor) -> None:
        """Unscale everything, once after `attach`, and set ``found`` to 1 if any rank has a value that is not finite.

        Raises:
            ValueError: For gradients in float16, whose small values would be lost.
        """
        if self._done:  # called for each dtype; the first call does all
            return
        for device in self._devices:  # offload: the scaler copies its numbers to the host without a wait
            torch.get_device_module(device).current_stream(device).synchronize()
        grads: dict[torch.dtype, list[Tensor]] = {}
        for piece in self.pieces:
            grad = piece.gradient() if piece.tensor is not piece.param else None
            if grad is None:
                continue
            if grad.dtype == torch.float16:
                raise ValueError(
                    f"the gradient of {piece.fqn!r} is kept in float16, where unscaled values get lost: pass "
                    "grad_dtype=torch.float32 to DDP, or keep parameters in float32 and use torch.autocast"
                )
            grads.setdefault(grad.dtype, []).append(grad)
        for of_dtype in grads.values():
            _torch.unscale_(of_dtype, found, inverse_scale)
        for axis in self._axes():
            work = axis.all_reduce(found, dist.ReduceOp.MAX)
            if work is not None:
                work.wait()
        self._done = True


class _Scaled(torch.Tensor):
    """Stand-in for the gradient of a piece: the scaler's operator runs in the `Unscaler`, others on the values."""

    piece: Piece
    unscaler: Unscaler

    @staticmethod
    def __new__(cls, piece: Piece, unscaler: Unscaler) -> _Scaled:
        grad = _torch.make_placeholder(cls, piece.tensor, piece.tensor.dtype)
        grad.piece, grad.unscaler = piece, unscaler
        return grad

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self.piece.gradient())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _torch.unscale_operator():
            grads, found, inverse_scale = args
            plain = [grad for grad in grads if not isinstance(grad, cls)]
            if plain:
                _torch.unscale_(plain, found, inverse_scale)
            next(grad for grad in grads if isinstance(grad, cls)).unscaler.unscale(found, inverse_scale)
            return None
        return func(*_values(args), **{key: _values(value) for key, value in (kwargs or {}).items()})


def _values(args: Any) -> Any:
    if isinstance(args, (list, tuple)):
        return type(args)(_values(arg) for arg in args)
    return args.piece.gradient() if isinstance(args, _Scaled) else args


class PieceList(list):
    """The tensors of a group. An iteration between steps first sets the gradients."""

    def __init__(self, tensors: Sequence[Tensor], unscaler: Unscaler):
        super().__init__(tensors)
        self._unscaler = unscaler
        self.is_stepping = False

    def __iter__(self) -> Iterator[Tensor]:
        if not self.is_stepping:
            self._unscaler.attach()
        return super().__iter__()

    def __reduce__(self) -> Any:
        return list, (list(super().__iter__()),)
