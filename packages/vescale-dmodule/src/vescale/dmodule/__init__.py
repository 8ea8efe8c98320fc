"""Module parallelization of veScale: tensor, sequence and expert parallelism for any module, its code untouched."""

from . import plans
from ._describe import TensorLayout, describe
from .errors import ImplicitRedistributionError, PlanError
from .parallelize import parallelize_module

__all__ = ["ImplicitRedistributionError", "PlanError", "TensorLayout", "describe", "parallelize_module", "plans"]
