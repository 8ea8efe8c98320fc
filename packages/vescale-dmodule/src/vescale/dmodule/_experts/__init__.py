"""Expert parallelism: which rank holds which experts, how tokens reach them, and how experts move.

::

    plan        the plan entry, checked                   axes        what each mesh axis does in a call
    region      one call of an experts module             local       the local tensors that the module sees
    dispatch    tokens to experts and back                operators   differentiable operators on rows and ranks
    lists       experts that a model calls one by one
    allocate    which rank holds which expert             migrate     experts and their optimizer state move

``plan``, ``axes`` and ``allocate`` are pure functions over integers. ``region`` and ``lists`` install the hooks.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .allocate import Allocation, ExpertAllocator, LoadBalancingAllocator, StaticAllocator
from .dispatch import AllToAll, Exchange, TokenDispatcher
from .lists import install_list, listed_gradients
from .migrate import rebalance_experts, restore_experts
from .plan import ExpertLayout, Experts, plan_experts
from .region import ExpertRegion, experts_region, install_region

__all__ = [
    "AllToAll",
    "Allocation",
    "Exchange",
    "ExpertAllocator",
    "ExpertLayout",
    "ExpertRegion",
    "Experts",
    "LoadBalancingAllocator",
    "StaticAllocator",
    "TokenDispatcher",
    "experts_region",
    "install_experts",
    "listed_gradients",
    "plan_experts",
    "rebalance_experts",
    "restore_experts",
]


def install_experts(module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh) -> ExpertRegion | None:
    """Run ``module``, whose parameters are DTensors in ``layout.parameters``, on this rank's experts.

    Args:
        module: experts.
        layout: the result of :func:`plan_experts`.
        mesh: the mesh of the plan.

    Returns:
        The region, also found by :func:`experts_region`; None for experts that the model calls one by one.
    """
    if layout.kind == "list":
        install_list(module, layout, mesh)
        return None
    return install_region(module, layout, mesh)
