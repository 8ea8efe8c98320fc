"""Module parallelization of veScale: tensor, sequence and expert parallelism for any module, its code untouched."""

from . import plans
from ._experts import (
    AllToAll,
    ExpertAllocator,
    Experts,
    LoadBalancingAllocator,
    StaticAllocator,
    TokenDispatcher,
    rebalance_experts,
    restore_experts,
)
from ._plan.attributes import Divided
from ._plan.describe import TensorLayout, describe
from ._plan.placements import Repeat
from ._report.report import BoundaryTraffic, Collective, Report, report
from .control import no_sync, set_mode
from .errors import ImplicitRedistributionError, NotLocalFriendlyError, PlanError
from .parallelize import parallelize_module

__all__ = [
    "AllToAll",
    "BoundaryTraffic",
    "Collective",
    "Divided",
    "ExpertAllocator",
    "Experts",
    "ImplicitRedistributionError",
    "LoadBalancingAllocator",
    "NotLocalFriendlyError",
    "PlanError",
    "Repeat",
    "Report",
    "StaticAllocator",
    "TensorLayout",
    "TokenDispatcher",
    "describe",
    "no_sync",
    "parallelize_module",
    "plans",
    "rebalance_experts",
    "report",
    "restore_experts",
    "set_mode",
]
