"""Run a module once without data and record its operators.

The module is a copy whose tensors are fake: they have shapes and dtypes, no memory. Modes and hooks record the run::

    hooks of every module     each tensor argument and result is replaced by an alias: a boundary
    a dispatch mode           operators, as torch executes them: ``linear`` is a matrix product there

Code that reads values (``.item()``, ``nonzero``) reads zeros. Modules of experts, whose code depends on how tokens are
routed, are taken as one operator.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from ... import _torch
from ..._boundary.values import fields_of, rebuild_fields, rebuild_sequence
from ..._execution.heads import install_heads
from ..._plan.placements import Repeat
from .experts import install_stand_ins
from .graph import Boundary, Graph, Op, Path, Ref, Sections, TensorInfo

__all__ = ["BoundaryHooks", "as_one_operator", "read_as_zeros", "shadow", "trace", "walk"]


def shadow(module: nn.Module, mode: _torch.FakeTensorMode) -> nn.Module:
    """Return a copy of a module in evaluation mode whose tensors have no data; all parameters are differentiable."""
    memo: dict[int, Any] = {}
    with mode:
        for tensor in (*module.parameters(), *module.buffers()):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.is_floating_point())
            memo[id(tensor)] = empty
    return copy.deepcopy(module, memo).eval()


# ------------------------------------------------------------------------------------------------- values in structures


def walk(value: object, path: Path, change: Callable[[Tensor, Path], Tensor]) -> object:
    """Return a value with ``change(tensor, path)`` in place of its tensors, in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, tuple | list):
        items = [walk(item, (*path, i), change) for i, item in enumerate(value)]
        return rebuild_sequence(value, items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    fields = fields_of(value)
    if fields is None:
        return value
    items = {name: walk(item, (*path, name), change) for name, item in fields.items()}
    changed = {name: item for name, item in items.items() if item is not fields[name]}
    return rebuild_fields(value, changed) if changed else value


class BoundaryHooks:
    """Hooks of all modules that pass every tensor argument and result to a function.

    Args:
        cross: takes a tensor and its boundary, returns the tensor to go on with.
        again: takes the boundary of a tensor and a further path to it.

    Attributes:
        running: names and numbers of the calls in progress, outermost first.
    """

    def __init__(
        self,
        module: nn.Module,
        cross: Callable[[Tensor, Boundary], Tensor],
        again: Callable[[Boundary, Path], object] = lambda _boundary, _path: None,
    ):
        self._cross, self._again = cross, again
        self._calls: Counter[str] = Counter()
        self.running: list[tuple[str, int]] = []
        for name, part in module.named_modules():
            if isinstance(part, nn.ModuleList | nn.ModuleDict):
                continue
            before, after = self._hooks(name, inspect.signature(part.forward))
            part.register_forward_pre_hook(before, with_kwargs=True)
            part.register_forward_hook(after)

    def _hooks(self, name: str, signature: inspect.Signature) -> tuple[Callable[..., Any], Callable[..., Any]]:
        kinds = list(signature.parameters.values())
        names = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = next((p.name for p in kinds if p.kind is p.VAR_POSITIONAL), "")

        def before(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            call = name, self._calls[name]
            self._calls[name] += 1
            crossed = self._crossing(*call, "input")
            paths = [(names[i],) if i < len(names) else (rest, i - len(names)) for i in range(len(args))]
            args = tuple(walk(value, path, crossed) for value, path in zip(args, paths, strict=True))
            kwargs = {argument: walk(value, (argument,), crossed) for argument, value in kwargs.items()}
            self.running.append(call)
            return args, kwargs

        def after(_module: nn.Module, _args: tuple, output: object) -> object:
            output = walk(output, (), self._crossing(*self.running[-1], "output"))
            self.running.pop()
            return output

        return before, after

    def _crossing(self, name: str, call: int, side: str) -> Callable[[Tensor, Path], Tensor]:
        same: dict[int, tuple[Tensor, Boundary]] = {}  # modules compare their arguments by identity

        def cross(tensor: Tensor, path: Path) -> Tensor:
            if id(tensor) not in same:
                boundary = Boundary(name, call, side, path)
                same[id(tensor)] = self._cross(tensor, boundary), boundary
            elif same[id(tensor)][1].path != path:
                self._again(same[id(tensor)][1], path)
            return same[id(tensor)][0]

        return cross


# ------------------------------------------------------------------------------------------------- the recorder


class Recorder(_torch.TorchDispatchMode):
    """Record the operators of a run."""

    def __init__(self, repeats: Mapping[tuple[str, str, Path], Sections]) -> None:
        super().__init__()
        self.graph = Graph(repeats=dict(repeats))
        self.running: list[tuple[str, int]] = [("", 0)]
        self.boundary: Boundary | None = None
        self.whole: list[Op] = []  # modules that are taken as one operator and run now
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no id is used twice

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.graph.tensors)
            self._kept.append(tensor)
            self.graph.tensors.append(TensorInfo(tuple(tensor.shape), tensor.element_size()))
        return self._numbers[id(tensor)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs: list[int] = []

        def refer(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            inputs.append(self.number(value))
            return Ref(inputs[-1])

        referred = _torch.tree_map(refer, (args, kwargs))
        result = read_as_zeros(func, args, kwargs, lambda: self.graph.reads.add(self.running[-1][0]))
        outputs = [self.number(t) for t in _torch.tree_leaves(result) if isinstance(t, Tensor)]
        if self.whole:
            self.whole[-1].inputs += inputs
            self.whole[-1].outputs += outputs
        elif func.namespace == "aten":
            self.add(Op(0, func, self.running[-1][0], *referred, inputs, outputs, self.boundary))
        return result

    def add(self, op: Op) -> None:
        """Append an operator to the graph."""
        op.number, op.call = len(self.graph.ops), self.running[-1][1]
        self.graph.ops.append(op)
        for tensor in dict.fromkeys([*op.inputs, *op.outputs]):
            self.graph.tensors[tensor].users.append(op.number)
        for tensor in op.outputs:
            info = self.graph.tensors[tensor]
            if info.producer is None and tensor not in op.inputs:
                info.producer = op.number

    def cross(self, tensor: Tensor, boundary: Boundary) -> Tensor:
        """Return an alias of a tensor that crosses a boundary."""
        if self.whole:
            return tensor
        if sections := self.graph.repeats.get(boundary.key):
            with as_one_operator(self, boundary.module):
                tensor = repeat(tensor, sections)
        self.boundary = boundary
        try:
            return torch.ops.aten.alias(tensor)
        finally:
            self.boundary = None

    def finish(self, module: nn.Module, result: object) -> Graph:
        """Return the graph, with what is known of its tensors at the end."""
        for tensor in self._kept:
            self.graph.tensors[self._numbers[id(tensor)]].differentiable = tensor.requires_grad
        for tables, is_parameter in ((module.named_parameters, True), (module.named_buffers, False)):
            for name, tensor in tables(remove_duplicate=False):
                if id(tensor) in self._numbers:
                    info = self.graph.tensors[self._numbers[id(tensor)]]
                    info.names, info.is_parameter = (*info.names, name), is_parameter
        found = [t for t in _torch.tree_leaves(result) if isinstance(t, Tensor)]
        self.graph.results = [self._numbers[id(t)] for t in found if id(t) in self._numbers]
        return self.graph


def read_as_zeros(func: Callable, args: tuple, kwargs: dict, note: Callable[[], object] = lambda: None) -> object:
    """Return the result of an operator; what depends on values is that of zeros."""
    try:
        return func(*args, **kwargs)
    except _torch.READS_VALUES:
        note()
        operand = args[0]
        name = str(func.overloadpacket)
        if name == "aten._local_scalar_dense":
            return (
                torch.zeros((), dtype=operand.dtype).item() if not isinstance(operand, Tensor) else _zero(operand.dtype)
            )
        if name == "aten.nonzero":
            return operand.new_empty((0, operand.ndim), dtype=torch.int64)
        if name == "aten.masked_select":
            return operand.new_empty((0,))
        raise


def _zero(dtype: torch.dtype) -> bool | int | float:
    return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


def repeat(tensor: Tensor, sections: Sections) -> Tensor:
    """Return a tensor whose last dim holds heads with repeated ones."""
    parts, times = zip(*sections, strict=True)
    return Repeat([Replicate()], parts=parts, times=times).apply(tensor)


@contextlib.contextmanager
def as_one_operator(recorder: Recorder, name: str) -> Iterator[None]:
    """Record all operators inside as one."""
    op = Op(0, None, name, (), {}, [], [])
    recorder.whole.append(op)
    try:
        yield
    finally:
        recorder.whole.pop()
        made = set(op.outputs) - set(op.inputs)
        op.inputs = [t for t in dict.fromkeys(op.inputs) if t not in set(op.outputs)]
        op.outputs = list(dict.fromkeys(t for t in op.outputs if t in made or t not in op.inputs))
        if op.inputs or op.outputs:
            recorder.add(op)


# ------------------------------------------------------------------------------------------------- a run


def trace(
    module: nn.Module,
    inputs: Mapping[str, object],
    mode: _torch.FakeTensorMode,
    whole: set[str],
    repeats: Mapping[tuple[str, str, Path], Sections] = MappingProxyType({}),
) -> Graph:
    """Run a module on fake tensors and return its operators.

    Args:
        module: from :func:`shadow`; it gets hooks.
        inputs: arguments by name, with fake tensors.
        mode: of the fake tensors.
        whole: names of modules that are taken as one operator.
        repeats: see :class:`Graph`.
    """
    install_heads(module)
    install_stand_ins(module, whole)
    recorder = Recorder(repeats)
    hooks = BoundaryHooks(module, recorder.cross, recorder.graph.note_path)
    recorder.running = hooks.running
    hooks.running.append(("", 0))
    for name, part in module.named_modules():
        if name in whole or isinstance(part, nn.RNNBase):  # whose kernel takes all gates at once
            vars(part)["forward"] = _recorded_as_one(part.forward, recorder, name)
    with _torch.fake_only(mode), recorder:
        result = module(**inputs)
    return recorder.finish(module, result)


def _recorded_as_one(forward: Callable[..., Any], recorder: Recorder, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with as_one_operator(recorder, name):
            return forward(*args, **kwargs)

    return run
