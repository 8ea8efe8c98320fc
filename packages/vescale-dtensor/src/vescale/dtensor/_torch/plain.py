"""Plain tensors that torch itself makes beside DTensors count as replicated; those of the program do not.

DTensor refuses a plain tensor as an operand, because it may differ between the ranks. Torch's own code makes plain
tensors, too: zeros of a gradient's shape, a range of positions, a mask. Those are equal on all ranks. Who made a plain
tensor is known in two places:

- **In a backward pass**: between a formula of autograd and the engine there is no code of the program. A gradient hook,
  the program's ``autograd.Function`` and the repeated forward of a checkpoint have frames of their own.
- **In a function of torch that got DTensors and no plain tensor**, such as ``torch.quantile(x, 0.5)``. Lists,
  arrays and single truth values by which a DTensor is indexed (``x[[0, 2]]``) are arguments as numbers are: torch makes
  tensors of them.

There, DTensor's own switch for this (``implicit_replication``) is on, and `counts_as_replicated` decides. Plain
gradients that a hook or a Function returns reach formulas later: those of hooks are refused, those of Functions marked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .._containers import tensors_in
from ..errors import UnsupportedOperator
from .dispatch import plain_operands_allowed
from .patches import AttributePatch, Patch, PatchGroup, dtensor_attribute

__all__ = ["FUNCTIONS", "counts_as_replicated", "plain_operands_patch"]

FUNCTIONS = (
    "combinations",
    "embedding_bag",
    "nanquantile",
    "quantile",
    "scaled_dot_product_attention",
    "trapezoid",
    "trapz",
    "unravel_index",
)
"""Functions of torch, and methods of tensors, that are made of operators and of tensors of their own.

Some return such a tensor, as ``trapezoid`` does for no intervals: it becomes a replicated DTensor.
"""

_MARK = "_vescale_of_program"
_MESH_OF_FROM_LOCAL = ("forward_input_device_mesh", "previous_device_mesh")  # the second in some versions
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_HERE = os.path.dirname(os.path.dirname(__file__))  # vescale.dtensor
_NOT_PROGRAM = (os.path.dirname(torch.__file__) + os.sep, _HERE + os.sep, contextlib.__file__)


class _Thread(threading.local):
    """What runs in this thread: functions of torch that got DTensors only, backward passes; what the program set."""

    num_functions = 0
    num_passes = 0
    program_allows = False


_here = _Thread()
_passes = {"running": 0}  # in all threads: formulas for an accelerator run in threads of the engine
_lock = threading.Lock()


def counts_as_replicated(tensor: Tensor) -> bool:
    """Return whether a plain tensor may stand beside DTensors, in the operator that is being called."""
    if not _is_on():
        return False
    if _here.num_functions or _here.program_allows or not _passes["running"]:
        return True
    return not hasattr(tensor, _MARK) and not _is_called_by_program()


def _is_on() -> bool:
    return torch._C._get_dtensor_allow_implicit_replication()


def _is_called_by_program() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE:
        if not frame.f_code.co_filename.startswith(_NOT_PROGRAM):
            return True
        frame = frame.f_back
    return False


def _switched_on(function: Callable, args: tuple, kwargs: dict) -> object:
    before = _is_on()
    torch._C._set_dtensor_allow_implicit_replication(True)
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_dtensor_allow_implicit_replication(before)


def plain_operands_patch() -> PatchGroup:
    """Let plain tensors of torch stand beside DTensors, in backward passes and in functions that got DTensors only."""
    dispatcher = type(DTensor._op_dispatcher)
    patches: list[Patch] = [
        AttributePatch((torch.autograd, torch.autograd.graph), "_engine_run_backward", _in_pass),
        AttributePatch((dispatcher,), "_try_replicate_spec_for_scalar_tensor", _of_torch_only),
        AttributePatch((dispatcher,), "_allow_implicit_replication", _switch_of_program),
        AttributePatch((torch.utils.hooks.BackwardHook,), "__init__", _with_checked_hooks),
        dtensor_attribute("register_hook", _registering_checked),
        AttributePatch((torch,), "vander", _vander),
        AttributePatch((torch,), "sgn", _sign_of_real),
        dtensor_attribute("sgn", _sign_of_real),
        dtensor_attribute("sgn_", _sign_of_real),
    ]
    patches += [dtensor_attribute(name, _indexed_by_lists) for name in ("__getitem__", "__setitem__")]
    for name in ("apply", "apply_boxed"):  # the second with gradients in a list, not in every version
        if hasattr(torch.autograd.function.BackwardCFunction, name):
            patches.append(AttributePatch((torch.autograd.function.BackwardCFunction,), name, _marking))
    for name in FUNCTIONS:
        owners = [owner for owner in (torch, Tensor, torch.nn.functional) if hasattr(owner, name)]
        patches += [AttributePatch((owner,), name, _among_dtensors) for owner in owners]
    masked = (torch.masked, torch.masked._ops)
    names = [n for n in torch.masked.__all__ if callable(getattr(torch.masked._ops, n, None)) and n.islower()]
    patches += [AttributePatch(masked, name, _among_dtensors) for name in names]
    place = (
        "what runs a backward pass, its hooks and Functions; DTensor's check of operands; torch.quantile and the like"
    )
    return PatchGroup(place, patches)


# ------------------------------------------------------------------------------------------------- backward passes


def _in_pass(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def run(*args: object, **kwargs: object) -> object:
        if plain_operands_allowed():
            return stock(*args, **kwargs)
        with _lock:
            _passes["running"] += 1
        _here.num_passes += 1
        try:
            gradients = _switched_on(stock, args, kwargs)
            if gradients is None or not (inputs := kwargs.get("inputs", args[4] if len(args) > 4 else ())):
                return gradients
            return tuple(map(_as_input, gradients, inputs))
        finally:
            _here.num_passes -= 1
            _here.program_allows = _here.program_allows and _here.num_passes > 0
            with _lock:
                _passes["running"] -= 1

    return run


def _as_input(gradient: object, tensor: object) -> object:
    if not isinstance(tensor, DTensor) or isinstance(gradient, DTensor):
        return gradient
    return _replicated(_in_memory(gradient), tensor.device_mesh)


def _switch_of_program(stock: property) -> property:
    """Keep the switch on for torch in a backward pass, whatever the program sets it to in a hook."""

    def get(dispatcher: object) -> bool:
        return _here.program_allows if _here.num_passes else stock.fget(dispatcher)

    def set_(dispatcher: object, value: bool) -> None:
        if _here.num_passes:
            _here.program_allows = value
        else:
            stock.fset(dispatcher, value)

    return property(get, set_)


def _of_torch_only(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def spec_of_plain(self: object, op: object, tensor: Tensor, mesh: DeviceMesh) -> object:
        if not counts_as_replicated(tensor):
            if tensor.numel() == 1:
                return stock(self, op, tensor, mesh)
            raise UnsupportedOperator.for_mixed(op, tensor)
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)

    return spec_of_plain


def _marking(stock: Callable) -> Callable:
    """Mark the plain gradients that a Function of the program returns for DTensors."""

    @functools.wraps(stock)
    def apply(self: object, *args: object) -> object:
        gets_dtensors = any(isinstance(arg, DTensor) for arg in tensors_in(args))  # the Function may empty a list
        args = tuple(map(_in_memory, args))
        if (mesh := _mesh_of(self)) is not None:
            args = tuple(_replicated(arg, mesh) for arg in args)
        results = stock(self, *args)
        if not gets_dtensors:
            return results
        if not type(self)._forward_cls.__module__.startswith(("torch.", "vescale.")):
            for result in tensors_in(results):
                if not isinstance(result, DTensor):
                    setattr(result, _MARK, True)
        return results

    return apply


def _mesh_of(function: object) -> DeviceMesh | None:
    """Return the mesh on which a redistribution or ``from_local`` has made a DTensor, for any other Function None."""
    spec = getattr(function, "current_spec", None)
    known = (getattr(spec, "mesh", None), *(getattr(function, name, None) for name in _MESH_OF_FROM_LOCAL))
    return next((mesh for mesh in known if isinstance(mesh, DeviceMesh)), None)


def _in_memory(gradient: object) -> object:
    """Return a gradient of zeros for which torch has taken no memory, as for ``sgn``, as one that a rank can hold."""
    is_without = isinstance(gradient, Tensor) and not isinstance(gradient, DTensor) and gradient._is_zerotensor()
    return gradient.clone() if is_without else gradient


def _replicated(gradient: object, mesh: DeviceMesh) -> object:
    """Return a plain gradient that a formula of torch gives for a DTensor as a replicated one."""
    if not isinstance(gradient, Tensor) or isinstance(gradient, DTensor) or hasattr(gradient, _MARK):
        return gradient
    return DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _with_checked_hooks(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def init(self: object, module: object, user_hooks: list, user_pre_hooks: list) -> None:
        stock(self, module, list(map(_checked_hook, user_hooks)), list(map(_checked_hook, user_pre_hooks)))

    return init


def _registering_checked(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def register_hook(self: DTensor, hook: Callable) -> object:
        return stock(self, _checked_hook(hook))

    return register_hook


def _checked_hook(hook: Callable) -> Callable:
    if type(hook).__module__.startswith("vescale."):
        return hook

    @functools.wraps(hook)
    def call(*args: object) -> object:
        result = hook(*args)
        if result is not None and any(isinstance(tensor, DTensor) for tensor in tensors_in(args)):
            for tensor in tensors_in(result):
                if not isinstance(tensor, DTensor):
                    raise UnsupportedOperator(
                        f"expected a DTensor from the gradient hook {getattr(hook, '__qualname__', hook)!r}, as its "
                        f"gradient is one, got a plain tensor of shape {tuple(tensor.shape)}, which may differ between "
                        "ranks; return distribute_tensor(value, grad.device_mesh, grad.placements)"
                    )
        return result

    return call


# ------------------------------------------------------------------------------------------------- functions of torch


_INDICES = (int, slice, type(None), type(...), Tensor)


def _becomes_a_tensor(position: object) -> bool:
    """Return whether torch makes a tensor of its own of an index: of lists and arrays, of one truth value."""
    if isinstance(position, bool) or not isinstance(position, _INDICES):
        return True
    return isinstance(position, DTensor) and position.ndim == 0 and position.dtype == torch.bool


def _indexed_by_lists(stock: Callable) -> Callable:
    among = _among_dtensors(stock, refuses=False)

    @functools.wraps(stock)
    def call(self: DTensor, index: object, *value: object) -> object:
        positions = index if isinstance(index, tuple) else (index,)
        return (among if any(map(_becomes_a_tensor, positions)) else stock)(self, index, *value)

    return call


def _among_dtensors(stock: Callable, *, refuses: bool = True) -> Callable:
    """Return a function of torch that takes the plain tensors it makes for replicated ones, if it gets DTensors only.

    Raises:
        UnsupportedOperator: inside, if it gets a plain tensor too and ``refuses``. A function mode may yet take that
            for a replicated one, so under a mode the function itself decides.
    """

    @functools.wraps(stock)
    def call(*args: object, **kwargs: object) -> object:
        tensors = list(tensors_in((args, kwargs)))
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.numel() != 1]
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return stock(*args, **kwargs)
        if not plain:
            _here.num_functions += 1
            try:
                result = _switched_on(stock, args, kwargs)
            finally:
                _here.num_functions -= 1
            if not isinstance(result, Tensor) or isinstance(result, DTensor):
                return result
            mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
            return DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if refuses and not _is_on() and not torch._C._is_torch_function_mode_enabled():
            raise UnsupportedOperator.for_mixed(stock.__name__, plain[0])
        return stock(*args, **kwargs)

    return call


def _vander(stock: Callable) -> Callable:
    """Take the powers that torch would write into a plain tensor of its own."""

    @functools.wraps(stock)
    def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:  # noqa: N803 - torch's name
        if not isinstance(x, DTensor) or x.ndim != 1:
            return stock(x, N, increasing)
        num_powers = len(x) if N is None else N
        x = x if x.is_floating_point() or x.is_complex() else x.long()
        powers = torch.linalg.vander(x, N=max(num_powers, 2))[:, :num_powers]
        return powers if increasing else powers.flip(1)

    return vander


def _sign_of_real(stock: Callable) -> Callable:
    """Take ``sign`` of real numbers, which is the same and whose gradient is a DTensor, not plain zeros."""

    sign = Tensor.sign_ if stock.__name__ == "sgn_" else torch.sign

    @functools.wraps(stock)
    def sgn(input: Tensor, **out: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return (sign if isinstance(input, DTensor) and not input.is_complex() else stock)(input, **out)

    return sgn
