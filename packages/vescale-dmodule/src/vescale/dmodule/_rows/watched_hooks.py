"""Hooks that a recording does not see: of parameters, of modules for backward, and those that code registers only
where a value requires a gradient.

They are watched in backward. One that only looks runs as it is. One that changes a gradient is tried once, on random
numbers: it may not draw, must be linear, and must treat every row alone, so on the rows of two ranks it must give what
it gives for each::

    hook(3 a - b)  ==  3 hook(a) - hook(b)            hook(cat(a, b))  ==  cat(hook(a), hook(b))
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Container, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from vescale.dtensor.extension import random_position

from .. import _torch
from .._boundary.edges import wrapped
from .._static.parts import describe
from .._static.recording.compare import is_close
from .values import WAY_OUT

__all__ = ["Gradients", "HookWatch", "are_close", "code_of", "fixed_numbers", "is_linear", "is_of_program"]

Hook = Callable[..., "Tensor | Sequence[Tensor | None] | None"]
Gradients = tuple[Tensor | None, ...]
SCALES = [2.0**n for n in range(-30, 16, 5)]  # a hook that clips, or ignores small numbers, is not linear at some


def is_of_program(code: Callable) -> bool:
    """Return whether a hook, or a class, belongs neither to torch nor to a package of vescale."""
    return not (getattr(_unwrapped(code), "__module__", None) or "").startswith(("torch.", "vescale."))


def code_of(hook: Callable) -> object:
    """Return what is the same for a hook that is made again in each call; the hook itself if it has no such code."""
    return getattr(_unwrapped(hook), "__code__", hook)


def _unwrapped(hook: Callable) -> Callable:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def is_linear(hook: Callable[[Gradients], Gradients], like: Gradients) -> bool:
    """Return whether ``hook`` is linear, on random numbers of the shapes of ``like``."""
    for scale in SCALES:
        one, other = _numbers(like, scale, 0), _numbers(like, scale, 1)
        both = hook(_map(lambda a, b: 3 * a - b, one, other))
        if not are_close(both, _map(lambda a, b: 3 * a - b, hook(one), hook(other))):
            return False
    return True


class HookWatch:
    """Watches the hooks of the parameters of a module, and those of its parts for backward.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self.refresh()

    def refresh(self) -> None:
        """Find the parts of the module again."""
        self._parts = list(self._module.modules())
        self._parameters = list(self._module.parameters())

    def begin(self, rows: int | None) -> None:
        """Watch the hooks that there are now.

        Args:
            rows: number of rows of this rank; None if gradients are those of the rows of all ranks.
        """
        if not _torch.have_backward_hooks(self._parts, self._parameters):
            return
        for name, part in self._module.named_modules():
            for table in _torch.module_hook_tables(part)[2:]:
                _watch_all(table, f"a hook for backward of {describe(name)}", rows)
        for name, parameter in self._module.named_parameters():
            _watch_all(_torch.gradient_hooks(parameter), f"a hook (register_hook) of parameter {name!r}", None)

    @contextlib.contextmanager
    def registrations(self, known: Container[object], rows: int | None) -> Iterator[None]:
        """Watch the hooks of gradients that are registered while the context is open, but those that are known."""

        def instead(hook: Hook) -> Hook:
            name = "a hook (register_hook) that a forward registers"
            return hook if code_of(hook) in known else watch(hook, name, rows)

        with _torch.hooks_registered_by(instead):
            yield


def _watch_all(table: dict[int, Hook], name: str, rows: int | None) -> None:
    for key, hook in table.items():
        table[key] = watch(hook, name, rows)


def watch(hook: Hook, name: str, rows: int | None) -> Hook:
    """Return a hook that is tried when it first changes a gradient; what is not the program's is returned as it is.

    Args:
        hook: takes a gradient; of modules, the module and one or two tuples of gradients.
        name: for messages.
        rows: number of rows of this rank; None where gradients are whole, or of what all ranks have.
    """
    return hook if isinstance(hook, _Watched) or not is_of_program(hook) else _Watched(hook, name, rows)


class _Watched:
    def __init__(self, hook: Hook, name: str, rows: int | None):
        self.hook, self.name, self.rows = hook, name, rows
        self._is_tried = False
        functools.update_wrapper(self, hook, updated=())

    def __call__(self, *args: object) -> object:
        if self._is_tried:
            return self.hook(*args)
        *module, given = args if isinstance(args[-1], Tensor) else (args[0], args[1:])
        gradients = tuple(_torch.tree_leaves(given))
        device = next((g.device.type for g in gradients if g is not None), "cpu")
        before, versions = random_position(device), [g is not None and g._version for g in gradients]
        result = self.hook(*args)
        if random_position(device) != before:
            raise self._refused("draws random numbers in backward")
        if [g is not None and g._version for g in gradients] != versions:
            raise self._refused("changes a gradient in place, which is not its own; return another one")
        results = tuple(_torch.tree_leaves(result))
        if result is None or all(any(one is g for g in gradients) for one in results):
            return result
        self._try(module, gradients, args)
        self._is_tried = True
        return result

    def _try(self, module: list, like: Gradients, args: tuple) -> None:
        def run(values: Gradients) -> Gradients:
            values = list(values)
            given = _torch.tree_map(lambda _: values.pop(0), args[len(module) :])
            return tuple(_torch.tree_leaves(self.hook(*module, *given)))

        with torch.no_grad():
            if not is_linear(run, like):
                raise self._refused("is not linear")
            for dim in self._dims_of_rows(like):
                one, other = _numbers(like, 1.0, 0), _numbers(like, 1.0, 1)
                join = functools.partial(_joined, dim)
                try:
                    joined = run(_map(join, one, other))
                except Exception as error:
                    raise self._refused(f"fails on another number of rows: {type(error).__name__}: {error}") from error
                if not are_close(joined, _map(join, run(one), run(other))):
                    raise self._refused("does not treat every row alone")

    def _dims_of_rows(self, gradients: Gradients) -> Collection[int]:
        """Return the dims that may be that of the rows; the last one only if no other may."""
        if not self.rows:
            return ()
        found = {d for g in gradients if g is not None for d in range(g.ndim) if g.shape[d] % self.rows == 0}
        last = max((g.ndim for g in gradients if g is not None), default=0) - 1
        return found - {last} or found

    def _refused(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"expected that {self.name} changes gradients as on one device, but it {what}: gradients of a rank are "
            f"parts and multiples of those of one device; change the loss or the values in forward, or, {WAY_OUT}"
        )


def fixed_numbers(shape: Sequence[int], seed: int) -> Tensor:
    """Return numbers between -1 and 1, float64, the same for the same seed.

    No random operator makes them: modes around the program would take it for one of the program.
    """
    angles = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64) * 12.9898 + 78.233 * seed
    return (angles.sin() * 43758.5453).frac().view(tuple(shape))


def _numbers(like: Gradients, scale: float, seed: int) -> Gradients:
    def numbers(index: int, gradient: Tensor) -> Tensor:
        local = _torch.local_of(gradient) if isinstance(gradient, DTensor) else gradient
        if not (local.is_floating_point() or local.is_complex()):
            return torch.zeros_like(local)
        values = fixed_numbers(local.shape, 2 * (len(like) * seed + index))
        if local.is_complex():
            values = torch.complex(values, fixed_numbers(local.shape, 2 * (len(like) * seed + index) + 1))
        values = (min(scale, torch.finfo(local.dtype).max ** 0.5) * values).to(local.device, local.dtype)
        if not isinstance(gradient, DTensor):
            return values
        placements = tuple(Replicate() if p.is_partial() else p for p in gradient.placements)
        return wrapped(values, gradient.device_mesh, placements, shape=gradient.shape)

    return tuple(None if gradient is None else numbers(index, gradient) for index, gradient in enumerate(like))


def _map(function: Callable[[Tensor, Tensor], Tensor], one: Gradients, other: Gradients) -> Gradients:
    pairs = zip(one, other, strict=True)
    return tuple(None if a is None or b is None else function(a, b) for a, b in pairs)


def _joined(dim: int, one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one, other], dim) if dim < one.ndim else one


def are_close(one: Gradients, other: Gradients) -> bool:
    """Return whether gradients are equal up to rounding errors, on this rank."""

    def is_same(a: Tensor | None, b: Tensor | None) -> bool:
        a, b = (_torch.local_of(t) if isinstance(t, DTensor) else t for t in (a, b))
        return a is b if a is None or b is None else a.shape == b.shape and is_close(a, b)

    return len(one) == len(other) and all(map(is_same, one, other))
