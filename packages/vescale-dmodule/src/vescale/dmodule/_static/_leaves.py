"""Local parameters: what a module computes with while it runs on plain tensors.

Every DTensor parameter has a twin, a plain leaf tensor over the same storage: what the optimizer writes into the one is
seen in the other. While the module's forward runs, the twins stand in the modules' tables; before and after, and for
everybody who asks from outside, the DTensors do. Backward accumulates into the twins, and a hook of each hands the
gradient on (see ``_deliveries``)::

    twin.grad (plain)   ->   parameter.grad (DTensor in the parameter's placements)
                        ->   the buckets of ``GradientSync``, where it is a partial sum

A parameter whose DTensor carries hooks of somebody else (data parallelism that reduces gradients as they come) gets its
gradient through autograd instead, so that those hooks run as they always do; that costs a few more microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import add, getitem, is_, setitem

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from .. import _torch
from .._boundary import as_dtensor

__all__ = ["LocalParameters", "Twin"]


@dataclass(eq=False)
class Twin:
    """A parameter or buffer and the local tensor that stands in for it.

    Attributes:
        name: fully qualified name, the first of a tied parameter.
        whole: the DTensor.
        local: the plain tensor that modules see; a leaf.
        gradient: layout of the local gradient; None until a rehearsal has found it.
        trained: whether the parameter takes a gradient.
        address: of the DTensor's local storage.
        hooks: the tables of gradient hooks of the DTensor; None for a buffer.
        num_hooks: entries in them when all of them were our own.
        handle: of the hook that takes the local gradients.
    """

    name: str
    whole: DTensor
    local: Tensor
    gradient: tuple[Placement, ...] | None = None
    address: int = 0
    hooks: tuple[dict, dict] | None = None
    num_hooks: int = 0
    trained: bool = False
    handle: RemovableHandle | None = None

    def expect(self, gradient: tuple[Placement, ...] | None, hook: Callable[[Tensor], None]) -> None:
        """Tell the twin in what layout its gradients come, and what takes them: a hook that clears ``local.grad``."""
        self.gradient = gradient
        if self.trained:
            if self.handle is not None:
                self.handle.remove()
            self.handle = self.local.register_post_accumulate_grad_hook(hook)


class LocalParameters:
    """The twins of the parameters and of the sharded buffers of a module.

    Args:
        modules: names and modules that will run on local tensors; twins are made for the tensors that they hold
            themselves.
        is_hooked: tells whether a DTensor parameter has hooks that must see its gradient.
        silent_axes: gives, by module and key, the axes along which only the first rank adds a tensor, see
            :func:`silenced`.

    Attributes:
        twins: all of them.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        is_hooked: Callable[[DTensor], bool],
        silent_axes: Callable[[nn.Module, str], tuple[int, ...]],
    ):
        self.is_hooked = is_hooked
        self.twins: list[Twin] = []
        self._places: list[tuple[dict, str, DTensor, Tensor, Twin]] = []
        by_id: dict[tuple, Twin] = {}
        for owner, module in modules:
            for table in _torch.tensor_tables(module):
                for key, tensor in table.items():
                    if not isinstance(tensor, DTensor):
                        continue
                    silent = silent_axes(module, key)
                    if (id(tensor), silent) not in by_id:
                        by_id[id(tensor), silent] = self._add(f"{owner}.{key}" if owner else key, tensor, silent)
                    twin = by_id[id(tensor), silent]
                    self._places.append((table, key, tensor, twin.local, twin))
        # columns of what is looked at in every call
        places = [place for place in self._places if place[-1].hooks is not None]
        self._tables, self._keys, self._wholes, self._locals, _ = (
            ([*column] for column in zip(*places, strict=True)) if places else ([],) * 5
        )
        parameters = [twin for twin in self.twins if twin.hooks is not None]
        self._parameters = [twin.whole for twin in parameters]
        self._state = [twin.trained for twin in parameters], [twin.address for twin in parameters]
        self._hooks_before, self._hooks_after = ([twin.hooks[i] for twin in parameters] for i in (0, 1))
        self._num_hooks = [twin.num_hooks for twin in parameters]
        self._buffers = [(table, key, twin) for table, key, _, _, twin in self._places if twin.hooks is None]

    def _add(self, name: str, whole: DTensor, silent: tuple[int, ...]) -> Twin:
        local = silenced(whole, silent)
        twin = Twin(name, whole, local, address=_torch.local_of(whole).data_ptr())
        if isinstance(whole, nn.Parameter):
            twin.local = nn.Parameter(local, requires_grad=whole.requires_grad)
            vars(twin.local).update(vars(whole))
            twin.trained = whole.requires_grad
            twin.hooks = _torch.hook_tables(whole)
            twin.num_hooks = -1 if self.is_hooked(whole) else sum(map(len, twin.hooks))
        self.twins.append(twin)
        return twin

    def stale(self) -> bool:
        """Tell whether a tensor has been replaced, moved, frozen or thawed since the twins were made."""
        if not all(map(is_, map(getitem, self._tables, self._keys), self._wholes)):
            return True
        for table, key, twin in self._buffers:
            if table[key] is not twin.whole or _torch.local_of(twin.whole).data_ptr() != twin.address:
                return True
        return _torch.leaf_states(self._parameters) != self._state

    def put(self) -> None:
        """Show the modules the local tensors."""
        _torch.for_each(setitem, self._tables, self._keys, self._locals)
        for table, key, twin in self._buffers:
            table[key] = twin.local
        if list(map(add, map(len, self._hooks_before), map(len, self._hooks_after))) != self._num_hooks:
            for table, key, whole, _, twin in self._places:
                if twin.hooks is not None and sum(map(len, twin.hooks)) != twin.num_hooks and self.is_hooked(whole):
                    table[key] = _ThroughAutograd.apply(whole, twin)

    def take_back(self) -> None:
        """Show the modules their DTensors again."""
        _torch.for_each(setitem, self._tables, self._keys, self._wholes)
        for table, key, twin in self._buffers:
            if (new := table[key]) is not twin.local:
                twin.whole = _in_layout(new, twin.whole)  # the forward has replaced it
            table[key] = twin.whole

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that take gradients."""
        return frozenset(twin.name for twin in self.twins if twin.trained)

    def __iter__(self) -> Iterator[Twin]:
        return iter(self.twins)


def _in_layout(new: object, whole: DTensor) -> object:
    """Return what a forward has put in place of a buffer, in the buffer's layout."""
    if not isinstance(new, Tensor) or isinstance(new, DTensor):
        return new
    local = _torch.local_of(whole)
    if new.shape == local.shape:
        return DTensor.from_local(
            new, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return as_dtensor(new, whole.device_mesh)


def silenced(whole: DTensor, axes: tuple[int, ...]) -> Tensor:
    """Return what this rank adds of a tensor that is added to values which are partial sums over ``axes``.

    The sum of the ranks must hold it once, so the rank at coordinate 0 of those axes adds it. On the others a tensor of
    negative zeros stands in (``x + -0.0`` is ``x`` for every ``x``); its gradient is that of the tensor itself.
    """
    local = _torch.local_of(whole)
    if all(whole.device_mesh.get_local_rank(axis) == 0 for axis in axes):
        return local
    return torch.full_like(local, -0.0)


class _ThroughAutograd(torch.autograd.Function):
    """The local tensor of a DTensor parameter; the gradient goes back as a DTensor in the parameter's placements."""

    @staticmethod
    def forward(ctx, _whole: DTensor, twin: Twin) -> Tensor:
        ctx.twin = twin
        return twin.local.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        whole, gradient = ctx.twin.whole, ctx.twin.gradient
        if gradient is None or gradient == tuple(whole.placements):
            return _torch.wrap_like(grad, whole), None
        shape = whole.shape
        partial = DTensor.from_local(
            grad, whole.device_mesh, gradient, run_check=False, shape=shape, stride=whole.stride()
        )
        return partial.redistribute(placements=whole.placements), None
