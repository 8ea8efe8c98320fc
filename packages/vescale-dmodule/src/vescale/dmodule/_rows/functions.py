"""The program's own ``autograd.Function``: backward must do on this rank's rows what it does on those of all ranks.

A recording has no backward, so where a function is applied, its backward runs at once, on random numbers::

    on the rows of all ranks     DTensors  -> forward -> backward(seeds)           -> gradients
    on this rank's rows          tensors   -> forward -> backward(parts of seeds)  -> compared with this rank's part

Backward must be linear, and may not draw: gradients of this rank are multiples and parts of those of one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale.dtensor import random
from vescale.dtensor.extension import random_position

from .. import _torch
from .._boundary.edges import wrapped
from .._static.parts import describe
from .._static.recording.names import Names
from .watched_hooks import Gradients, are_close, fixed_numbers, is_linear, is_of_program

__all__ = ["OwnFunctions"]

NOT_LINEAR = (
    "is not linear, or does not treat every row alone: gradients of this rank are parts and multiples of those of one "
    "device"
)


@dataclass
class Applied:
    """A function that was applied on the rows of all ranks.

    Attributes:
        name: for messages.
        seeds: this rank's parts of the gradients of its results.
        gradients: this rank's parts of the gradients of its arguments; None if none of these is for rows.
        scale: of the gradients on this rank's rows: results that are means over rows make them larger.
        error: why backward does not run.
    """

    name: str
    seeds: Gradients
    gradients: Gradients | None = None
    scale: int = 1
    error: str | None = None


class OwnFunctions:
    """The functions that a call applies, in the order of their calls.

    Args:
        mesh: of the rows.

    Attributes:
        difference: a text about the first function that does something else on this rank's rows.
        is_inside: whether the forward of a function runs.
    """

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self._found: list[Applied | None] = []  # None where there is nothing to differentiate
        self._position = 0
        self.difference: str | None = None
        self.is_inside = False

    def __bool__(self) -> bool:
        return any(found is not None for found in self._found)

    @contextlib.contextmanager
    def on_all_rows(self, names: Names, *, has_gradients: bool = False) -> Iterator[None]:
        """Run the backward of functions that are applied to DTensors while the context is open."""
        self._found = []

        @_torch.unseen
        def note(function: type, result: object, args: tuple) -> None:
            name = f"{_text(function)} in {describe(names.running)}"
            self._found.append(self._on_all_rows(name, result, args))

        with self._noted(note, has_gradients=has_gradients):
            yield

    @contextlib.contextmanager
    def on_own_rows(self, *, has_gradients: bool = False) -> Iterator[None]:
        """Compare the backward of functions that are applied while the context is open."""
        self._position, self.difference = 0, None

        @_torch.unseen
        def compare(_function: type, result: object, _args: tuple) -> None:
            found = self._found[self._position] if self._position < len(self._found) else None
            self._position += 1
            if found is not None and self.difference is None:
                self.difference = self._compared(found, result)

        with self._noted(compare, has_gradients=has_gradients):
            yield

    @contextlib.contextmanager
    def on_dtensors(self) -> Iterator[None]:
        """Refuse functions whose backward is not linear, on DTensors that are the rows of all ranks.

        Gradients of theirs count as many times as there are ranks.
        """

        @_torch.unseen
        def refuse(function: type, result: object, _args: tuple) -> None:
            outputs = _tuple(result)
            node = _node(outputs)
            like = tuple(o if isinstance(o, Tensor) and o.requires_grad else None for o in outputs)
            if node is not None and not is_linear(lambda seeds: _gradients(node, seeds), like):
                raise RuntimeError(f"the backward of {_text(function)} {NOT_LINEAR}")

        with self._noted(refuse, has_gradients=True):
            yield

    @contextlib.contextmanager
    def _noted(self, note: Callable[[type, object, tuple], None], *, has_gradients: bool) -> Iterator[None]:
        def apply(function: type, stock: Callable, args: tuple) -> object:
            if self.is_inside or not is_of_program(function):
                return stock(*args)
            self.is_inside, is_grad_enabled = True, torch.is_grad_enabled()
            try:
                _set_grad_enabled(True)
                used = args if is_grad_enabled else _differentiable(args)
                result = stock(*used)
                note(function, result, args)
            finally:
                _set_grad_enabled(is_grad_enabled)
                self.is_inside = False
            return _as_given(args, used, result)

        with _torch.functions_applied_by(apply, has_gradients=has_gradients):
            yield

    def _on_all_rows(self, name: str, result: object, args: tuple) -> Applied | None:
        outputs = _tuple(result)
        node = _node(outputs)
        if node is None:
            return None
        placements = [_placement(output) for output in outputs]
        scale = self._mesh.size() if any(p.is_partial("avg") for p in placements if p is not None) else 1
        seeds = tuple(self._seed(*pair) for pair in zip(outputs, placements, strict=True))
        found = Applied(name, seeds, scale=scale)
        if not any(isinstance(arg, DTensor) for arg in args):
            return found
        if any(p is not None and p.is_replicate() for p in placements) and _has_shards(args):
            found.error = "gives statistics of rows, whose gradients are its own"
            return found
        try:
            whole = [self._whole(*each) for each in zip(found.seeds, outputs, placements, strict=True)]
            with _torch.plain_operands_replicated():
                gradients = self._run(found, node, whole)
        except Exception as error:
            found.error = f"has a backward that fails on the rows of all ranks: {type(error).__name__}: {error}"
            return found
        is_for_rows = any(p is not None and not p.is_replicate() for p in placements)
        for gradient, arg in zip(gradients, args, strict=False):
            is_whole = isinstance(gradient, Tensor) and _placement(gradient).is_replicate()
            if is_whole and is_for_rows and _placement(arg).is_replicate():
                found.error = "has a gradient of what all ranks have that is no sum over rows"
        found.gradients = tuple(_torch.local_of(g) if isinstance(g, DTensor) else g for g in gradients)
        return found

    def _compared(self, found: Applied, result: object) -> str | None:
        """Return a text if backward does something else on this rank's rows."""
        node = _node(_tuple(result))
        if node is None:
            return f"{found.name} gives no gradients on the rows of one rank"
        try:
            mine = self._run(found, node, found.seeds)
            linear = is_linear(lambda seeds: self._run(found, node, seeds), found.seeds)
        except Exception as error:
            if found.error is not None:
                return None  # it fails on one device, too
            return f"{found.name} has a backward that fails on the rows of one rank: {type(error).__name__}: {error}"
        if found.error is not None:
            return f"{found.name} {found.error}"
        gradients = mine if found.gradients is None else found.gradients
        expected = tuple(None if gradient is None else gradient * found.scale for gradient in gradients)
        if linear and are_close(mine, expected):
            return None
        return f"the backward of {found.name} {NOT_LINEAR}"

    def _run(self, found: Applied, node: torch.autograd.graph.Node, seeds: Sequence[Tensor | None]) -> Gradients:
        state, before = random.get_state(), random_position(self._mesh.device_type)
        gradients = _gradients(node, seeds)
        if random_position(self._mesh.device_type) != before:
            random.set_state(state)
            found.error = "draws random numbers in backward, which is not recorded"
        return gradients

    def _seed(self, output: object, placement: Placement | None) -> Tensor | None:
        """Return this rank's part of a gradient of a result: other numbers on each rank where ranks have rows."""
        if not isinstance(output, Tensor) or placement is None:
            return None
        local = _torch.local_of(output) if isinstance(output, DTensor) else output
        if not output.requires_grad:
            return torch.zeros_like(local)
        numbers = fixed_numbers(local.shape, self._mesh.get_local_rank() if placement.is_shard() else 0)
        return numbers.to(local.device, local.dtype)

    def _whole(self, seed: Tensor | None, output: object, placement: Placement | None) -> Tensor | None:
        if seed is None or not isinstance(output, DTensor):
            return seed
        placement = Replicate() if placement.is_partial() else placement
        return wrapped(seed, self._mesh, (placement,), shape=output.shape)


def _text(function: type) -> str:
    return f"{function.__qualname__} (torch.autograd.Function)"


def _gradients(node: torch.autograd.graph.Node, seeds: Sequence[Tensor | None]) -> Gradients:
    with torch.no_grad():
        gradients = _tuple(node.apply(*seeds))
    return tuple(gradient if isinstance(gradient, Tensor) else None for gradient in gradients)


@_torch.unseen
def _differentiable(args: tuple) -> tuple:
    """Return arguments of which gradients can be taken, with the memory of those that were given."""
    return tuple(
        _Alias.apply(arg.detach().requires_grad_())
        if isinstance(arg, Tensor) and arg.is_floating_point() and not arg.requires_grad
        else arg
        for arg in args
    )


class _Alias(torch.autograd.Function):
    """The same memory, no leaf and no view for autograd: the program may change it in place."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


@_torch.unseen
def _as_given(args: tuple, used: tuple, result: object) -> object:
    """Return a result as it would be with the arguments that were given."""
    given = {id(one): arg for one, arg in zip(used, args, strict=True)}
    has_gradients = torch.is_grad_enabled()

    def convert(leaf: object) -> object:
        if id(leaf) in given:
            return given[id(leaf)]
        return leaf.detach() if isinstance(leaf, Tensor) and not has_gradients else leaf

    return _torch.tree_map(convert, result)


_set_grad_enabled = _torch.unseen(torch.set_grad_enabled)


def _tuple(result: object) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def _node(outputs: tuple) -> torch.autograd.graph.Node | None:
    nodes = (output.grad_fn for output in outputs if isinstance(output, Tensor) and output.requires_grad)
    return next((node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)), None)


def _placement(value: object) -> Placement | None:
    if isinstance(value, DTensor):
        return value.placements[0]
    return Replicate() if isinstance(value, Tensor) else None


def _has_shards(args: tuple) -> bool:
    return any(isinstance(arg, DTensor) and not arg.placements[0].is_replicate() for arg in args)
