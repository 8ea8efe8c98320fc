"""The rules of all random operators, on shards and on parts of a batch, in both streams.

From top to bottom, a random operator takes these steps::

    rules             the handler of the operator selects the stream in force
       "torch"        stock/{fills, elements, gathered}         "philox"   philox/{fills, choices}
    global position   which elements of the tensor of one device this rank holds
    draw and keep     stock/draw: walk the global draw,         philox/elements: compute the words
                      keep the elements of this rank            of these elements alone

Families of operators:

=============  ====================================================  ==================================================
fill           ``uniform_ normal_ bernoulli_(float) exponential_``…  values do not depend on the old contents
new tensor     ``rand_like randint_like rand.out``…                  a fill of a new tensor, or of ``out``
element        ``native_dropout bernoulli(p) normal(mean, std)``…    a fill, then local arithmetic
gathered       ``multinomial poisson binomial rrelu``…               operands are gathered first
composite      ``dropout alpha_dropout lstm``…                       the operators that define them
=============  ====================================================  ==================================================

Every other operator that consumes the generator is refused, see :class:`UnsupportedRandomOperator`. In both streams the
generator ends where it ends on one device, on every rank, also outside the mesh, without communication.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .._operators.attention import is_fused_without_dropout, refuse_dropout, run_fused
from .._operators.decompose import decompose
from .._torch import dispatch
from .._torch.dispatch import in_backward
from .._torch.generator import is_default_generator
from ..errors import UnsupportedRandomOperator
from .global_position import WINDOWS, GlobalPosition
from .philox import state as philox_state
from .philox.choices import choice_rules
from .philox.elements import Draw, sample_box
from .philox.fills import FILLS, Rule, fill_rules, new_rules, positional_rules
from .state import PHILOX, current
from .stock.draw import Scratch, draw_into
from .stock.elements import element_handlers
from .stock.fills import fill_handlers
from .stock.gathered import gathered_handlers

__all__ = ["draw_part", "handle", "handlers", "is_enabled", "on_draw", "philox_handle", "runs_stock"]

DrawObserver = Callable[[list[DTensor]], None]
_OBSERVER: ContextVar[DrawObserver | None] = ContextVar("vescale_draw_observer", default=None)


@contextlib.contextmanager
def on_draw(observer: DrawObserver) -> Iterator[None]:
    """Call ``observer`` with the DTensors among the operands of every random operator, before it draws."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


@functools.cache
def handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return a handler ``f(op, args, kwargs)`` for every ATen operator that consumes a generator."""
    return {op: _in_stream(handler) for op, handler in stock_handlers().items()}


def handle(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run a random operator by its rule in the stream in force; one without a rule (of another library) is refused."""
    return handlers().get(op, _in_stream(_refuse))(op, args, kwargs)


def is_enabled() -> bool:
    """Return whether rules for random operators are installed, as outside :func:`vescale.dtensor.disabled`."""
    return torch.ops.aten.uniform_.default in dispatch.handler_table()


@functools.cache
def _in_stream(stock: dispatch.Handler) -> dispatch.Handler:
    """Return a handler that runs ``stock`` in the stream "torch", and the rules of "philox" in that stream.

    Raises:
        RuntimeError: when called, in the stream "torch", while backward repeats a forward that ran in "philox".
    """

    def handle(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
        if (observer := _OBSERVER.get()) is not None:
            observer([tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)])
        if current() == PHILOX:
            return philox_handle(op, args, kwargs)
        if in_backward() and philox_state.is_marked(torch.get_rng_state()):
            raise RuntimeError(
                f'{op} recomputes a forward pass that ran inside random.stream("philox"), but backward() runs outside '
                "of it; call backward() inside the same context"
            )
        return stock(op, args, kwargs)

    return handle


def draw_part(
    op: dispatch.Op,
    local: Tensor,
    position: GlobalPosition,
    args: tuple,
    kwargs: dict,
    *,
    generator: torch.Generator | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Fill ``local`` with its part of the global draw of an in-place operator, in the stream in force.

    Args:
        op: one of ``stock.draw.PIECEWISE_OPS``.
        local: the local tensor; only its dtype and device count if ``position`` has no boxes.
        position: the global position of its elements.
        args: positional arguments of ``op`` after the tensor.
        kwargs: its keyword arguments, without ``generator``.
        generator: the generator; None takes the default one, and with it the stream in force.
        scratch: memory to share with other draws.
    """
    if generator is not None or current() != PHILOX:
        draw_into(op, local, position, args, {**kwargs, "generator": generator}, scratch)
        return
    distribution = FILLS[op.name().removeprefix("aten::")](local.dtype, *args, **kwargs)
    key = philox_state.take_key()
    for box, view in position.boxed_views(local):
        for index, values in sample_box(distribution, key, position.shape, box, view.device):
            view[index].copy_(values)


# ------------------------------------------------------------------------------------------------- stream "torch"


@functools.cache
def stock_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of all random operators in the stream "torch"."""
    table = fill_handlers() | element_handlers() | gathered_handlers()
    for op in filter(dispatch.is_random, dispatch.operators()):
        table.setdefault(op, _other(op))
    return table


def _other(op: dispatch.Op) -> dispatch.Handler:
    """Return the handler of a random operator that is in no family."""
    if dispatch.is_composite(op):
        return decompose
    return run_fused if "dropout_p" in dispatch.argument_names(op) else _refuse


def _refuse(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    tensor = next(tensors_in((args, kwargs)), None)
    if isinstance(tensor, DTensor):
        way_out = "draw it on a plain tensor, or gather with full_tensor() first"
    else:
        way_out = "call it outside random.local_batch, or draw a tensor whose dim 0 is the batch"
    raise UnsupportedRandomOperator.for_tensor(op, tensor, way_out)


# ------------------------------------------------------------------------------------------------- stream "philox"


# Whether a rule of this thread runs a stock operator. Per thread, as dispatch modes are.
_thread = threading.local()


def runs_stock() -> bool:
    """Return whether this thread runs stock operators for a rule, which dispatch modes must leave alone."""
    return getattr(_thread, "runs_stock", False)


@contextlib.contextmanager
def _stock() -> Iterator[None]:
    before, _thread.runs_stock = runs_stock(), True
    try:
        yield
    finally:
        _thread.runs_stock = before


def philox_handle(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run a random operator, on plain tensors or DTensors, in the stream "philox".

    A generator created by the program is another stream, which stays the stock one.

    Raises:
        UnsupportedRandomOperator: there is no rule for the operator, or the tensor has no global position.
    """
    generator = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)), None)
    if generator is not None and not is_default_generator(generator):
        return _as_stock(op, args, kwargs)
    if _is_meta(args, kwargs):  # stock torch draws nothing for it, either
        return _as_stock(op, args, kwargs)
    rule = _rules().get(op)
    if rule is not None:
        return _draw(rule, op, args, kwargs)
    if dispatch.is_composite(op):
        return decompose(op, args, kwargs)
    if "out" in kwargs and (functional := _without_out(op)) is not None:
        return _into_out(functional, args, kwargs)
    if is_fused_without_dropout(op, args, kwargs):
        return dispatch.stock_dispatch(op, args, kwargs)
    if "dropout_p" in dispatch.argument_names(op):
        refuse_dropout(op, args, kwargs)
    tensor = next(tensors_in((args, kwargs)), None)
    raise UnsupportedRandomOperator.for_tensor(
        op, tensor, 'it has no rule in the stream "philox"; draw it inside random.stream("torch")'
    )


@functools.cache
def _rules() -> dict[dispatch.Op, Rule]:
    rules = fill_rules() | new_rules() | positional_rules() | choice_rules()
    return {op: rule for name, rule in rules.items() if (op := dispatch.overload(name)) is not None}


def _draw(rule: Rule, op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    before = torch.get_rng_state()
    # the windows in the generator's state come first: a recomputation restores those of its forward pass
    windows = philox_state.current_windows() or WINDOWS.get()
    try:
        return rule(Draw(op, philox_state.take_key(), windows), args, kwargs)
    except Exception:
        torch.set_rng_state(before)  # a failed draw does not count
        raise


def _as_stock(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs)))
    by_rule = WINDOWS.get() or is_sharded
    with _stock():
        return stock_handlers().get(op, _refuse)(op, args, kwargs) if by_rule else op(*args, **kwargs)


def _is_meta(args: tuple, kwargs: dict) -> bool:
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    if tensors:
        return all(tensor.is_meta for tensor in tensors)
    return torch.device(kwargs.get("device") or "cpu").type == "meta"


def _without_out(op: dispatch.Op) -> dispatch.Op | None:
    """Return the overload of ``rand.generator_out`` that makes a new tensor: ``rand.generator``."""
    name, _, overload = op.name().removeprefix("aten::").partition(".")
    return dispatch.overload(f"{name}.{overload.removesuffix('out').removesuffix('_')}".removesuffix("."))


def _into_out(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    rest = dict(kwargs)
    out = rest.pop("out")
    names = dispatch.argument_names(op)
    made = philox_handle(op, args, rest | {name: getattr(out, name) for name in ("dtype", "device") if name in names})
    if out.shape != made.shape:
        out.resize_(made.shape)
    return out.copy_(made)
