"""Errors of ``vescale.dmodule``: a plan that does not fit, and communication that no plan entry shows."""

from __future__ import annotations

from vescale.dtensor import ImplicitRedistributionError

__all__ = ["ImplicitRedistributionError", "NotLocalFriendlyError", "PlanError"]


class PlanError(ValueError):
    """A module plan that does not fit the module, the mesh, or what a module was called with."""


class NotLocalFriendlyError(RuntimeError):
    """A module whose own code gives something else on local tensors than on DTensors, in static or compiled mode."""
