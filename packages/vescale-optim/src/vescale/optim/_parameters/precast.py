"""Parameters cast for the computation, and their original values, which become the optimizer's master weights.

    construction   original (float32) --broadcast--> of coord 0 --round--> parameter (bfloat16), in the flat buffers
                                                     |--cut--> this rank's part of it (all of it with ZeRO 0)
    optimizer      takes the parts as its masters: so nothing is lost by rounding, not even once

Until the optimizer takes them, a rank holds the original values of its parts beside the rounded ones. A parameter is
cast if it has more bits than the dtype of the computation; others, and buffers, are unchanged. A write into parameters
in between counts: the master then begins from the written value (`_state/masters.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch

__all__ = ["Originals", "check_param_dtype"]


def check_param_dtype(dtype: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Reject a dtype, or parameters, that cannot be cast.

    Raises:
        ValueError: If ``dtype`` is not a floating-point dtype, or a parameter that is to be cast has a gradient.
    """
    if dtype is None:
        return
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"param_dtype must be a floating-point dtype such as torch.bfloat16, or None, got {dtype!r}")
    for fqn, param in parameters.items():
        if _is_wider(param, dtype) and param.grad is not None:
            raise ValueError(
                f"{fqn!r} has a gradient of dtype {param.grad.dtype} already, and param_dtype={dtype} is to cast it; "
                "call zero_grad() before wrapping the module"
            )


class Originals:
    """The values that parameters had before they were cast.

    Args:
        parameters: All parameters by name; those of more bits than ``dtype`` are cast, and stay the same objects.
        dtype: Dtype of the computation; None: nothing is cast.
        shards: Values of parameters that have none themselves: DTensors of which each rank has a part, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype | None,
        shards: Mapping[str, DTensor],
    ):
        self._dtypes = {p: p.dtype for p in parameters.values() if dtype is not None and _is_wider(p, dtype)}
        self._shards = {parameters[fqn]: shard for fqn, shard in shards.items() if parameters[fqn] in self._dtypes}
        self._full: dict[nn.Parameter, Tensor] = {}
        self._parts: dict[nn.Parameter, Tensor] = {}
        for param in self._dtypes:
            if param not in self._shards:
                self._full[param] = _torch.local_tensor(param.detach())
            _cast(param, dtype)

    def __str__(self) -> str:
        return f"cast from {sorted(map(str, set(self._dtypes.values())))}" if self._dtypes else "not cast"

    def local(self, tensor: Tensor) -> Tensor:
        """Return the local tensor of a parameter or buffer as it was."""
        return self._full.get(tensor, _torch.local_tensor(tensor.detach()))

    @torch.no_grad()
    def round(self) -> None:
        """Let the parameters have the values that `local` has, rounded."""
        for param, full in self._full.items():
            _torch.local_tensor(param).copy_(full)

    def cut(self, ranges: Iterable[tuple[str, nn.Parameter, tuple[int, int]]]) -> None:
        """Keep only these parts: name, parameter, and first and last element of its flat local tensor.

        All ranks call it alike: parameters whose values are sharded are gathered one after the other.
        """
        for _fqn, param, (start, stop) in ranges:
            full = self._shards[param].full_tensor() if param in self._shards else self._full.pop(param, None)
            if full is not None:
                self._parts[param] = full.reshape(-1)[start:stop].clone()
        self._full.clear()
        self._shards.clear()

    def master_dtype(self, param: nn.Parameter, asked: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype of a parameter's master weights: ``asked``, or else its original dtype."""
        return asked or self._dtypes.get(param)

    def take(self, param: nn.Parameter) -> Tensor | None:
        """Return the original values of this rank's part of a parameter, once; None if they do not exist."""
        return self._parts.pop(param, None)


def _is_wider(param: Tensor, dtype: torch.dtype) -> bool:
    return param.is_floating_point() and param.dtype.itemsize > dtype.itemsize


@torch.no_grad()
def _cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter another dtype; it stays the same object."""
    if not isinstance(param, DTensor):
        hollow = param.untyped_storage().nbytes() == 0 and param.numel() > 0
        param.data = _hollow(param, dtype) if hollow else param.detach().to(dtype)
        return
    # The dtype of a DTensor is also in its metadata, which `.data` does not change.
    other = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
    vars(other).update(vars(param))
    torch.utils.swap_tensors(param, other)


def _hollow(param: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=param.device)
    empty.untyped_storage().resize_(0)
    return empty
