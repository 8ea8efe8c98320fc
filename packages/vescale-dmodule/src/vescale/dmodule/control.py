"""Change the mode of a parallelized module, and accumulate gradients without communication."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch import nn

from vescale.dtensor.extension import checked

from ._execution.modes import Mode, execution_of
from .errors import PlanError

__all__ = ["no_sync", "set_mode"]


@checked
def set_mode(module: nn.Module, mode: Mode, *parts: str) -> nn.Module:
    """Set the mode of a parallelized module, or of some parts of it, from the next call on.

    Args:
        module: the result of :func:`parallelize_module`.
        mode: ``"eager"``, ``"static"`` or ``"compile"``.
        *parts: regexes of fully qualified names of submodules; without any, the mode of the module itself changes.
            Parts of a static module can be eager, and parts of an eager module static. A part keeps its mode when the
            mode of the module changes.

    Returns:
        The module.

    Raises:
        ValueError: the module is not parallelized, or the mode is unknown.
        PlanError: a regex matches no submodule.

    Example:
        >>> set_mode(model, "static")                                   # doctest: +SKIP
        >>> set_mode(model, "eager", r"model\\.layers\\.3\\.mlp")       # for a debugger    # doctest: +SKIP
    """
    execution, names = execution_of(module), _matched(module, parts)
    if execution is not None:
        execution.set_mode(mode, names if parts else [""])
    return module


def _matched(module: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the submodules that patterns match."""
    names = [name for name, _ in module.named_modules() if name]
    found: list[str] = []
    for pattern in patterns:
        try:
            matched = [name for name in names if re.fullmatch(pattern, name)]
        except re.error as error:
            raise PlanError(f"set_mode: expected regexes for parts, got {pattern!r}: {error}") from error
        if not matched:
            known = ", ".join(names[:8])
            raise PlanError(
                f"set_mode: expected regexes of submodules for parts, got {pattern!r}; they are {known}, ..."
            )
        found += matched
    return found


@checked
@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients over several backward passes without reducing partial gradients.

    Inside, the ``.grad`` of a parameter with a partial gradient (norms under sequence parallelism) is a DTensor with
    Partial placements. The next backward pass outside of this context reduces the accumulated gradient.

    Args:
        module: the result of :func:`parallelize_module`.

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
