"""Errors of ``vescale.dmodule``: a plan that does not fit, and communication that no plan entry shows."""

from __future__ import annotations

from vescale.dtensor import ImplicitRedistributionError

__all__ = ["ImplicitRedistributionError", "PlanError"]


class PlanError(ValueError):
    """A module plan that does not fit the module, the mesh, or what a module was called with."""
