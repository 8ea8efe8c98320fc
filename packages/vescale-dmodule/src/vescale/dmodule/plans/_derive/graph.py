"""One run of a module as data: operators, tensors, and the boundaries of modules that they cross.

tensor      a number; its shape, and what it is: a parameter, an input, a constant, the result of an operator
operator    of aten, with the module that called it; operators in place return the tensor that they change
boundary    an operator that returns its operand: an argument or a result of a module, where a plan can move it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["Boundary", "Graph", "Op", "Path", "Ref", "Sections", "TensorInfo", "kind_of"]

Path = tuple[object, ...]
"""Where a tensor is in the arguments, or in the results, of a module: names and positions from outside to inside."""

Sections = tuple[tuple[int, int], ...]
"""How many heads each section of a dim has, and how often they come."""


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of an operator."""

    tensor: int


@dataclass(frozen=True)
class Boundary:
    """A tensor that enters or leaves a module.

    Attributes:
        module: name of the module.
        call: which call of the module, counted from 0.
        side: "input" or "output".
        path: of the tensor. The first item of an input's is the name of the argument.
    """

    module: str
    call: int
    side: str
    path: Path

    @property
    def key(self) -> tuple[str, str, Path]:
        """The boundary in any call."""
        return self.module, self.side, self.path


@dataclass
class TensorInfo:
    """A tensor of the run.

    Attributes:
        shape: of the tensor.
        itemsize: bytes of an element.
        differentiable: whether it has a gradient.
        names: of the parameter or buffer that it is; several if it is tied.
        is_parameter: whether these are names of a parameter.
        users: operators that take or return it.
        producer: the operator that made it, None for parameters, inputs and constants.
    """

    shape: tuple[int, ...]
    itemsize: int = 1
    differentiable: bool = False
    names: tuple[str, ...] = ()
    is_parameter: bool = False
    users: list[int] = field(default_factory=list)
    producer: int | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Op:
    """An operator of the run.

    Attributes:
        number: its place.
        func: the operator of aten; None for a module that is taken as one operator.
        module: name of the module that called it.
        args: its arguments, with a :class:`Ref` for each tensor.
        kwargs: the same.
        inputs: the tensors among the arguments, in order.
        outputs: the tensors that it returned.
        boundary: what the operator stands for, if it is one.
        call: which call of the module it runs in.
    """

    number: int
    func: object
    module: str
    args: tuple
    kwargs: dict
    inputs: list[int]
    outputs: list[int]
    boundary: Boundary | None = None
    call: int = 0

    @property
    def name(self) -> str:
        """Name of the operator, such as ``aten.view``."""
        return "a module" if self.func is None else str(self.func.overloadpacket)


@dataclass
class Graph:
    """A run of a module.

    Attributes:
        tensors: by number.
        ops: in order.
        results: the tensors that the module returned, and their paths.
        reads: names of modules that read values, which the run took as zeros.
        repeats: boundaries (module, side, path) whose heads, in the last dim, are repeated.
        paths: further paths of the tensors at boundaries: arguments that are one object.
    """

    tensors: list[TensorInfo] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    repeats: dict[tuple[str, str, Path], Sections] = field(default_factory=dict)
    paths: dict[tuple[str, str, Path], set[Path]] = field(default_factory=dict)

    def note_path(self, boundary: Boundary, path: Path) -> None:
        """Note that the tensor at a boundary has another path, too."""
        self.paths.setdefault(boundary.key, set()).add(path)

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].shape

    def parameters(self) -> Iterator[tuple[int, TensorInfo]]:
        """Yield the parameters that the run used."""
        yield from ((number, info) for number, info in enumerate(self.tensors) if info.is_parameter)


def kind_of(name: str) -> str:
    """Return a name as a regular expression in which numbers are any numbers.

    Example:
        >>> kind_of("layers.0.mlp")
        'layers\\\\.\\\\d+\\\\.mlp'
    """
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
