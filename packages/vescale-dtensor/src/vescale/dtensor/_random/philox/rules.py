"""The rules of the counter-based stream: what every random operator draws while it is active."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._containers import tensors_in
from ..._layout.boxes import Box
from ..._operators.attention import is_fused_without_dropout, refuse_dropout
from ..._operators.decompose import decompose
from ..._torch import dispatch as _torch
from ..._torch.generator import is_default_generator
from ...errors import UnsupportedRandomOperator
from ..stock import rules as _random_rules
from . import state as _state
from .boxes import Draw
from .choices import choice_rules
from .elements import sample_box
from .fills import FILLS, Rule, fill_rules, new_rules, positional_rules

__all__ = ["fill_views", "handle", "runs_stock"]

_thread = threading.local()


def runs_stock() -> bool:
    """Tell whether this thread runs stock operators for a rule, which dispatch modes must leave alone."""
    return getattr(_thread, "runs_stock", False)


@contextlib.contextmanager
def _stock() -> Iterator[None]:
    before, _thread.runs_stock = runs_stock(), True
    try:
        yield
    finally:
        _thread.runs_stock = before


def handle(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run a random operator, on plain tensors or DTensors, in the counter-based stream.

    A generator that the program made itself is another stream, which stays the stock one.

    Raises:
        UnsupportedRandomOperator: there is no rule for the operator, or the tensor has no place in the global draw.
    """
    generator = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)), None)
    if generator is not None and not is_default_generator(generator):
        return _as_stock(op, args, kwargs)
    if _is_meta(args, kwargs):  # stock torch spends nothing on it, either
        return _as_stock(op, args, kwargs)
    rule = _rules().get(op)
    if rule is not None:
        return _draw(rule, op, args, kwargs)
    if _torch.is_composite(op):
        return decompose(op, args, kwargs)
    if "out" in kwargs and (functional := _without_out(op)) is not None:
        return _into_out(functional, args, kwargs)
    if is_fused_without_dropout(op, args, kwargs):
        return _torch.stock_dispatch(op, args, kwargs)
    if "dropout_p" in _torch.argument_names(op):
        refuse_dropout(op, args, kwargs)
    tensor = next(tensors_in((args, kwargs)), None)
    raise UnsupportedRandomOperator.for_tensor(
        op, tensor, 'it has no rule in the stream "philox"; draw it inside random.stream("torch")'
    )


def fill_views(
    op: _torch.Op,
    args: tuple,
    kwargs: dict,
    *,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    views: Iterable[tuple[Box, Tensor]],
) -> None:
    """Spend one draw of an in-place operator on a tensor of global ``shape``, and fill parts of it.

    Args:
        op: one of the operators in ``_fills.FILLS``.
        args: its arguments after the tensor.
        kwargs: its keyword arguments.
        dtype: dtype of the tensor.
        shape: its global shape.
        views: boxes of it with the memory that stores them; there may be none.
    """
    distribution = FILLS[op.name().removeprefix("aten::")](dtype, *args, **kwargs)
    key = _state.take_key()
    for box, view in views:
        for index, values in sample_box(distribution, key, shape, box, view.device):
            view[index].copy_(values)


@functools.cache
def _rules() -> dict[_torch.Op, Rule]:
    rules = fill_rules() | new_rules() | positional_rules() | choice_rules()
    return {op: rule for name, rule in rules.items() if (op := _torch.overload(name)) is not None}


def _draw(rule: Rule, op: _torch.Op, args: tuple, kwargs: dict) -> object:
    before = torch.get_rng_state()
    # what the generator's state says is older: it was so in the forward that is now repeated
    windows = _state.current_windows() or _random_rules.WINDOWS.get()
    try:
        return rule(Draw(op, _state.take_key(), windows), args, kwargs)
    except Exception:
        torch.set_rng_state(before)  # a draw that failed is none
        raise


def _as_stock(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs)))
    by_rule = _random_rules.WINDOWS.get() or is_sharded
    with _stock():
        return _random_rules.handle(op, args, kwargs) if by_rule else op(*args, **kwargs)


def _is_meta(args: tuple, kwargs: dict) -> bool:
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    if tensors:
        return all(tensor.is_meta for tensor in tensors)
    return torch.device(kwargs.get("device") or "cpu").type == "meta"


def _without_out(op: _torch.Op) -> _torch.Op | None:
    """Return the overload of ``rand.generator_out`` that makes a new tensor: ``rand.generator``."""
    name, _, overload = op.name().removeprefix("aten::").partition(".")
    return _torch.overload(f"{name}.{overload.removesuffix('out').removesuffix('_')}".removesuffix("."))


def _into_out(op: _torch.Op, args: tuple, kwargs: dict) -> Tensor:
    rest = dict(kwargs)
    out = rest.pop("out")
    names = _torch.argument_names(op)
    made = handle(op, args, rest | {name: getattr(out, name) for name in ("dtype", "device") if name in names})
    if out.shape != made.shape:
        out.resize_(made.shape)
    return out.copy_(made)
