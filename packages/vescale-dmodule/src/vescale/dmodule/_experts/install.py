"""Attach the experts' region to a module."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .allocate import initial_allocation
from .lists import install_list
from .plan import ExpertLayout
from .region import REGION, ExpertRegion, allocation_of

__all__ = ["install_experts"]


def install_experts(module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh) -> ExpertRegion | None:
    """Run ``module``, whose parameters are DTensors in ``layout.parameters``, on this rank's experts.

    Args:
        module: experts.
        layout: what :func:`plan_experts` says of them.
        mesh: the mesh of the plan.

    Returns:
        The region, also found by :func:`experts_region`; None for experts that the model calls one by one.
    """
    if layout.kind == "list":
        install_list(module, layout, mesh)
        return None
    region = ExpertRegion(layout, mesh, inspect.signature(module.forward))
    vars(module)[REGION] = region
    if layout.kind == "modules":
        for name, expert in module.named_children():
            expert.register_forward_pre_hook(_Noted(region, name))
    module.register_forward_pre_hook(region.enter, with_kwargs=True)
    module.register_forward_hook(region.leave, always_call=True)
    module.register_state_dict_pre_hook(_refuse_moved)
    module.register_load_state_dict_pre_hook(_refuse_moved)
    return region


@dataclass(frozen=True)
class _Noted:
    """Forward pre-hook of an expert that is a submodule."""

    region: ExpertRegion
    name: str

    def __call__(self, _expert: nn.Module, _args: tuple) -> None:
        self.region.note_call(self.name)


def _refuse_moved(module: nn.Module, *_: object) -> None:
    """Refuse to read or write the parameters by expert while experts are not in order.

    Raises:
        RuntimeError: with the way out.
    """
    layout = vars(module)[REGION].layout
    if allocation_of(module, layout) != initial_allocation(layout.num_experts):
        raise RuntimeError(
            f"the experts of this {type(module).__name__} were moved by rebalance_experts, so its tensors are not in "
            "the order of one device; call restore_experts(model, optimizer) before state_dict() and load_state_dict()"
        )
