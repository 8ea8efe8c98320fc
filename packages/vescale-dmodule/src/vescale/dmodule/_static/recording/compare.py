"""The rehearsal: one call of a module in eager mode, then on local tensors, compared value by value.

Both runs get the same inputs, random state, buffers and attributes, go forward and backward, and leave nothing behind.
The first finds the layouts of all values and gradients at the boundaries; from them the second is made. What differs
between the two is reported with the module in which it came about, before the caller's own call begins.

The comparison allows for rounding, because kernels may choose another order of additions for another layout in memory.
A module that is not right on local tensors is wrong by far more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from vescale.dtensor import random

from ... import _torch
from ..._boundary.values import map_leaves
from ...errors import NotLocalFriendlyError
from ..names import ways_out
from .observe import Observer

__all__ = ["Names", "Run", "check_same", "differentiate", "nothing_happens", "raise_together"]


# ------------------------------------------------------------------------------------------------- who runs


@dataclass
class Names:
    """Hooks that know which module runs, and which modules run again in backward.

    Attributes:
        path: names of the running modules, outermost first.
        failed: the innermost module whose forward raised.
        recomputed: modules that autograd called, outermost ones only.
    """

    path: list[str] = field(default_factory=list)
    failed: str = ""
    recomputed: set[str] = field(default_factory=set)

    @property
    def running(self) -> str:
        """Name of the innermost module that runs."""
        return self.path[-1] if self.path else ""

    @contextlib.contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Follow the calls of some modules."""
        handles = []
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.path.clear()

    def _enter(self, name: str) -> Callable:
        def enter(_module: nn.Module, _args: tuple) -> None:
            if not self.path and _torch.in_backward():
                self.recomputed.add(name)
            self.path.append(name)

        return enter

    def _leave(self, _module: nn.Module, _args: tuple, output: object) -> None:
        if self.path:
            name = self.path.pop()
            self.failed = self.failed or (name if output is None else "")


# ------------------------------------------------------------------------------------------------- nothing happens


@contextlib.contextmanager
def nothing_happens(module: nn.Module) -> Iterator[None]:
    """Undo what a call does to random streams, buffers, attributes of modules and gradients; silence users' hooks."""
    state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in random.get_state().items()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    tables = [(table, dict(table)) for part in module.modules() for table in _torch.tensor_tables(part)]
    # Models install hooks in their first call and note that in an attribute: both or neither must stay.
    tables += [(table, dict(table)) for part in module.modules() for table in _torch.module_hook_tables(part)]
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    parameters = list(module.parameters())
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with _torch.without_hooks(parameters):
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for part, before in attributes:
            _restore(vars(part), before)
        for table, before in tables:
            _restore(table, before)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(_local(buffer), _local(before)):
                    buffer.copy_(before)
        random.set_state(state)


def _restore(attributes: dict, before: dict) -> None:
    for name in [name for name in attributes if name not in before]:
        del attributes[name]
    for name, value in before.items():
        if attributes.get(name) is not value:
            attributes[name] = value


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor


# ------------------------------------------------------------------------------------------------- a run


@dataclass
class Run:
    """What one run of the rehearsal gave.

    Attributes:
        observer: the crossings.
        names: the modules.
        gradients: local gradients of the parameters by name, with their layouts in the eager run.
        buffers: local values after the call, by name.
        is_quiet: whether the forward drew no random numbers.
    """

    observer: Observer
    names: Names
    gradients: dict[str, tuple[Tensor, tuple | None]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    is_quiet: bool = False


def differentiate(output: object) -> None:
    """Go backward from what a module returned: from its scalars if it has any (losses), else from all its tensors.

    The incoming gradients are the cosines of the values, so that no error hides behind equal weights.
    """
    leaves: list[Tensor] = []
    map_leaves(lambda tensor, _where: leaves.append(tensor) or tensor, output, "")
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.ndim == 0]
    chosen = scalars or leaves
    if chosen:
        _torch.run_backward(chosen, [_weights(leaf) for leaf in chosen])


def _weights(output: Tensor) -> Tensor:
    value = output.detach()
    if isinstance(value, DTensor) and any(isinstance(p, Partial) for p in value.placements):
        value = value.redistribute(placements=_whole(value))
    return value.cos()


def _whole(value: DTensor) -> list[Placement]:
    return [Replicate() if p.is_partial() else p for p in value.placements]


# ------------------------------------------------------------------------------------------------- comparison


def check_same(eager: Run, local: Run) -> None:
    """Compare the two runs.

    Raises:
        NotLocalFriendlyError: naming the first place where they differ, the modules before it, and the ways out.
    """
    last = None
    for expected, actual in zip(eager.observer.seen, local.observer.seen, strict=False):
        where = expected.crossing.where
        if actual.crossing.where != where:
            raise _difference(f"{where!r} came next, here {actual.crossing.where!r}", eager, last, where)
        if expected.value.shape != actual.value.shape:
            what = f"has local shape {tuple(expected.value.shape)}, here {tuple(actual.value.shape)}"
            raise _difference(f"{where!r} {what}", eager, last, where)
        if not _close(actual.value, expected.value):
            raise _difference(f"{where!r} {_by_how_much(actual.value, expected.value)}", eager, last, where)
        last = where
    num_eager, num_local = len(eager.observer.seen), len(local.observer.seen)
    if num_eager != num_local:
        raise _difference(f"{num_eager} values crossed boundaries, here {num_local}", eager, last, "")
    for name, expected in eager.buffers.items():
        actual = local.buffers.get(name)
        if actual is None or actual.shape != expected.shape or not _close(actual, expected):
            what = f"buffer {name!r} after the call {_by_how_much(actual, expected)}"
            raise _difference(what, eager, None, name.rpartition(".")[0])
    _check_gradients(eager, local)


def _check_gradients(eager: Run, local: Run) -> None:
    for expected, actual in zip(reversed(eager.observer.seen), reversed(local.observer.seen), strict=True):
        if not _same_gradient(actual.gradient, expected.gradient):
            what = f"the gradient of {expected.crossing.where!r} {_by_how_much(actual.gradient, expected.gradient)}"
            raise _difference(what, eager, None, expected.crossing.where)
    for name, (expected, _) in eager.gradients.items():
        actual = local.gradients.get(name, (None, None))[0]
        if not _same_gradient(actual, expected):
            what = f"the gradient of parameter {name!r} {_by_how_much(actual, expected)}"
            raise _difference(what, eager, None, name.rpartition(".")[0])
    extra = [name for name in local.gradients if name not in eager.gradients]
    if extra:
        raise _difference(f"parameter {extra[0]!r} has no gradient", eager, None, extra[0].rpartition(".")[0])


def _same_gradient(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        missing = expected if actual is None else actual
        return missing is None or not missing.any()
    return actual.shape == expected.shape and _close(actual, expected)


def _close(actual: Tensor, expected: Tensor) -> bool:
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return torch.equal(actual, expected)
    if expected.numel() == 0:
        return True
    bound = 32 * torch.finfo(expected.dtype).eps ** 0.75
    scale = torch.nan_to_num(expected, 0, 0, 0).abs().max()
    return torch.allclose(actual, expected, rtol=bound, atol=bound * float(scale), equal_nan=True)


def _by_how_much(actual: Tensor | None, expected: Tensor | None) -> str:
    if actual is None or expected is None:
        return "is there, here it is missing" if actual is None else "is missing, here it is there"
    if actual.shape != expected.shape:
        return f"has local shape {tuple(expected.shape)}, here {tuple(actual.shape)}"
    distance = (actual.double() - expected.double()).abs().max() if actual.numel() else torch.zeros(())
    return f"differs by up to {float(distance):.3g}"


def _difference(what: str, eager: Run, last: str | None, where: str) -> NotLocalFriendlyError:
    seen = eager.observer.seen
    module = next((s.module for s in seen if s.crossing.where == where), "")
    since = f" after {last!r}" if last else ""
    return NotLocalFriendlyError(
        f"on local tensors a part of the model gives something else than on DTensors{since}: in eager mode {what}. "
        "Code before it is written for global shapes (a hard-coded number of heads, a size, a mean over a sharded dim) "
        f"or communicates; {ways_out(_owner(where) or module)}"
    )


def _owner(where: str) -> str:
    """Return the module that a place belongs to: ``a.b`` of ``a.b.input 'x'``."""
    found = re.match(r"(.*?)\.?(?:input|output|enters|returns)\b", where)
    return found.group(1) if found else where


def raise_together(error: Exception | None, mesh: DeviceMesh) -> None:
    """Raise ``error``, or say that another rank has one; collective over the mesh.

    Raises:
        Exception: ``error`` where there is one; NotLocalFriendlyError on the other ranks.
    """
    found = torch.tensor([0.0 if error is None else 1.0], device=mesh.device_type)
    anywhere = DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    if error is not None:
        raise error
    if anywhere.item():
        raise NotLocalFriendlyError("another rank of the mesh found this model unfit for local tensors; see its error")
