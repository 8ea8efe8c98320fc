"""Every process-wide change that importing ``vescale.dtensor`` makes: one table, installed and removed by name.

The changes concern DTensors only; plain tensors run stock torch, always, except that waits for functional collectives
name lost ranks. ``disabled()`` removes all of them, or some
families, and puts them back::

    import vescale.dtensor    register()     installs all rows
    with disabled():                         removes them, in reverse order; torch is as if never imported
    end of the context                       installs them again

Both ends of the context empty DTensor's caches of sharding decisions, because cached decisions depend on the rules in
force.

Guarantee: inside ``disabled()`` each replaced attribute is torch's own object, and programs on DTensors give the bits,
texts and errors of a process that never imported this package.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.nn import functional

from ._exit import wait_for_gloo_threads
from ._operators import (
    apart,
    fallback,
    forget_copies,
    in_orders_of_kernels,
    in_row_major_order,
    operator_handlers,
    pointwise_operators,
    review,
    without_elements,
)
from ._operators.attention import attention_handlers
from ._operators.batch_norm import batch_norm_handlers
from ._operators.blocks import on_blocks
from ._operators.decompose import composite_handlers
from ._operators.dims import seeing_counted_dims, with_counted_dims
from ._operators.loss import loss_handlers
from ._operators.memory_order import order_of_shards
from ._operators.metadata import CHANGES_OF_SHAPE, assignable_data, change_of_program
from ._operators.overlaps import refuse_overlaps
from ._operators.scalars import TAKING_NUMBERS, as_lists, scalar_handlers, taking_complex_numbers
from ._operators.vocabulary import vocab_handlers
from ._placements.checkpoint import PROTOCOL, boxes, global_shape
from ._placements.hooks import (
    add_whole_once,
    for_own_placements,
    has_ragged,
    redistribute_method,
    redistribute_shards,
    refuse_to_guess,
)
from ._placements.interleaved import keep_interleaved
from ._placements.redistribute import shard_gradient
from ._placements.rules import decide
from ._placements.types import BlockShard, InterleavedShard, RaggedShard
from ._random.rules import handlers
from ._random.stock.factories import make_as_one_device
from ._torch import decisions, dispatch, kernels, patches, plain, propagation, recompute, waits
from .debug._repr import repr_with_layout

__all__ = ["FAMILIES", "ROWS", "Row", "disabled", "register"]

Table = dict[patches.Op, patches.Handler]

FAMILIES = ("random", "operators", "placements", "repr", "process")


@dataclass(frozen=True)
class Row:
    """One process-wide change.

    Attributes:
        name: short and unique.
        family: the name by which ``disabled`` selects it.
        reason: why torch's own behavior is not enough.
        patch: installs and removes the change; its ``place`` names the replaced attribute or table.
        until: the first version of torch that does not need the change; None if all supported versions need it.
    """

    name: str
    family: str
    reason: str
    patch: patches.Patch
    until: tuple[int, int] | None = None


@functools.cache
def handler_families() -> dict[str, Table]:
    """Return the handlers of operators by family; no operator is in two of them."""
    others = operator_handlers() | composite_handlers() | scalar_handlers()
    for special in (batch_norm_handlers(), loss_handlers(), vocab_handlers()):
        others |= in_orders_of_kernels(special)
    others |= attention_handlers()
    random = {op: handler for op, handler in handlers().items() if op not in attention_handlers()}
    families = {"random": random, "operators": {op: handler for op, handler in others.items() if op not in random}}
    return {
        family: {op: seeing_counted_dims(op, handler) for op, handler in table.items()}
        for family, table in families.items()
    }


def _checkpoint_rows() -> Iterator[Row]:
    """Yield the rows that give DTensors the box protocol and the methods of DCP."""
    reason = "checkpoints must see every box of ragged and interleaved shards; torch's own placements have one box"
    for name, value in (("__boxes__", boxes), ("__global_shape__", global_shape)):
        yield Row(name, "placements", reason, patches.dtensor_attribute(name, lambda _, value=value: value))
    for name, function in PROTOCOL.items():
        make: Callable = functools.partial(for_own_placements, function=function)
        yield Row(name, "placements", reason, patches.dtensor_attribute(name, make))


ROWS: tuple[Row, ...] = (
    Row(
        "random operators",
        "random",
        "stock draws on each shard by itself, so that values depend on the layout; on a CPU mesh all shards repeat",
        patches.HandlerPatch(lambda: handler_families()["random"]),
    ),
    Row(
        "random factories",
        "random",
        "torch.distributed.tensor.rand draws on the shard, not at all on the CPU; its linspace divides each shard anew",
        patches.random_factories(make_as_one_device),
    ),
    Row(
        "repeated functions",
        "random",
        "a function that backward repeats would draw outside of the parts of a batch in which it has run",
        recompute.checkpoint_patch(),
    ),
    Row(
        "operators",
        "operators",
        "operators whose stock rule is missing, guessed or wrong under some sharding",
        patches.HandlerPatch(lambda: handler_families()["operators"]),
    ),
    Row(
        "non-negative dims",
        "operators",
        "some of stock's rules take a negative dim for one that is not sharded: cumsum(-1), argmax(-1)",
        propagation.RulePatch(propagation.PropagationRule(arguments=with_counted_dims), order=0),
    ),
    Row(
        "memory read and written",
        "operators",
        "x.add_(x[:1]) reads what it writes, which torch refuses on those ranks alone where the shard is dense",
        propagation.RulePatch(propagation.PropagationRule(before=apart), order=0),
    ),
    Row(
        "memory read, moved and written",
        "operators",
        "x[:, 1:].add_(x[:, :-1].t()) reads all of an operand that is redistributed before it writes, also later",
        patches.moves_of_operands(refuse_overlaps),
    ),
    Row(
        "blocks of uneven shards",
        "operators",
        "stock gathers a tensor with uneven shards to merge its dims, as every linear layer does, and all that follows",
        propagation.RulePatch(propagation.PropagationRule(before=on_blocks), order=1),
    ),
    Row(
        "review of sharding",
        "operators",
        "stock decisions that are wrong for the shapes at hand; operators for which stock raises run on full operands",
        propagation.RulePatch(
            propagation.PropagationRule(before=without_elements, on_error=fallback, after=review), order=3
        ),
    ),
    Row(
        "a bias added once",
        "operators",
        "stock adds bias / n on each of n ranks, which rounds; here one rank adds all of it",
        patches.division_into_partials(add_whole_once),
    ),
    Row(
        "torch's own plain tensors",
        "operators",
        "torch's formulas and functions make plain tensors, equal on all ranks, which stock refuses beside DTensors",
        plain.plain_operands_patch(),
    ),
    Row(
        "x.data = y",
        "operators",
        "stock changes nothing but the shape that the tensor reports: values put in place are lost",
        patches.dtensor_attribute("data", assignable_data),
    ),
    Row(
        "changes of shape in place",
        "operators",
        "views that a program has of the tensor get wrong gradients; what functions of torch make has no views",
        patches.PatchGroup(
            "torch.distributed.tensor.DTensor: the methods of CHANGES_OF_SHAPE",
            [patches.dtensor_attribute(name, change_of_program) for name in CHANGES_OF_SHAPE],
        ),
    ),
    Row(
        "complex numbers",
        "operators",
        "stock cannot look up x ** 1j, 1j - x and x == 1j in its cache",
        patches.PatchGroup(
            "torch.distributed.tensor.DTensor: the methods of TAKING_NUMBERS",
            [patches.dtensor_attribute(name, taking_complex_numbers) for name in TAKING_NUMBERS],
        ),
    ),
    Row(
        "lists of values",
        "operators",
        "stock refuses x.tolist(), because DTensor is a subclass of Tensor",
        patches.dtensor_attribute("tolist", as_lists),
    ),
    Row(
        "cache keys",
        "operators",
        "stock answers topk(x, 2) after topk(x, 1) with the shape of the first call",
        decisions.CacheKeyPatch(dispatch.operators),
    ),
    Row(
        "pointwise operators",
        "operators",
        "stock guesses that x[..., 0] = 5 and the gradients of hardtanh and hardswish need full operands",
        decisions.PointwiseRulesPatch(pointwise_operators),
    ),
    Row(
        "memory order",
        "operators",
        "stock takes the strides of a result from a formula, which for some operators differs from the kernel",
        kernels.strides_of_kernels(),
    ),
    Row(
        "memory order of shards",
        "operators",
        "a kernel may order a shard otherwise than the whole, where a dim of the shard has size 1: views then fail",
        propagation.RulePatch(propagation.PropagationRule(last=order_of_shards), order=4),
    ),
    Row(
        "one_hot",
        "operators",
        "torch makes it by a comparison where it is given a DTensor, in another memory order than its own zeros",
        patches.AttributePatch((functional,), "one_hot", in_row_major_order),
    ),
    Row(
        "identity of meshes",
        "operators",
        "stock answers a call on a mesh with a result on an older, equal mesh, whose groups other ranks do not use",
        decisions.identity_of_meshes(),
    ),
    Row(
        "steps between layouts",
        "operators",
        "stock computes them again in each search of a redistribution: seconds of a first call on a mesh of two axes",
        decisions.steps_between_layouts(),
    ),
    Row(
        "operands as given",
        "operators",
        "stock prices all ways to run an operator, also where it runs on its operands as they are laid out",
        decisions.operands_as_given(),
    ),
    Row(
        "loss_parallel",
        "operators",
        "at its end stock removes the handlers of its operators, ours among them",
        patches.LossParallelPatch(),
    ),
    Row(
        "rules of placements",
        "placements",
        "torch has no rules for operators on ragged shards and wrong ones for interleaved shards",
        propagation.RulePatch(propagation.PropagationRule(before=decide, names=keep_interleaved), order=2),
    ),
    Row(
        "redistribute_local_tensor",
        "placements",
        "moves ragged and interleaved shards, meshes whose ranks do not ascend, several Partial axes in one collective",
        patches.redistribution_of_shards(redistribute_shards),
    ),
    Row(
        "DTensor.redistribute",
        "placements",
        "torch refuses ragged placements and confuses the order of interleaved ones",
        patches.dtensor_attribute("redistribute", redistribute_method),
    ),
    Row(
        "guess of global shapes",
        "placements",
        "from_local would guess a wrong global shape from a ragged shard",
        patches.global_shape_of_local(refuse_to_guess),
    ),
    Row(
        "backward of to_local",
        "placements",
        "torch cannot compute the global strides of a ragged gradient",
        patches.to_local_backward(has_ragged, shard_gradient),
    ),
    *_checkpoint_rows(),
    Row(
        "safe to load",
        "placements",
        "torch.load(weights_only=True) reads tensors in our placements, as it reads those in torch's",
        patches.SafeGlobalsPatch([BlockShard, InterleavedShard, RaggedShard]),
    ),
    Row(
        "repr",
        "repr",
        "stock prints the shard as if it were the tensor",
        patches.dtensor_attribute("__repr__", repr_with_layout),
    ),
    Row(
        "waits in operators",
        "process",
        "gloo's errors do not say which rank is gone, and only the neighbors of a lost rank get one",
        waits.FunctionalCollectivesPatch(),
    ),
    Row(
        "waits in distribute_tensor",
        "process",
        "gloo's errors do not say which rank is gone, and only the neighbors of a lost rank get one",
        waits.distribution_patch(),
    ),
    Row(
        "wait at exit",
        "process",
        "a late thread of gloo that needs Python's lock while Python ends aborts the process",
        patches.ExitPatch(wait_for_gloo_threads),
    ),
)

_installed: list[Row] = []


def register() -> None:
    """Install all rows that this torch needs. Called once, on import."""
    _install([row for row in ROWS if row.until is None or patches.torch_version() < row.until])


def _install(rows: list[Row]) -> None:
    for row in rows:
        row.patch.install()
        _installed.append(row)


def _remove(rows: list[Row]) -> None:
    for row in reversed(rows):
        row.patch.remove()
        _installed.remove(row)


@contextlib.contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Run DTensors as stock torch does, for comparison. Process-wide while the context is open; contexts nest.

    Args:
        names: the families of changes to remove; without names, all families.

            - ``"random"``: random operators. Each shard then draws its own values, and the contexts of
              :mod:`vescale.dtensor.random` do nothing.
            - ``"operators"``: all other operators.
            - ``"placements"``: ragged and interleaved placements, which then cannot be used, and the reduction of
              several Partial axes in one collective.
            - ``"repr"``: the ``repr`` of a DTensor.
            - ``"process"``: the function that runs at the end of the program, and waits for collectives on the CPU that
              name lost ranks.

    Raises:
        ValueError: no such family.

    Example:
        >>> with disabled("random"):                # doctest: +SKIP
        ...     dropped = torch.dropout(x, 0.5, True)   # on a CPU mesh every shard repeats the same mask
    """
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ValueError(
            f"disabled: expected names among {', '.join(FAMILIES)}, got {', '.join(map(str, unknown))}; pass "
            "some of those"
        )
    removed = [row for row in _installed if row.family in (names or FAMILIES)]
    forget_copies()
    _remove(removed)
    decisions.forget_decisions()
    try:
        yield
    finally:
        forget_copies()
        _install(removed)
        decisions.forget_decisions()
