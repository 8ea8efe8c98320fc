"""Parameters and buffers become DTensors in place; gradients come back in the placements of their parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from vescale.dtensor import is_deferred, materialize

from . import _torch
from .errors import PlanError

__all__ = ["check_ties", "distribute", "sync_gradients"]

Placements = Mapping[str, tuple[Placement, ...]]


def check_ties(module: nn.Module, placements: Placements) -> None:
    """Refuse a plan that places one tied parameter in two ways.

    Raises:
        PlanError: naming both names and placements.
    """
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if placements[first] != placements[name]:
            raise PlanError(
                f"{first!r} and {name!r} are one tied parameter, but the plan places it as {placements[first]} and as "
                f"{placements[name]}; give both names the same placements"
            )


def distribute(module: nn.Module, mesh: DeviceMesh, placements: Placements) -> None:
    """Replace every parameter, and every buffer named in ``placements``, by its DTensor.

    A deferred module draws its own values shard by shard. A real one is sharded from the copy on coordinate 0 of each
    axis, so that ranks cannot start from different values. Names, ties, ``requires_grad``, dtypes and the Python
    attributes of parameters stay.
    """
    if is_deferred(module):
        materialize(module, mesh, lambda name, _tensor: placements.get(name))
        return
    # By identity: every tensor of the module exists before the first is replaced, so no id is used twice.
    made: dict[int, Tensor] = {}
    for owner, part in module.named_modules(remove_duplicate=False):
        for table in _torch.tensor_tables(part):
            for key, tensor in table.items():
                name = f"{owner}.{key}" if owner else key
                if tensor is None or isinstance(tensor, DTensor) or name not in placements:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _shard(tensor, mesh, placements[name])
                table[key] = made[id(tensor)]


def _shard(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    shard = distribute_tensor(tensor.detach(), mesh, placements)
    if isinstance(tensor, nn.Parameter):
        shard = nn.Parameter(shard, requires_grad=tensor.requires_grad)
        vars(shard).update({name: value for name, value in vars(tensor).items() if name not in vars(shard)})
    return shard


@dataclass(frozen=True)
class _Synced:
    """Gradient hook that brings a gradient to the placements of its parameter."""

    placements: tuple[Placement, ...]

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not isinstance(grad, DTensor) or tuple(grad.placements) == self.placements:
            return None
        return grad.redistribute(placements=self.placements)


def sync_gradients(module: nn.Module) -> None:
    """Make the gradient of every DTensor parameter come in the parameter's placements, before it is accumulated.

    A replicated parameter that met sharded activations (a norm weight under sequence parallelism) has a partial
    gradient on each rank. Reducing it in a hook of the parameter, before ``.grad`` sees it, keeps accumulation exact.

    Called before every forward, because hooks are lost or missing in copies of a module and in parameters that were
    frozen when it was parallelised.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) or not parameter.requires_grad:
            continue
        if not any(isinstance(hook, _Synced) for hook in _torch.tensor_hooks(parameter)):
            parameter.register_hook(_Synced(tuple(parameter.placements)))
