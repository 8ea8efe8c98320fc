"""Module parallelization of veScale: tensor, sequence and expert parallelism for any module, without touching its code."""

from . import plans
from ._describe import TensorLayout, describe
from .errors import PlanError
from .parallelize import parallelize_module

__all__ = ["PlanError", "TensorLayout", "describe", "parallelize_module", "plans"]
