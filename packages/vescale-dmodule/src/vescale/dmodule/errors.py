"""Errors that ``vescale.dmodule`` raises before any communication."""

from __future__ import annotations

__all__ = ["PlanError"]


class PlanError(ValueError):
    """A module plan that does not fit the module or the mesh."""
