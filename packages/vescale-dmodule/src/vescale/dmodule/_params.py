"""Parameters and buffers become DTensors in place; gradients come back in the placements of their parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from vescale.dtensor import is_deferred, materialize

from .errors import PlanError

__all__ = ["check_ties", "distribute", "install_gradient_sync"]

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
    axis, so that ranks cannot start from different values. Names, ties, ``requires_grad`` and dtypes stay.
    """
    if is_deferred(module):
        materialize(module, mesh, lambda name, _tensor: placements.get(name))
        return
    made: dict[int, Tensor] = {}

    def convert(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            shard = distribute_tensor(tensor.detach(), mesh, placements[name])
            if isinstance(tensor, nn.Parameter):
                shard = nn.Parameter(shard, requires_grad=tensor.requires_grad)
            made[id(tensor)] = shard
        return made[id(tensor)]

    _replace(module, placements, convert)


def _replace(module: nn.Module, placements: Placements, convert: Callable[[str, Tensor], Tensor]) -> None:
    for owner, part in module.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                name = f"{owner}.{key}" if owner else key
                if tensor is not None and name in placements and not isinstance(tensor, DTensor):
                    table[key] = convert(name, tensor)


def install_gradient_sync(module: nn.Module) -> None:
    """Bring the gradient of every DTensor parameter to the parameter's placements before it is accumulated.

    A replicated parameter that met sharded activations (a norm weight under sequence parallelism) has a partial gradient
    on each rank. Reducing it in a hook of the parameter, before ``.grad`` sees it, keeps gradient accumulation exact.
    """
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            placements = tuple(parameter.placements)
            parameter.register_hook(lambda grad, placements=placements: _synced(grad, placements))


def _synced(grad: Tensor, placements: tuple[Placement, ...]) -> Tensor | None:
    if not isinstance(grad, DTensor) or tuple(grad.placements) == placements:
        return None
    return grad.redistribute(placements=placements)
