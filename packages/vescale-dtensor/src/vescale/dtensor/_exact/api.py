"""The context :func:`exact`.

Note [other dispatch modes]: torch asks the innermost dispatch mode alone about an operator on DTensors, if that mode
leaves it to DTensor. So a mode that is opened inside of the context, such as a log of communication, would take the
operators away from ours without a trace. `_Innermost` sees every function of torch, and refuses such modes by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .._checked import Count, checked
from .._exact_context import NUM_BLOCKS
from .._random.streams import PhiloxMode, RandomMode
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .mode import ExactMode

__all__ = ["exact", "set_exact"]

PASSES_ON = "_vescale_passes_on"
"""Attribute of a dispatch mode that calls every operator, with the operands it has got."""


class _Innermost(TorchFunctionMode):
    """Refuse functions in a dispatch mode that was opened inside of the context; see Note [other dispatch modes]."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        modes = dispatch.dispatch_modes()
        ours = [position for position, mode in enumerate(modes) if isinstance(mode, ExactMode)]
        for mode in modes[ours[-1] :] if ours else ():
            passes_on = isinstance(mode, (ExactMode, PhiloxMode, RandomMode)) or getattr(mode, PASSES_ON, False)
            if not passes_on:
                raise UnsupportedOperator(
                    f"the dispatch mode {type(mode).__name__} inside of vescale.dtensor.exact: expected it around the "
                    "context, got it inside, where it would hide operators on DTensors: open it before exact"
                )
        return func(*args, **(kwargs or {}))


@checked
@contextlib.contextmanager
def exact(*, num_blocks: Count = 8) -> Iterator[None]:
    """Give every result the same bits on every layout: in one process, and on any mesh of DTensors.

    Sums and products run in ``num_blocks`` blocks of fixed boundaries, whose results are added in a fixed order. Put
    the whole step inside: forward, backward, clipping and the step of the optimizer. The bits depend on ``num_blocks``;
    they are not those of the program outside of the context. It is slower by a factor (see ``docs/howto/exact.md``).

    Kernels run in one thread meanwhile, because their number changes the order of additions. Attention takes its
    unfused form.

    Args:
        num_blocks: a multiple of the number of ranks of every mesh axis.

    Raises:
        ValueError: inside of another ``exact`` with another ``num_blocks``.
        UnsupportedOperator: inside, for what has no exact form, by name.

    Example:
        >>> x = torch.linspace(0, 1, 1000)
        >>> with exact(num_blocks=8):
        ...     total = x.sum()                      # the bits of any DTensor with these values
        >>> torch.allclose(total, x.sum())
        True
    """
    if (outer := NUM_BLOCKS.get()) not in (None, num_blocks):
        raise ValueError(
            f"expected exact(num_blocks={outer}) inside of exact(num_blocks={outer}), got num_blocks={num_blocks}: "
            "bits depend on it; open the contexts one after the other"
        )
    if outer is not None:
        yield
        return
    token, num_threads = NUM_BLOCKS.set(num_blocks), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with sdpa_kernel(SDPBackend.MATH), ExactMode(num_blocks), _Innermost():
            yield
    finally:
        torch.set_num_threads(num_threads)
        NUM_BLOCKS.reset(token)


_process = contextlib.ExitStack()


@checked
def set_exact(num_blocks: Count | None) -> None:
    """Enter :func:`exact` for the rest of the process, or leave what this function has entered.

    ``vescale.Plan(exact=8)`` calls it, so that the loop around the model, its backward and its optimizer run inside.

    Args:
        num_blocks: as for :func:`exact`; None to leave it.

    Raises:
        ValueError: inside of an ``exact`` with another ``num_blocks``.

    Example:
        >>> set_exact(8)
        >>> total = torch.linspace(0, 1, 1000).sum()     # the bits of any DTensor with these values
        >>> set_exact(None)
    """
    if num_blocks is None:
        _process.close()
    elif NUM_BLOCKS.get() != num_blocks:
        _process.enter_context(exact(num_blocks=num_blocks))
