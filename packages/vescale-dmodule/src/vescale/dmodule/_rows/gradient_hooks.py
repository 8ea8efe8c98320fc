"""Hooks of gradients that a forward registers: what they do in backward must treat every row alone.

A recording has no backward, so each hook is tried at once, on random numbers for a gradient. It may not draw. It must
be linear: gradients count N times until the mean over N ranks is taken, and of a value that all ranks have, each has a
summand of the gradient. On a DTensor on the rows of all ranks it must give what it gives on this rank's part.

Most recordings run without gradients, so a hook that code registers only ``if x.requires_grad`` is not seen here (see
``watched_hooks``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.dtensor.extension import random_position

from .. import _torch
from .._boundary.edges import wrapped
from .._static.parts import describe
from .._static.recording.compare import is_close
from .._static.recording.names import Names
from .watched_hooks import code_of, fixed_numbers, is_linear

__all__ = ["GradientHooks"]

Hook = Callable[[Tensor], Tensor | None]


class GradientHooks(TorchFunctionMode):
    """Try the hooks that are registered while the mode is active, and register none of them.

    Args:
        mesh: of the rows.
        names: the running modules, for messages.

    Attributes:
        known: the code of the hooks that were tried.
    """

    def __init__(self, mesh: DeviceMesh, names: Names):
        super().__init__()
        self._mesh, self._names = mesh, names
        self.known: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is Tensor.register_hook:
            result.remove()
            hook = args[1] if len(args) > 1 else kwargs["hook"]
            self._try(hook, args[0])
            self.known.append(code_of(hook))
        return result

    @_torch.unseen
    def _try(self, hook: Hook, value: Tensor) -> None:
        """Try a hook.

        Raises:
            RuntimeError: it draws, or gives something else on this rank's rows.
        """
        local = _torch.local_of(value) if isinstance(value, DTensor) else value
        gradient = fixed_numbers(local.shape, 0).to(local.device, local.dtype)
        with torch.no_grad():
            before = random_position(self._mesh.device_type)
            try:
                result = hook(gradient.clone())
            except Exception:
                return  # it fails in backward, too
            if random_position(self._mesh.device_type) != before:
                raise RuntimeError(f"{self._named()} draws random numbers in backward, which is not recorded")
            if result is not None and not self._is_alike(hook, value, gradient, result):
                raise RuntimeError(
                    f"{self._named()} is not linear, or does not treat every row alone: gradients of this rank are "
                    "parts and multiples of those of one device"
                )

    def _is_alike(self, hook: Hook, value: Tensor, gradient: Tensor, result: Tensor) -> bool:
        if not is_linear(lambda values: (hook(*values),), (gradient,)):
            return False
        if not isinstance(value, DTensor) or not value.placements[0].is_shard():
            return True
        whole = hook(wrapped(gradient, self._mesh, value.placements, shape=value.shape))
        return (
            isinstance(whole, DTensor)
            and whole.placements == value.placements
            and is_close(result, _torch.local_of(whole))
        )

    def _named(self) -> str:
        return f"a hook of a gradient (register_hook) in {describe(self._names.running)}"
