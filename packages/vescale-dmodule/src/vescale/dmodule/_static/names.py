"""Fully qualified names."""

from __future__ import annotations

import re

__all__ = ["describe", "is_inside", "join", "ways_out"]


def join(owner: str, name: str) -> str:
    """Return the full name of a part.

    Example:
        >>> join("model", "norm.weight"), join("", "norm")
        ('model.norm.weight', 'norm')
    """
    return ".".join(filter(None, (owner, name)))


def is_inside(name: str, owner: str) -> bool:
    """Tell whether ``name`` is ``owner`` or a part of it.

    Example:
        >>> is_inside("h.1.mlp", "h.1"), is_inside("h.10", "h.1")
        (True, False)
    """
    return name == owner or not owner or name.startswith(f"{owner}.")


def describe(name: str) -> str:
    """Return how errors call a module.

    Example:
        >>> describe("h.1"), describe("")
        ("module 'h.1'", 'the root module')
    """
    return f"module {name!r}" if name else "the root module"


def ways_out(name: str, *, is_draw: bool = False) -> str:
    """Say what to do about a module that is not right on local tensors; names are escaped, plans have regexes.

    Args:
        name: of the module.
        is_draw: whether only DTensors help.

    Example:
        >>> ways_out("h.1", is_draw=True)
        'keep the module on DTensors ("eager": [r"h\\\\.1"] in the plan, or set_mode(model, "eager", r"h\\\\.1"))'
    """
    escaped = re.escape(name)
    in_plan = f'"eager": [r"{escaped}"] in the plan, or set_mode(model, "eager", r"{escaped}")'
    keep = f"keep the module on DTensors ({in_plan})" if name else 'run the model on DTensors (mode="eager")'
    if is_draw:
        return keep
    attribute = rf"{escaped}\.NAME" if name else "NAME"
    return (
        f'change the attribute that it reads ("local_attribute": {{r"{attribute}": Divided("tp")}} in the plan), '
        f"bring the values that it reads to other placements by a boundary, or {keep}"
    )
