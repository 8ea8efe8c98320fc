"""Experts spread over ranks: what a plan says of them, how they run, and how they move.

::

    _entry      what the plan says, checked          _axes      what each mesh axis does
    _region     one call of the module               _exchange  tokens to experts and back, planned and sent
    _lists      experts called one by one            _state     what the module sees meanwhile
    _allocate   which rank holds which expert        _migrate   experts and their optimizer state change place
"""

from .allocate import Allocation, ExpertAllocator, LoadBalancingAllocator, StaticAllocator
from .collectives import join
from .dispatch import AllToAll, Exchange, TokenDispatcher
from .install import install_experts
from .lists import listed_gradients
from .migrate import rebalance_experts, restore_experts
from .plan import ExpertLayout, Experts, plan_experts
from .region import ExpertRegion, experts_region
from .state import local_shards

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
    "join",
    "listed_gradients",
    "local_shards",
    "plan_experts",
    "rebalance_experts",
    "restore_experts",
]
