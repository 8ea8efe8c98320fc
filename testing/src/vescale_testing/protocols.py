"""Conformance checks of the protocols by which packages of veScale work together without importing each other.

`docs/protocols.md` describes each protocol. A check takes an object, reads the names of its protocol and raises an
AssertionError that says what was expected and what was found. It needs no process group and changes nothing
but the gradients of parameters that it gets for this.

    check_boxes(value)            __global_shape__ and __boxes__()
    check_absent_fqns(module)     absent_fqns
    check_units(model)            _vescale_units
    check_stand_ins(parameter)    _vescale_gradients
    check_reducer(reducer, own)   what reduces gradients before the backward that brings them
    check_execution(module)       _vescale_execution
    check_hook(hook)              _vescale_in_graph
    check_accumulation_hook(hook) _vescale_accumulates
    check_memory(parameter)       _vescale_memory
    check_rehearsal(kind)         the entry point by which a pipeline finds what mixes rows
    check_draws(kind)             the entry point by which micro-batches draw their part of the batch
"""

import copy
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn

__all__ = [
    "check_absent_fqns",
    "check_accumulation_hook",
    "check_boxes",
    "check_draws",
    "check_execution",
    "check_hook",
    "check_memory",
    "check_reducer",
    "check_rehearsal",
    "check_stand_ins",
    "check_units",
]

MODES = ("eager", "static", "compile")
IN_GRAPH = ("absent", "outside")


def check_boxes(value: Any) -> None:
    """Check the boxes of a value: inside the global shape, without overlap, writable.

    Raises:
        AssertionError: A name is missing, or a box is not a block of the global tensor.
    """
    shape = tuple(_attribute(value, "__global_shape__"))
    assert all(isinstance(size, int) for size in shape), f"__global_shape__: expected integers, got {shape}"
    boxes = [(tuple(offsets), view) for offsets, view in _attribute(value, "__boxes__")()]
    for offsets, view in boxes:
        assert isinstance(view, torch.Tensor), f"__boxes__: expected a tensor at {offsets}, got {type(view).__name__}"
        assert len(offsets) == view.ndim == len(shape), (
            f"__boxes__: expected {len(shape)} dims, got offsets {offsets} of a tensor of shape {tuple(view.shape)}"
        )
        ends = tuple(start + size for start, size in zip(offsets, view.shape, strict=True))
        is_inside = all(start >= 0 and end <= size for start, end, size in zip(offsets, ends, shape, strict=True))
        assert is_inside, f"__boxes__: the box {offsets} to {ends} leaves the global shape {shape}"
    for (one, first), (other, second) in combinations(boxes, 2):
        assert not _overlap(one, first.shape, other, second.shape), f"__boxes__: {one} and {other} overlap"
    again = [view for _, view in value.__boxes__()]
    addresses = [view.data_ptr() for _, view in boxes]
    assert [view.data_ptr() for view in again] == addresses, "__boxes__: expected views, got copies; a load writes them"


def _overlap(one: tuple[int, ...], size: torch.Size, other: tuple[int, ...], other_size: torch.Size) -> bool:
    pairs = zip(one, size, other, other_size, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in pairs)


def check_absent_fqns(module: nn.Module) -> None:
    """Check that a placeholder module lists the names of the module it replaces, and holds none of them.

    Raises:
        AssertionError: A name is no string, or is present.
    """
    absent = _attribute(module, "absent_fqns")
    assert isinstance(absent, tuple), f"absent_fqns: expected a tuple, got {type(absent).__name__}"
    assert all(isinstance(name, str) for name in absent), f"absent_fqns: expected strings, got {absent}"
    tables = (module.named_parameters(), module.named_buffers(), module.named_modules())
    present = {name for table in tables for name, _ in table} - {""}  # the name of the module itself
    assert not present & set(absent), f"absent_fqns: the module holds {sorted(present & set(absent))} itself"


def check_units(model: nn.Module) -> None:
    """Check the names of the modules that a rank of a pipeline runs: they are there, and none is inside another.

    Raises:
        AssertionError: A name is missing, or inside another.
    """
    units = _attribute(model, "_vescale_units")
    assert isinstance(units, tuple), f"_vescale_units: expected a tuple, got {type(units).__name__}"
    present = {name for name, _ in model.named_modules(remove_duplicate=False)}
    assert set(units) <= present, f"_vescale_units: the model has no {sorted(set(units) - present)}"
    for one in units:
        inside = [other for other in units if other.startswith(f"{one}.")]
        assert not inside, f"_vescale_units: {inside[0]} is inside {one}"


def check_stand_ins(parameter: torch.Tensor) -> None:
    """Check the leaves that stand in for a parameter, and what makes their gradients those of the parameter.

    Raises:
        AssertionError: A name is missing, a tensor is no leaf, or a gradient has another shape than the parameter.
    """
    for leaf, of_parameter in _attribute(_attribute(parameter, "_vescale_gradients"), "leaves")():
        assert leaf.is_leaf, "leaves: expected leaves of autograd graphs"
        assert leaf.requires_grad, "leaves: expected leaves that require a gradient"
        gradient = of_parameter(torch.zeros_like(leaf))
        assert gradient.shape == parameter.shape, f"leaves: expected {parameter.shape}, got {gradient.shape}"
        assert isinstance(gradient, type(parameter.detach())), f"leaves: got a gradient of {type(gradient).__name__}"


def check_reducer(reducer: Any, parameters: list[torch.Tensor]) -> None:
    """Check a reduction before the backward: it leaves ``parameter.grad`` alone until a backward takes its means.

    Args:
        reducer: the object.
        parameters: its parameters, without gradients; equal on all ranks, which call this together.

    Raises:
        AssertionError: A name is missing, a gradient came too early, or it is not the mean times the factor.
    """
    reduction = _attribute(reducer, "begin")([parameters[:1], parameters[1:]])
    if reduction is None:  # the backward reduces
        return
    for group in (parameters[:1], parameters[1:]):
        _attribute(reduction, "add")((parameter, torch.full_like(parameter, 3.0)) for parameter in group)
    means = _attribute(reduction, "finish")()
    _attribute(reduction, "close")()
    assert isinstance(means, list), f"finish: expected a list of tensors, got {type(means).__name__}"
    assert all(parameter.grad is None for parameter in parameters), "finish: expected gradients to wait for deliver"
    _Delivery.apply(torch.zeros((), requires_grad=True), reduction, means).backward(torch.tensor(0.5))
    for parameter in parameters:
        assert parameter.grad is not None, "deliver: expected a gradient of each parameter at the end of the backward"
        if type(parameter.grad) is torch.Tensor:  # no stand-in for a shard
            is_product = torch.equal(parameter.grad, torch.full_like(parameter, 1.5))
            assert is_product, f"deliver: expected 1.5, the mean times the factor, got {parameter.grad}"


class _Delivery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, reduction: Any, means: list[torch.Tensor]) -> torch.Tensor:
        ctx.reduction, ctx.means = reduction, means
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.reduction.deliver(ctx.means, gradient)
        return None, None, None


def check_execution(module: nn.Module) -> None:
    """Check the execution attribute of a parallelized module.

    Raises:
        AssertionError: The attribute is missing, a mode is unknown, or ``any_rank`` cannot be called.
    """
    execution = _attribute(module, "_vescale_execution")
    if execution is None:  # a mesh of one rank
        return
    modes = _attribute(execution, "modes")
    assert isinstance(modes, Mapping), f"modes: expected a mapping, got {type(modes).__name__}"
    assert modes.get("") in MODES, f"modes: expected the module's own mode under '', one of {MODES}, got {dict(modes)}"
    assert set(modes.values()) <= set(MODES), f"modes: expected {MODES}, got {dict(modes)}"
    any_rank = _attribute(execution, "any_rank")
    assert any_rank is None or callable(any_rank), f"any_rank: expected None or a function, got {any_rank!r}"


def check_hook(hook: Callable) -> None:
    """Check the attribute by which a module hook declares its role in compiled code.

    Raises:
        AssertionError: The attribute is missing or unknown.
    """
    kind = _attribute(hook, "_vescale_in_graph")
    assert kind in IN_GRAPH, f"_vescale_in_graph: expected one of {IN_GRAPH}, got {kind!r}"


def check_accumulation_hook(hook: Callable) -> None:
    """Check a hook on a parameter that prepares the accumulation into its ``grad``.

    Raises:
        AssertionError: The attribute is missing or false, or the hook changes a gradient that is not accumulated.
    """
    assert _attribute(hook, "_vescale_accumulates") is True, "_vescale_accumulates: expected True"
    gradient = torch.ones(2)
    assert hook(gradient) is None, "a hook of the accumulation: expected None for another gradient, got a gradient"
    assert bool((gradient == 1).all()), "a hook of the accumulation: expected no write to another gradient"


def check_memory(parameter: torch.Tensor) -> None:
    """Check the object that guards the values of a parameter, and that a copy has none.

    Raises:
        AssertionError: A name is missing, or the copy has the object, too.
    """
    memory = _attribute(parameter, "_vescale_memory")
    assert isinstance(_attribute(memory, "frees"), bool), f"frees: expected a bool, got {memory.frees!r}"
    assert callable(_attribute(memory, "share")), "share: expected a function"
    assert copy.deepcopy(memory) is None, "_vescale_memory: expected None in a copy of the parameter"


def check_rehearsal(kind: type) -> None:
    """Check a class that rehearses calls: it tells an operator that mixes rows from one that does not.

    It needs a process group of one rank.

    Raises:
        AssertionError: A name is missing, or a finding is wrong.
    """
    x = torch.arange(12.0).view(4, 3)
    for loss, mixes in ((lambda y: y.square().mean(), False), (lambda y: (y - y.mean(0)).square().mean(), True)):
        module = nn.Linear(3, 3)
        assert _attribute(kind, "can_run")(module) is True, "can_run: expected True for a plain module"
        rehearsal = kind(module, device_type="cpu", row_wise=())
        found = rehearsal.run(lambda args, _, run=(module, loss): run[1](run[0](*args)), (x,), {}, anywhere=bool)
        findings = {
            name: _attribute(found, name) for name in ("mixing", "counted", "written", "is_sum", "doubt", "error")
        }
        assert bool(found.mixing) is mixes, f"mixing: expected {'a' if mixes else 'no'} text, got {findings}"
        assert (found.counted, found.written, found.is_sum, found.doubt, found.error) == ((), (), False, "", None), (
            f"got {findings}"
        )
        assert _attribute(rehearsal, "num_ranks") == 1, f"num_ranks: expected 1, got {rehearsal.num_ranks}"
        assert rehearsal.highest([2.0]) == [2.0], "highest: expected the numbers of the only rank"
        with rehearsal.as_they_are():
            module(x)
    assert _attribute(rehearsal, "meshes"), "meshes: expected those of its calls, got none"
    assert nn.functional.cross_entropy in _attribute(rehearsal, "counted_means"), (
        "counted_means: expected cross_entropy"
    )


def check_draws(kind: Any) -> None:
    """Check what knows streams of random numbers and parts of a batch: parts together are what the batch draws.

    The generators are at the same state afterwards.

    Raises:
        AssertionError: A name is missing, or a part is not that of the batch.
    """
    before = torch.get_rng_state()
    stream = _attribute(kind, "stream")()
    assert isinstance(stream, str), f"stream: expected the name of the stream in force, got {stream!r}"
    whole, after = torch.rand(4, 3), torch.get_rng_state()
    for shares in ([(0, 2, 1), (1, 2, 1)], [(0, 4, 3), (3, 4, 1)]):
        parts = []
        for index, count, size in shares:
            with _attribute(kind, "moving")("cpu"):
                torch.set_rng_state(before)
            share = (index, count) if size == 1 else (index, count, size)
            with _attribute(kind, "part")(*share):
                parts.append(torch.rand(4 // count * size, 3))
        assert torch.equal(torch.cat(parts), whole), f"part: expected {whole}, got {parts}"
    assert torch.equal(torch.get_rng_state(), after), "part: expected the generator where the batch leaves it"
    if stream != "torch":
        torch.set_rng_state(before)
        place = _attribute(kind, "position")()
        drawn = torch.rand(3)
        _attribute(kind, "move")(*place)
        assert torch.equal(torch.rand(3), drawn), "move: expected the same numbers from the same position"
    torch.set_rng_state(before)


def _attribute(value: Any, name: str) -> Any:
    assert hasattr(value, name), f"{type(value).__name__} has no {name}; see docs/protocols.md"
    return getattr(value, name)
