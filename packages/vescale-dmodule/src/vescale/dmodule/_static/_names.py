"""Fully qualified names."""

from __future__ import annotations

__all__ = ["is_inside", "join"]


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
