"""Run a module's forward as a part of the global batch, wherever the call comes from.

Inside ``vescale.dtensor.random.local_batch`` dropout on a rank's local batch draws this rank's slice of the mask that
one device would draw. The context must be active whenever the module runs: when the user calls ``DDP``, when a pipeline
engine calls the module underneath, and when activation checkpointing runs a part of it again during backward, outside
of any call of the user's. So it is entered by hooks of the module and of its submodules, by the outermost of them that
runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import random

__all__ = ["attach_local_batch"]

#: Leaf modules that draw nothing and that nobody recomputes alone: hooks on them would only cost time.
_QUIET = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Conv1d,
    nn.Conv2d,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
)


class _LocalBatch(threading.local):
    """The state of one thread: how many hooked modules are running, and the context of the outermost."""

    def __init__(self, meshes: Sequence[DeviceMesh]):
        self.meshes = meshes
        self.depth = 0
        self.context = contextlib.ExitStack()

    def enter(self, _module: nn.Module, _args: tuple) -> None:
        if self.depth == 0:
            for mesh in self.meshes:
                self.context.enter_context(random.local_batch(mesh))
        self.depth += 1

    def leave(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.context.close()

    # `vescale.dmodule` leaves these hooks out inside of compiled code: the hooks of the compiled module itself count
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"


def attach_local_batch(module: nn.Module, meshes: Sequence[DeviceMesh]) -> None:
    """Make every call of ``module``, or of a part of it, run as this rank's part of the batch.

    Args:
        module: The module.
        meshes: 1-D meshes over which the batch is divided: over the first, its parts over the second, and so on.
    """
    if not meshes:
        return
    state = _LocalBatch(meshes)
    for part in module.modules():
        if part is module or not isinstance(part, _QUIET):
            part.register_forward_pre_hook(state.enter, prepend=True)
            part.register_forward_hook(state.leave, always_call=True)
