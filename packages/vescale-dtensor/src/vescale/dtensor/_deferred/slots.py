"""Find and replace the tensors of a module: all code that touches `nn.Module`.

One tensor object may be in several **slots**: a tied parameter, or a list of weights in addition to the registered
ones. `collect` groups slots by object, so that each object is replaced once by one new object.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from .._layout.shards import check
from .._torch.recording import has_hooks, plain_attributes, set_buffer, set_parameter, tensor_slots
from .tensor import DeferredTensor

__all__ = ["Placements", "Target", "check_replaceable", "collect", "replace", "resolve"]

Placements = Callable[[str, Tensor], Sequence[Placement] | None] | Mapping[str, Sequence[Placement] | None]


@dataclass
class Target:
    """One tensor object and the slots that hold it.

    Attributes:
        tensor: the object.
        names: FQNs of the slots, parameters and buffers first.
        slots: `(module, kind, name)`; kind is "parameter", "buffer" or "attribute".
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    slots: list[tuple[nn.Module, str, str]] = field(default_factory=list)

    @property
    def is_registered(self) -> bool:
        """Whether the tensor is a parameter or buffer, and not only an attribute."""
        return any(kind != "attribute" for _, kind, _ in self.slots)


def collect(module: nn.Module) -> list[Target]:
    """Return the tensors of a module: its parameters and buffers, and deferred tensors in plain attributes."""
    targets: dict[int, Target] = {}

    def add(tensor: Tensor, owner: nn.Module, prefix: str, kind: str, name: str) -> None:
        target = targets.setdefault(id(tensor), Target(tensor))
        target.names.append(f"{prefix}.{name}" if prefix else name)
        target.slots.append((owner, kind, name))

    modules = list(module.named_modules())
    for prefix, owner in modules:
        for kind, name, tensor in tensor_slots(owner):
            add(tensor, owner, prefix, kind, name)
    for prefix, owner in modules:
        for name, attribute in plain_attributes(owner).items():
            for tensor in _deferred_in(attribute):
                add(tensor, owner, prefix, "attribute", name)
    return list(targets.values())


def _deferred_in(attribute: object) -> Iterator[DeferredTensor]:
    if isinstance(attribute, DeferredTensor):
        yield attribute
    elif type(attribute) in (list, tuple):
        for item in attribute:
            yield from _deferred_in(item)
    elif type(attribute) is dict:
        for item in attribute.values():
            yield from _deferred_in(item)


def replace(target: Target, new: Tensor) -> None:
    """Put `new` into all slots of a target, with the Python attributes of the old tensor."""
    vars(new).update(
        {name: value for name, value in vars(target.tensor).items() if name not in ("deferred", "_is_param")}
    )
    for owner, kind, name in target.slots:
        if kind == "parameter":
            set_parameter(owner, name, new)
        elif kind == "buffer":
            set_buffer(owner, name, new)
        else:
            vars(owner)[name] = _replaced(vars(owner)[name], target.tensor, new)


def _replaced(attribute: object, old: Tensor, new: Tensor) -> object:
    """Return an attribute with `new` in place of `old`; lists and dictionaries are changed in place."""
    if attribute is old:
        return new
    if type(attribute) is tuple:
        return tuple(_replaced(item, old, new) for item in attribute)
    if type(attribute) is list:
        attribute[:] = [_replaced(item, old, new) for item in attribute]
    elif type(attribute) is dict:
        attribute.update({key: _replaced(item, old, new) for key, item in attribute.items()})
    return attribute


def check_replaceable(target: Target) -> None:
    """Refuse a tensor with state that a replacement would silently lose.

    Raises:
        NotImplementedError: the tensor has an autograd history.
        ValueError: gradient hooks are registered on it.
    """
    tensor, name = target.tensor, target.names[0]
    if tensor.requires_grad and not tensor.is_leaf:
        raise NotImplementedError(
            f"'{name}' was computed from parameters with gradient while the module was constructed; materialize cannot "
            "rebuild its autograd history. Compute it in forward, or under torch.no_grad()"
        )
    if has_hooks(tensor):
        raise ValueError(f"'{name}' has gradient hooks, which materialize would lose; register them after materialize")


# ------------------------------------------------------------------------------------------------- placements


def resolve(
    targets: Iterable[Target], placements: Placements | None, mesh: DeviceMesh | None, module: nn.Module
) -> list:
    """Return for each target its placements over `mesh`, or None for a plain full tensor.

    Raises:
        ValueError: placements without a mesh, a key that names nothing, tied tensors with different placements, or
            placements that do not fit the mesh or the tensor.
        NotImplementedError: a placement is Partial, so that no rank holds elements of the tensor.
    """
    targets = list(targets)
    if placements is None:
        return [None] * len(targets)
    if mesh is None:
        raise ValueError(
            "materialize got placements but no mesh: expected a mesh, got None; pass the DeviceMesh that they refer to"
        )
    if isinstance(placements, Mapping):
        _check_keys(placements, targets, module)
    return [_resolve_one(target, placements, mesh) if target.is_registered else None for target in targets]


def _check_keys(placements: Mapping, targets: Iterable[Target], module: nn.Module) -> None:
    known = [name for target in targets for name in target.names]
    absent = {
        f"{prefix}.{name}".strip(".")
        for prefix, owner in module.named_modules()
        for name in getattr(owner, "absent_fqns", ())
    }
    for key in placements.keys() - known - absent:
        nearest = difflib.get_close_matches(key, known, n=3, cutoff=0.0)
        raise ValueError(
            f"materialize: expected names of the module's tensors in placements, got {key!r}, which names no parameter "
            f"or buffer; nearest names: {nearest}"
        )


def _resolve_one(target: Target, placements: Placements, mesh: DeviceMesh) -> tuple[Placement, ...] | None:
    chosen: dict[tuple[Placement, ...], str] = {}
    for name, (_, kind, _) in zip(target.names, target.slots, strict=True):
        if kind == "attribute":
            continue
        found = placements.get(name) if isinstance(placements, Mapping) else placements(name, target.tensor)
        if found is not None:
            chosen.setdefault(_checked(name, target.tensor, found, mesh), name)
    if len(chosen) > 1:
        wanted = ", ".join(f"'{name}': {list(found)}" for found, name in chosen.items())
        raise ValueError(f"tied tensors must have the same placements, got {wanted}; give all of them one")
    return next(iter(chosen), None)


def _checked(name: str, tensor: Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[Placement, ...]:
    axes = mesh.mesh_dim_names or mesh.ndim
    if not isinstance(placements, Sequence) or not all(isinstance(p, Placement) for p in placements):
        raise ValueError(
            f"'{name}': expected a sequence of placements, one for each mesh axis {axes}, got {placements!r}"
        )
    if len(placements) != mesh.ndim:
        raise ValueError(f"'{name}': expected one placement for each mesh axis {axes}, got {list(placements)}")
    normal = tuple(_checked_one(name, tensor, placement) for placement in placements)
    try:
        check(tuple(tensor.shape), tuple(mesh.shape), normal)
    except ValueError as error:
        raise ValueError(f"'{name}': {error}") from error
    return normal


def _checked_one(name: str, tensor: Tensor, placement: Placement) -> Placement:
    if placement.is_partial():
        raise NotImplementedError(
            f"'{name}': materialize supports placements that give each rank elements of the tensor, got {placement}; "
            "materialize to one of these, then redistribute"
        )
    if type(placement) is not Shard:
        return placement
    if not -tensor.dim() <= placement.dim < tensor.dim():
        raise ValueError(f"'{name}': {placement} does not fit a tensor of shape {tuple(tensor.shape)}")
    return Shard(placement.dim % tensor.dim())
