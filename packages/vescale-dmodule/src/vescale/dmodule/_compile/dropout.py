"""Dropout inside compiled blocks: an opaque operator draws the factors.

On local tensors dropout must draw this rank's part of the global values, by the rules of ``vescale.dtensor``. In a
graph this is one operator, which advances the random stream when the graph runs::

    dropout(x, p)   ->   x * dropout_factors(x, p, layout)          factors are 0 or 1 / (1 - p)

The operator is tagged as random, so a compiler neither drops, repeats nor merges its calls. Three kinds of dropout:

==========================  =============================================  ==========================================
tensor                      without a batch window                         with a batch window, or stream "philox"
==========================  =============================================  ==========================================
sharded                     the operator draws with the recorded layout    the same; its rules read the window
equal on all ranks          unchanged                                      the operator draws with the mode opened
not recorded                unchanged                                      an error after the block
==========================  =============================================  ==========================================

The mode that applies the batch window (``vescale.dtensor.random.local_batch``) is off while compiled code runs. Another
random operator in the block would ignore the window. An `Account` detects it: it compares the random stream before each
call of the operator with its state after the previous call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vescale.dtensor import extension

from .. import _torch
from .._boundary.edges import wrapped
from .._static.operators import RecordedOperator
from .._static.parts import describe
from ..errors import NotLocalFriendlyError

__all__ = ["CompiledDropout", "accounted", "dropout_obstacle", "is_dropout"]

# Arguments of operators are integers: a layout is its index in this list, which holds each layout once.
_layouts: list[tuple] = []

EQUAL = -1
"""The layout of a tensor that is equal on all ranks of the model."""


# ------------------------------------------------------------------------------------------------- the operator


@torch.library.custom_op("vescale_dmodule::dropout_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_factors(like: Tensor, p: float, layout: int) -> Tensor:
    """Return the factors of dropout for a local tensor, of the shape and dtype of ``like``."""
    return _drawn(like, p, layout)


@dropout_factors.register_fake
def _(like: Tensor, p: float, layout: int) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(like)


def _drawn(like: Tensor, p: float, layout: int) -> Tensor:
    with _torch.no_function_modes(), torch.no_grad(), _entered(_account.get()):
        ones = torch.ones_like(like)
        if layout == EQUAL:
            with extension.watched():
                return F.dropout(ones, p)
        mesh, placements, shape = _layouts[layout]
        return _torch.local_of(F.dropout(wrapped(ones, mesh, placements, shape=shape), p))


def _number(layout: tuple) -> int:
    if layout not in _layouts:
        _layouts.append(layout)
    return _layouts.index(layout)


# ------------------------------------------------------------------------------------------------- the account


class Account:
    """Checks that only the recorded random operators advance a random stream.

    Args:
        position: returns the position of the stream.
    """

    def __init__(self, position: Callable[[], extension.Position]):
        self._ask, self._position = position, position()
        self.is_right = True

    def check(self) -> None:
        """Compare the position of the stream with the last noted position."""
        self.is_right = self.is_right and self._ask() == self._position

    def move(self) -> None:
        """Note the position of the stream."""
        self._position = self._ask()


_account: ContextVar[Account | None] = ContextVar("vescale_account_of_draws", default=None)


@contextlib.contextmanager
def _entered(account: Account | None) -> Iterator[None]:
    """Account for one call of the operator."""
    if account is not None:
        account.check()
    yield
    if account is not None:
        account.move()


@contextlib.contextmanager
def accounted(name: str, position: Callable[[], extension.Position]) -> Iterator[None]:
    """Refuse random operators of a block other than `dropout_factors`.

    Raises:
        NotLocalFriendlyError: at the end, naming the block.
    """
    account = Account(position)
    token = _account.set(account)
    try:
        yield
    finally:
        _account.reset(token)
    account.check()
    if not account.is_right:
        raise NotLocalFriendlyError(
            f"{describe(name)} runs compiled on a part of the batch and drew random numbers, but the recorded call did "
            "not (a dropout rate that was 0?), so their global positions are unknown; call set_mode(model, "
            '"compile") after such a change, or run the model in mode "static"'
        )


# ------------------------------------------------------------------------------------------------- dropout


def dropout_obstacle(operators: Sequence[RecordedOperator], *, is_watched: bool = False) -> str | None:
    """Return why the random operators of a block cannot run in a graph; None if they can.

    Args:
        operators: of all modules in the block.
        is_watched: whether tensors that are equal on the ranks of the model have a batch window.
    """
    layouts: dict[torch.Size, object] = {}
    for operator in operators:
        if not is_dropout(operator):
            if operator.is_sharded or is_watched:
                where = "for a part of the batch" if is_watched else "on sharded tensors"
                return f"only dropout can be compiled {where}, not {operator}"
            continue
        (operand,) = operator.operands
        layout = operand.placements, operand.shape
        if layouts.setdefault(operand.local_shape, layout) != layout:
            return f"dropout of local shape {tuple(operand.local_shape)} has two layouts"
    return None


def is_dropout(operator: RecordedOperator) -> bool:
    """Return whether `CompiledDropout` can run a random operator."""
    return operator.function is F.dropout and len(operator.operands) == 1


class CompiledDropout(TorchFunctionMode):
    """Run dropout of recorded local shapes with their layouts.

    Args:
        operators: recorded.
        mesh: of the layouts.
        is_watched: whether tensors that are equal on the ranks of the mesh have a batch window.
    """

    def __init__(self, operators: Sequence[RecordedOperator], mesh: DeviceMesh, *, is_watched: bool = False):
        super().__init__()
        self.layouts: dict[torch.Size, int] = {}
        for operator in filter(is_dropout, operators):
            (operand,) = operator.operands
            if operator.is_sharded:
                self.layouts[operand.local_shape] = _number((mesh, operand.placements, operand.shape))
            elif is_watched:
                self.layouts[operand.local_shape] = EQUAL

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.dropout(*args, **kwargs)
        if func is Tensor.unflatten:  # a compiler cannot trace its Python code under a function mode
            func = torch.unflatten
        return func(*args, **kwargs)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        """Return the result of ``torch.nn.functional.dropout``."""
        layout = self.layouts.get(input.shape)
        if layout is None or not training or p == 0:
            return F.dropout(input, p, training, inplace)
        # outside of a graph, the mode of the batch window would intercept the operator
        draw = dropout_factors if torch.compiler.is_compiling() else _drawn
        factors = draw(input.detach(), float(p), layout)
        return input.mul_(factors) if inplace else input * factors
