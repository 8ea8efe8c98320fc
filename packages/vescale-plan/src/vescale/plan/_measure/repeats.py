"""Blocks that repeat others are not run: a model of a hundred equal blocks is measured by two of them.

Two blocks are equal if their trees of modules are: classes, shapes of parameters and buffers, and all plain
attributes, where an integer that is the number of the block (``layer_idx``) equals any other such. Of each kind the
first two run. The others return what the second has returned: tensors of the same shapes, or those of their own
arguments that it has passed on. A module with hooks, or with an attribute that is neither plain nor shared, equals no
other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves, tree_map
from .recorder import Recorder

#: How many blocks of a kind run: what is before the first may let it keep more.
MEASURED = 2
_PLAIN = (int, float, str, bool, type(None))


@dataclass
class Template:
    """What a block has returned: its output, with `Passed` and `Made` in place of tensors."""

    output: Any = None


@dataclass(frozen=True)
class Passed:
    """An argument that is returned: its place among the tensors of the arguments."""

    place: int


@dataclass(frozen=True)
class Made:
    """A new tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


def measured_as(blocks: Mapping[str, nn.Module], *, each: int = MEASURED) -> list[int]:
    """Return for each block the number of the block that is measured in its place: of each kind the first ``each``."""
    kinds: dict[Any, list[int]] = {}
    found, own = [], dict[str, int]()  # number of a block in its own list
    for number, (fqn, block) in enumerate(blocks.items()):
        parent = fqn.rpartition(".")[0]
        index = own[parent] = own.get(parent, -1) + 1
        same = kinds.setdefault((parent, *_signature(block, index)), [])
        if len(same) < each:
            same.append(number)
            found.append(number)
        else:
            found.append(same[-1])
    return found


def _signature(block: nn.Module, index: int) -> Iterator[Any]:
    for name, module in block.named_modules(remove_duplicate=False):
        yield name, type(module), module.training
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        yield tuple((key, tuple(each.shape), each.dtype, each.requires_grad) for key, each in tensors)
        yield tuple((key, _attribute(value, index)) for key, value in sorted(vars(module).items(), key=_first))


def _first(item: tuple[str, Any]) -> str:
    return item[0]


def _attribute(value: Any, index: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value != index:
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value)):
            return type(value), value
        if isinstance(value, dict):  # torch's own tables of hooks and children, too
            is_table = not value or all(isinstance(each, nn.Module | Tensor | type(None)) for each in value.values())
            return "table" if is_table else id(value)
        return type(value) if isinstance(value, set) and not value else id(value)
    return "number of the block"


def remember(block: nn.Module, template: Template) -> None:
    """Note what a block returns."""

    def end(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]

        def shape_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in given:
                return Passed(given.index(id(leaf)))
            return Made(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)

        template.output = tree_map(shape_of, output)

    block.register_forward_hook(end, with_kwargs=True)


def skip(block: nn.Module, template: Template, recorder: Recorder) -> None:
    """Let a block return what another has returned, without running."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = [leaf for leaf in given if leaf.requires_grad]

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Passed):
                return given[leaf.place]
            if isinstance(leaf, Made):
                made: Callable[..., Tensor] = _Skipped.apply
                return made(recorder, leaf, *(sources if leaf.needs_grad else ()))
            return leaf

        return tree_map(value, template.output)

    block.forward = forward


class _Skipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, made: Made, *sources: Tensor) -> Tensor:
        ctx.recorder, ctx.shapes = recorder, [(source.shape, source.dtype) for source in sources]
        with recorder.values.mode:
            return torch.empty(made.shape, dtype=made.dtype)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Any, ...]:
        with ctx.recorder.values.mode:
            return None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.shapes)


def same_parameters(names: Sequence[str], blocks: Sequence[str], measured: Sequence[int]) -> set[str]:
    """Return names of parameters and, of those in measured blocks, the names in the blocks that repeat them."""
    found = set(names)
    for block, source in zip(blocks, measured, strict=True):
        prefix = f"{blocks[source]}."
        found |= {f"{block}.{name.removeprefix(prefix)}" for name in names if name.startswith(prefix)}
    return found
