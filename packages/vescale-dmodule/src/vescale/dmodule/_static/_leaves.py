"""Local parameters: what a module computes with while it runs on plain tensors.

Every DTensor parameter has a twin, a plain leaf tensor over the same storage: what the optimizer writes into the one is
seen in the other. While the module's forward runs, the twins stand in the modules' tables; before and after, and for
everybody who asks from outside, the DTensors do. Backward accumulates into the twins, and a hook of each hands the
gradient on::

    twin.grad (plain)   ->   parameter.grad (DTensor in the parameter's placements)
                        ->   the buckets of ``GradientSync``, where it is a partial sum

A parameter whose DTensor carries hooks of somebody else (data parallelism that reduces gradients as they come) gets its
gradient through autograd instead, so that those hooks run as they always do; that costs a few more microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from .._boundary import as_dtensor

__all__ = ["LocalParameters", "Twin"]

Arrived = Callable[["Twin", Tensor], None]


@dataclass(eq=False)
class Twin:
    """A parameter or buffer and the local tensor that stands in for it.

    Attributes:
        name: fully qualified name, the first of a tied parameter.
        whole: the DTensor.
        local: the plain tensor that modules see; a leaf.
        gradient: layout of the local gradient; None until a rehearsal has found it.
        trained: whether the parameter takes a gradient.
        collect: what takes local gradients; None leaves them to ``LocalParameters.arrived``.
        fits: whether the local gradient is the whole gradient's shard, in the parameter's own layout.
        address: of the DTensor's local storage.
        hooks: the tables of gradient hooks of the DTensor.
        num_hooks: entries in them when all of them were our own.
    """

    name: str
    whole: DTensor
    local: Tensor
    gradient: tuple[Placement, ...] | None = None
    address: int = 0
    hooks: tuple[dict, dict] = ({}, {})
    num_hooks: int = 0
    fits: bool = False
    trained: bool = False

    collect: Callable[[Tensor], None] | None = None

    def expect(self, gradient: tuple[Placement, ...] | None, collect: Callable[[Tensor], None] | None) -> None:
        """Tell the twin in what layout its gradients come, and what takes them; None leaves them to ``arrived``."""
        self.gradient, self.collect = gradient, collect
        self.fits = collect is not None and gradient == tuple(self.whole.placements)


@dataclass
class LocalParameters:
    """The twins of the parameters and of the sharded buffers of a module.

    Attributes:
        arrived: called in backward with a twin and its new local gradient.
        is_hooked: whether a DTensor parameter has hooks that must see its gradient.
        places: table, key and twin of every place where a twin stands in.
        buffers: those of them that hold buffers.
    """

    arrived: Arrived
    is_hooked: Callable[[DTensor], bool]
    places: list[tuple[dict, str, Twin]] = field(default_factory=list)
    buffers: list[tuple[dict, str, Twin]] = field(default_factory=list)
    twins: list[Twin] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        modules: Iterable[tuple[str, nn.Module]],
        arrived: Arrived,
        is_hooked: Callable[[DTensor], bool],
        silent_axes: Callable[[nn.Module, str], tuple[int, ...]],
    ) -> LocalParameters:
        """Make twins for the tensors that ``modules`` hold themselves.

        Args:
            modules: names and modules that will run on local tensors.
            arrived, is_hooked: see the class.
            silent_axes: gives, by module and key, the axes along which only the first rank adds a tensor, see
                :func:`silenced`.
        """
        self, by_id = cls(arrived, is_hooked), {}
        for owner, module in modules:
            for table in _torch.tensor_tables(module):
                for key, tensor in table.items():
                    if not isinstance(tensor, DTensor):
                        continue
                    silent = silent_axes(module, key)
                    if (id(tensor), silent) not in by_id:
                        name = f"{owner}.{key}" if owner else key
                        by_id[id(tensor), silent] = self._add(name, tensor, silent)
                    self.places.append((table, key, by_id[id(tensor), silent]))
        self.buffers = [place for place in self.places if not isinstance(place[2].whole, nn.Parameter)]
        return self

    def _add(self, name: str, whole: DTensor, silent: tuple[int, ...]) -> Twin:
        local = silenced(whole, silent)
        twin = Twin(name, whole, local, address=_torch.local_of(whole).data_ptr())
        if isinstance(whole, nn.Parameter):
            twin.local = nn.Parameter(local, requires_grad=whole.requires_grad)
            vars(twin.local).update(vars(whole))
            twin.trained = whole.requires_grad
            twin.hooks = _torch.hook_tables(whole)
            twin.num_hooks = -1 if self.is_hooked(whole) else sum(map(len, twin.hooks))
            if twin.trained:
                self._watch(twin)
        self.twins.append(twin)
        return twin

    def _watch(self, twin: Twin) -> None:
        whole, wrap = twin.whole, _torch.wrapper_like(twin.whole)

        def hand_on(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            if twin.fits and whole.grad is None and not grad.requires_grad:  # what nearly always is
                whole.grad = wrap(grad)
            elif twin.collect is not None:
                twin.collect(grad)
            else:
                self.arrived(twin, grad)

        twin.local.register_post_accumulate_grad_hook(hand_on)

    def stale(self) -> bool:
        """Tell whether a parameter has been replaced, moved, frozen or thawed since the twins were made."""
        for table, key, twin in self.places:
            if table[key] is not twin.whole:
                return True
        local_of = _torch.local_of
        for twin in self.twins:
            whole = twin.whole
            if whole.requires_grad is not twin.trained or local_of(whole).data_ptr() != twin.address:
                return True
        return False

    def put(self) -> None:
        """Show the modules the local tensors."""
        hooked = [twin for twin in self.twins if len(twin.hooks[0]) + len(twin.hooks[1]) != twin.num_hooks]
        hooked = [twin for twin in hooked if self.is_hooked(twin.whole)]
        for table, key, twin in self.places:
            table[key] = twin.local
        for table, key, twin in self.places if hooked else ():
            if twin in hooked:
                table[key] = _ThroughAutograd.apply(twin.whole, twin)

    def take_back(self) -> None:
        """Show the modules their DTensors again."""
        for table, key, twin in self.buffers:
            if (new := table[key]) is not twin.local:
                twin.whole = _in_layout(new, twin.whole)  # the forward has replaced it
        for table, key, twin in self.places:
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
