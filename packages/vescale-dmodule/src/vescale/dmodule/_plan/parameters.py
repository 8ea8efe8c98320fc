"""Parameters and buffers become DTensors in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale.dtensor import distribute_tensor, is_deferred, materialize

from .. import _torch
from ..errors import PlanError

__all__ = ["check_ties", "distribute"]

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

    A deferred module is materialized shard by shard. A real one is sharded from the copy on coordinate 0 of each axis,
    so ranks cannot start from different values. Names, ties, ``requires_grad``, dtypes, gradient hooks and Python
    attributes of parameters are kept.
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
        if shard.requires_grad:
            _torch.share_hooks(tensor, shard)
    return shard
