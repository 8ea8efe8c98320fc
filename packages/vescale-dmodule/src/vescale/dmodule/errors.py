"""Errors of ``vescale.dmodule``: a plan that does not fit, and communication that no plan entry shows."""

from __future__ import annotations

__all__ = ["ImplicitRedistributionError", "PlanError"]


class PlanError(ValueError):
    """A module plan that does not fit the module, the mesh, or what a module was called with."""


class ImplicitRedistributionError(RuntimeError):
    """An operator that would communicate on its own, because its operands do not fit and no boundary says so."""
