"""Eager mode: every activation inside the module is a DTensor.

Unmodified models mix plain tensors (masks, rotary tables, position ids, labels) with activations, which stock DTensor
refuses. While the module runs, two contexts are open:

    ===============  ===============================================================================================
    ``_Mixing``      a function mode. It wraps the plain operands of a call that has a DTensor operand as replicated
                     DTensors. It does so above autograd, so the tensors saved for backward are DTensors too.
    ``strict()``     of ``vescale.dtensor``. It refuses operators that would communicate to fit their operands
                     together. The mode adds the module and the plan entry to the error. Interleaved shards may be
                     gathered: few operators of DTensor accept them, and on local tensors nothing is gathered.
    ===============  ===============================================================================================

Replication is sound: a plain tensor inside the module comes from inputs that are equal on all ranks of the mesh, or
from code that depends on such inputs alone.

Hooks of every submodule open the contexts; the outermost submodule that runs does so. This is the root, except when
activation checkpointing runs a part of the model again during backward; around a function, a checkpoint opens them (see
``surroundings``). The same hooks record which submodule runs, for errors.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import strict
from vescale.dtensor.extension import exact_num_blocks, map_leaves, tensors_in

from .. import _torch
from .._boundary.convert import as_dtensor, bring, to_plain
from .._boundary.rows_axis import lift, settled
from .._gradients.sync import GradientSync
from ..errors import ImplicitRedistributionError
from .heads import attention_of_heads, has_part_of_heads
from .module_hooks import OwnHook
from .surroundings import surround

__all__ = ["EagerScope", "hook_scope"]

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
PLAIN = frozenset((Tensor, nn.Parameter, _torch.FakeTensor))  # fakes stand for plain tensors in runs without data
ATOMS = PLAIN | {DTensor, bool, int, float, complex, str, type(None), slice, torch.dtype, torch.device, torch.Size}
"""Types of arguments in which no tensor hides; all others are searched."""


@dataclass
class EagerScope:
    """The running modules of one parallelized model, and the contexts that are open while any of them runs.

    Attributes:
        allow_implicit: whether operators may redistribute their operands implicitly.
        sync: reduces partial gradients.
        attaches: whether parameters get the gradient hooks of ``sync`` when the outermost module is entered.
        rows: the mesh of calls on the rows of all data-parallel ranks, see `_boundary.rows_axis`; None without any.
            Operators may redistribute their operands over its first axis.
        path: names of the modules whose forward is running, outermost first.
        contexts: closed when the outermost of them ends.
    """

    allow_implicit: bool
    sync: GradientSync
    attaches: bool = True
    rows: DeviceMesh | None = None
    path: list[str] = field(default_factory=list)
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def enter(self, module: nn.Module, name: str) -> None:
        if not self.path:
            if self.attaches:
                self.sync.attach(module)
            self._open()
        self.path.append(name)

    def _open(self) -> None:
        self.contexts.enter_context(surround(self._carry))
        self.contexts.enter_context(_Mixing(self))
        if not self.allow_implicit and exact_num_blocks() is None:  # forms of exact mode move what they need
            axes = None if self.rows is None else self.rows.mesh_dim_names[1:]
            self.contexts.enter_context(strict(interleaved=True, axes=axes))

    def leave(self, name: str) -> None:
        if self.path and self.path[-1] == name:  # else an earlier hook raised
            self.path.pop()
            if not self.path:
                self.contexts.close()

    def _carry(self) -> Callable[[], contextlib.AbstractContextManager] | None:
        return functools.partial(self._repeated, self.path[-1]) if self.path else None

    @contextlib.contextmanager
    def _repeated(self, name: str) -> Iterator[None]:
        """Run a function of a module again, in which no hook of it runs."""
        if not self.path:
            self._open()
        self.path.append(name)
        try:
            yield
        finally:
            self.leave(name)

    @property
    def where(self) -> str:
        return f"module {self.path[-1]!r}" if self.path and self.path[-1] else "the root module"


class _Mixing(TorchFunctionMode):
    """Wrap the plain operands of calls that have a DTensor operand."""

    def __init__(self, scope: EagerScope):
        super().__init__()
        self.scope = scope

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mesh, mixed = _operands(args, kwargs, self.scope.rows)
        if mesh is None:
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward and has_part_of_heads((*args, *kwargs.values())):
            func = attention_of_heads
        if mixed:
            args, kwargs = self._wrapped(func, args, kwargs, mesh)
        # for plain tensors that torch itself makes inside a composite operator
        before = _torch.replicate_plain_operands(allow=True)
        try:
            result = func(*args, **kwargs)
            if mesh is not self.scope.rows or func in (bring, to_plain):  # see Note [boundaries are torch functions]
                return result
            return settled(result, tensors_in((args, kwargs)))
        except ImplicitRedistributionError as error:
            if self.scope.allow_implicit:  # the user's own `strict()`
                raise
            raise _implicit(func, (args, kwargs), self.scope) from error
        finally:
            _torch.replicate_plain_operands(allow=before)

    def _wrapped(self, func: Callable, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
        """Return the arguments of a call with its plain tensors as replicated DTensors, and all on one mesh."""
        _check_destination(func, args, kwargs, self.scope.where)
        if func in CONCATENATIONS and args:
            args = (_without_legacy_empty(args[0]), *args[1:])

        def wrap(tensor: Tensor) -> Tensor:
            if _is_guarded(type(tensor)):
                _torch.awaited(tensor)  # a plain parameter again
            if type(tensor) in PLAIN:
                return as_dtensor(tensor, mesh)
            is_narrow = isinstance(tensor, DTensor) and tensor.device_mesh.ndim < mesh.ndim
            return lift(tensor, mesh) if is_narrow and mesh == self.scope.rows else tensor

        return map_leaves(wrap, (args, kwargs), Tensor)


def _operands(args: tuple, kwargs: dict, rows: DeviceMesh | None) -> tuple[DeviceMesh | None, bool]:
    """Return the mesh of the DTensors among the arguments, and whether there are tensors that are not on it.

    Args:
        args: of the call.
        kwargs: of the call.
        rows: the mesh of the rows of all ranks; a call with an operand on it runs on it.
    """
    leaves = (*args, *kwargs.values()) if kwargs else args
    kinds = set(map(type, leaves))
    if not kinds <= ATOMS:
        leaves = list(tensors_in(leaves))
        kinds = set(map(type, leaves))
    mesh = next((leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)), None)
    has_plain = not kinds.isdisjoint(PLAIN) or any(map(_is_guarded, kinds))
    if rows is None or mesh is None:
        return mesh, has_plain
    sizes = {leaf.device_mesh.ndim for leaf in leaves if isinstance(leaf, DTensor)}
    return (rows if rows.ndim in sizes else mesh), len(sizes) > 1 or has_plain


def _is_guarded(kind: type) -> bool:
    """Return whether tensors of a class are plain parameters whose values are in flight; data parallelism swaps it."""
    return kind is not nn.Parameter and issubclass(kind, nn.Parameter) and not issubclass(kind, DTensor)


def _without_legacy_empty(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Leave out plain 1-D tensors without elements, which ``torch.cat`` ignores whatever the other shapes are.

    DTensor's rule does not ignore them. Key-value caches start from such a tensor.
    """
    return [t for t in tensors if isinstance(t, DTensor) or t.shape != (0,)]


def _check_destination(func: Callable, args: tuple, kwargs: dict, where: str) -> None:
    """Refuse to write values that need a gradient into a plain tensor, which could not carry it.

    Raises:
        RuntimeError: naming the function, the module and the way out.
    """
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )
    destination = kwargs.get("out", args[0] if in_place and args else None)
    if type(destination) not in PLAIN or not torch.is_grad_enabled():
        return
    if not any(isinstance(t, DTensor) and t.requires_grad for t in tensors_in((args, kwargs))):
        return
    raise RuntimeError(
        f"in {where}: {_name(func)} writes a DTensor that requires grad into a plain tensor of shape "
        f"{tuple(destination.shape)}, which would lose the gradient; make the destination from a DTensor "
        "(x.new_zeros(...), torch.zeros_like(x)), or use the form of the operator that is not in place"
    )


def _implicit(func: Callable, arguments: tuple, scope: EagerScope) -> ImplicitRedistributionError:
    operands = [t for t in tensors_in(arguments) if isinstance(t, DTensor)]
    shown = ", ".join(f"{tuple(t.shape)} {tuple(t.placements)}" for t in operands)
    key = re.escape(f"{scope.path[-1]}.input" if scope.path and scope.path[-1] else "input")
    return ImplicitRedistributionError(
        f"in {scope.where}: {_name(func)} on operands {shown} would communicate on its own; bring them to fitting "
        f'placements by a boundary in the plan, such as "forward": {{r"{key}": [...]}}, or pass allow_implicit=True'
    )


def _name(func: Callable) -> str:
    return resolve_name(func) or getattr(func, "__name__", repr(func))


def hook_scope(module: nn.Module, name: str, scope: EagerScope) -> list[RemovableHandle]:
    """Run ``module`` and its parts with DTensor activations until the handles are removed.

    Args:
        module: the module; ``scope`` is entered by the outermost part of it that is called.
        name: its name in the parallelized model, ``""`` for the model itself.
        scope: the scope of the parallelized model.
    """
    handles = []
    for inner, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.ModuleDict):  # these are never called
            path = ".".join(filter(None, (name, inner)))
            handles += _hook_part(part, path, scope)
    return handles


def _hook_part(part: nn.Module, name: str, scope: EagerScope) -> list[RemovableHandle]:
    return [
        part.register_forward_pre_hook(OwnHook(lambda module, _args: scope.enter(module, name)), prepend=True),
        part.register_forward_hook(OwnHook(lambda _module, _args, _output: scope.leave(name)), always_call=True),
    ]
