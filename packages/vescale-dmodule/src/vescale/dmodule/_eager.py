"""Eager mode: every activation inside the module is a DTensor.

Unmodified models mix plain tensors (masks, rotary tables, position ids, labels) with activations; stock DTensor refuses
that. While the root module runs, a function mode wraps the plain operands of such a call as replicated DTensors **above**
autograd, so that what backward saves is a DTensor too. It is sound because plain tensors inside the module come from
inputs that are equal on all ranks of the mesh, or from code that depends on them alone.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode

from . import _torch
from ._boundary import as_dtensor, to_plain

__all__ = ["install_eager"]

PLAIN = (Tensor, nn.Parameter, nn.Buffer)


CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def _without_legacy_empty(tensors: object) -> object:
    """Leave out plain 1-D tensors without elements, which ``torch.cat`` ignores whatever the other shapes are.

    DTensor's rule does not ignore them. Key-value caches start from such a tensor.
    """
    return [t for t in tensors if isinstance(t, DTensor) or t.shape != (0,)]


class _Mixing(TorchFunctionMode):
    """Wrap plain tensors that meet a DTensor in a call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mesh = next((a.device_mesh for a in _torch.tree_leaves((args, kwargs)) if isinstance(a, DTensor)), None)
        if mesh is None:
            return func(*args, **kwargs)

        if func in CONCATENATIONS:
            args = (_without_legacy_empty(args[0]), *args[1:]) if args else args

        def wrap(value: object) -> object:
            return as_dtensor(value, mesh) if type(value) in PLAIN else value

        args, kwargs = _torch.tree_map(wrap, (args, kwargs))
        with implicit_replication():  # for tensors that torch itself makes inside a composite operator
            return func(*args, **kwargs)


def install_eager(module: nn.Module, *, allow_implicit: bool) -> None:
    """Run ``module`` with DTensor activations and return plain tensors from it where one device would.

    Outputs that are replicated come back as plain tensors, partial ones are reduced first; sharded ones stay DTensors.
    """
    running: list[contextlib.ExitStack] = []

    def enter(*_: object) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(_Mixing())
        if not allow_implicit:
            stack.enter_context(_torch.explicit_redistribution())
        running.append(stack)

    def leave(_module: nn.Module, _args: object, output: object) -> object:
        running.pop().close()
        return _torch.tree_map_only(Tensor, to_plain, output)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)

