"""Change how a parallelized module runs, after it was made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ._execution.modes import execution_of

__all__ = ["no_sync", "set_mode"]


def set_mode(module: nn.Module, mode: str, *parts: str) -> nn.Module:
    """Run a parallelized module, or some parts of it, in another mode from the next call on.

    Args:
        module: what :func:`parallelize_module` returned.
        mode: ``"eager"``, ``"static"`` or ``"compile"``.
        *parts: regexes of whole names of submodules; none for the whole module. Parts of a static module can be eager,
            parts of an eager one static; the mode of a part stays when that of the whole changes.

    Returns:
        The module.

    Raises:
        ValueError: the module is not parallelized, or there is no such mode.
        PlanError: a regex matches no submodule.

    Example:
        >>> set_mode(model, "static")                                   # doctest: +SKIP
        >>> set_mode(model, "eager", r"model\\.layers\\.3\\.mlp")       # to step through it    # doctest: +SKIP
    """
    execution = execution_of(module)
    if execution is not None:
        execution.set_mode(mode, parts)
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Leave partial gradients unreduced, to accumulate over several backward passes.

    Parameters whose gradient is a sum over ranks (norms under sequence parallelism) keep their partial gradient in
    ``.grad``, a DTensor that says so. The next backward outside of this context reduces old and new together.

    Args:
        module: what :func:`parallelize_module` returned.

    Raises:
        ValueError: the module is not parallelized.

    Example:
        >>> with no_sync(model):                                        # doctest: +SKIP
        ...     for batch in batches[:-1]:
        ...         model(batch).loss.backward()
        >>> model(batches[-1]).loss.backward()                          # doctest: +SKIP
    """
    execution = execution_of(module)
    with contextlib.nullcontext() if execution is None else execution.sync.no_sync():
        yield
