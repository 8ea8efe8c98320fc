"""Parameters come home: values that ``param.data = tensor`` puts in place arrive in the memory that is updated.

A parameter is a view of a flat buffer, or an optimizer updates a view of the parameter. ``param.data = tensor`` points
the parameter at other memory: an exponential average for an evaluation, `torch.nn.utils.vector_to_parameters`,
``module.to(memory_format=...)``. Forward and backward use that memory. Before an update would go to the old memory, and
a gather would send it, the values are copied there and the parameter points at it again::

    param.data = tensor      param --> tensor       home: old values
    step, gather             param --> home         home: the values of tensor

A parameter is away if it begins at another address, or has other strides, than its home. The memory of ``tensor`` is
not changed by later steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import _torch

__all__ = ["Home", "bring_home"]


class Home:
    """The memory that is kept for a parameter.

    Args:
        fqn: Name of the parameter.
        param: The parameter.
        view: The memory, in the shape of the parameter's local tensor.
    """

    __slots__ = ("_address", "_is_contiguous", "fqn", "param", "view")

    def __init__(self, fqn: str, param: nn.Parameter, view: Tensor):
        self.fqn = fqn
        self.param = param
        self.view = view
        self._address = view.data_ptr()
        self._is_contiguous = view.is_contiguous()

    @property
    def is_left(self) -> bool:
        """Whether the parameter is in other memory."""
        local = _torch.local_tensor(self.param)
        return local.data_ptr() != self._address or local.is_contiguous() != self._is_contiguous

    def check(self) -> None:
        """Raise RuntimeError if what the parameter is now does not fit its home."""
        came, kept = _torch.local_tensor(self.param), self.view
        if (came.shape, came.dtype, came.device) != (kept.shape, kept.dtype, kept.device):
            raise RuntimeError(
                f"expected shape {tuple(kept.shape)}, {kept.dtype} on {kept.device} for the parameter {self.fqn!r} on "
                f"this rank, got {tuple(came.shape)}, {came.dtype} on {came.device}: its `.data` was replaced, or its "
                "module was cast or moved, after DDP or the optimizer had been built. Change the module first, or "
                "write values in place with param.copy_(...)"
            )

    @torch.no_grad()
    def bring(self) -> None:
        """Copy the values of the parameter home, and let it be there."""
        local = _torch.local_tensor(self.param)
        self.view.copy_(local)
        local.data = self.view


def bring_home(homes: Sequence[Home]) -> bool:
    """Bring the parameters home that are away; return whether there were any. Their guards must be open.

    Raises:
        RuntimeError: If one has another shape, dtype or device than its home; no parameter has changed then.
    """
    left = [home for home in homes if home.is_left]
    for home in left:
        home.check()
    for home in left:
        home.bring()
    return bool(left)
