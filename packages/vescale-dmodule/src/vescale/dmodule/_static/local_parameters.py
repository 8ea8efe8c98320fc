"""Local parameters: what a module computes with while it runs on plain tensors.

Every DTensor parameter has a twin, a plain leaf tensor over the same storage: what the optimizer writes into the one is
seen in the other. While the module's forward runs, the twins stand in the modules' tables; before and after, and for
everybody who asks from outside, the DTensors do. Backward accumulates into the twins, and a hook of each hands the
gradient on (see ``_deliveries``)::

    twin.grad (plain)   ->   parameter.grad (DTensor in the parameter's placements)
                        ->   the buckets of ``GradientSync``, where it is a partial sum

Data parallelism may take local gradients as soon as a twin has them, see ``_handover``. Where the DTensor carries other
hooks of somebody else, or where something else of the model uses the parameter, too (a tied parameter, of which another
part runs on DTensors), autograd must add up what comes before a hook sees the sum: then an autograd function over the
DTensor stands in the table instead of the leaf.

Note: values that come and go
    Data parallelism may take the values of a parameter away for a while. Such a parameter has an attribute
    ``_vescale_memory``, see :class:`Memory`. That object hears of the twin, and guards it as it guards the parameter:
    with ZeRO 1 and 2 of ``vescale.optim`` it waits for values that are on their way. ZeRO 3 frees the memory and makes
    it anew, in the same storage object, so that its address says nothing. There the twin is moved along where the
    storage object changes, and no address is compared from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, getitem, is_
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from .. import _torch
from .._boundary.convert import as_dtensor
from .._gradients.handover import Handover, reduced
from .._gradients.takers import taker_of
from .patch import Row

__all__ = ["LocalParameters", "Memory", "Twin", "held_by"]

MEMORY = "_vescale_memory"


class Memory(Protocol):
    """What takes the values of a parameter away and brings others: its attribute ``_vescale_memory``, None in copies.

    Attributes:
        frees: whether the memory is freed and refilled. Then the values are there when a module needs them, not before,
            and the address says nothing. Otherwise whoever reads waits.
    """

    frees: bool

    def share(self, parameter: Tensor, tensor: Tensor, *, is_view: bool) -> None:
        """Take ``tensor`` for another face of ``parameter`` as long as somebody holds it.

        While there are no values nobody may read it. If it ``is_view`` of the local memory of the parameter, it
        must follow it to other memory.
        """


Hook = Callable[[Tensor], None]


@dataclass(eq=False)
class Twin:
    """A parameter or buffer and the local tensor that stands in for it.

    Attributes:
        name: fully qualified name, the first of a tied parameter.
        whole: the DTensor.
        local: the plain tensor that modules see; a leaf.
        gradient: layout of the local gradient; None until a rehearsal has found it.
        trained: whether the parameter takes a gradient.
        hooks: the tables of gradient hooks of the DTensor; None for a buffer.
        is_hooked: whether some of them are not our own.
        is_alone: whether nothing else of the model gives the DTensor gradients.
        handle: of the hook that takes the local gradients.
    """

    name: str
    whole: DTensor
    local: Tensor
    gradient: tuple[Placement, ...] | None = None
    hooks: tuple[dict, dict] | None = None
    is_hooked: bool = False
    is_alone: bool = True
    trained: bool = False
    handle: RemovableHandle | None = None
    takers: tuple[Hook | None, Hook] | None = None

    def expect(self, gradient: tuple[Placement, ...] | None, deliver: Hook | None, otherwise: Hook) -> None:
        """Tell the twin in what layout its gradients come, and what takes them.

        Args:
            gradient: the layout.
            deliver: a hook that hands gradients to a DTensor that has no hooks but ours, and clears ``local.grad``.
            otherwise: the same for gradients of which no layout is known.
        """
        self.gradient, self.takers = gradient, (deliver, otherwise)
        self.look_at_hooks(self.is_hooked)

    def look_at_hooks(self, is_hooked: bool) -> None:
        """Install the hook of the leaf, for a DTensor with or without hooks of somebody else."""
        self.is_hooked = is_hooked
        if self.trained and self.takers is not None:
            deliver, otherwise = self.takers
            if self.handle is not None:
                self.handle.remove()
            if deliver is None:
                hook = otherwise
            elif is_hooked:
                hook = Handover(self.local, self.whole, self.gradient or tuple(self.whole.placements))
            else:
                hook = deliver
            self.handle = self.local.register_post_accumulate_grad_hook(hook)

    def whole_gradient(self, local: Tensor) -> DTensor:
        """Return a local gradient as one in the placements of the parameter."""
        return reduced(self.whole, local, self.gradient or tuple(self.whole.placements))


class LocalParameters:
    """The twins of the parameters and of the sharded buffers of a module.

    Args:
        modules: names and modules that will run on local tensors; twins are made for the tensors that they hold
            themselves.
        is_hooked: tells whether a DTensor parameter has hooks that must see its gradient.
        silent_axes: gives, by module and key, the axes along which only the first rank adds a tensor, see
            :func:`silenced`.
        elsewhere: ids of the parameters that other modules hold, too.

    Attributes:
        twins: all of them.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        is_hooked: Callable[[DTensor], bool],
        silent_axes: Callable[[nn.Module, str], tuple[int, ...]],
        elsewhere: Container[int] = (),
    ):
        self.is_hooked = is_hooked
        self.twins: list[Twin] = []
        self._places: list[tuple[dict, str, DTensor, Tensor, Twin]] = []
        by_id: dict[int, dict[tuple, Twin]] = {}
        for owner, module in modules:
            for table in _torch.tensor_tables(module):
                for key, tensor in table.items():
                    if not isinstance(tensor, DTensor):
                        continue
                    silent = silent_axes(module, key)
                    found = by_id.setdefault(id(tensor), {})
                    if silent not in found:
                        found[silent] = self._add(f"{owner}.{key}" if owner else key, tensor, silent)
                    self._places.append((table, key, tensor, found[silent].local, found[silent]))
        for number, found in by_id.items():
            for twin in found.values():
                twin.is_alone = len(found) == 1 and number not in elsewhere
        # columns of what is looked at in every call
        self._tables, self._keys, self._wholes, *_ = _columns(self._places)
        self._buffers = [place for place in self._places if place[-1].hooks is None]
        self._buffer_tables, self._buffer_keys, _, self._buffer_locals, _ = _columns(self._buffers)
        self._parameters = [twin for twin in self.twins if twin.hooks is not None]
        self._fixed = [twin.whole for twin in self.twins if not _is_freed(twin.whole)]
        self._refilled = [twin.whole for twin in self.twins if _is_freed(twin.whole)]
        self._state, self._refilled_state = _torch.leaf_states(self._fixed), _torch.train_flags(self._refilled)
        self._hooks_before, self._hooks_after = ([twin.hooks[i] for twin in self._parameters] for i in (0, 1))
        self._num_hooks = self._count_hooks()
        self._through = self._find_through()

    def _add(self, name: str, whole: DTensor, silent: tuple[int, ...]) -> Twin:
        local = silenced(whole, silent)
        twin = Twin(name, whole, local)
        if isinstance(whole, nn.Parameter):
            twin.local = _torch.leaf_over(local, requires_grad=whole.requires_grad)
            vars(twin.local).update(vars(whole))
            twin.trained = whole.requires_grad
            twin.hooks = _torch.hook_tables(whole)
            twin.is_hooked = self.is_hooked(whole)
            if (memory := _memory_of(whole)) is not None:
                memory.share(whole, twin.local, is_view=local is _torch.local_of(whole))
        self.twins.append(twin)
        return twin

    def stale(self) -> bool:
        """Tell whether a tensor has been replaced, moved, frozen or thawed since the twins were made."""
        if not all(map(is_, map(getitem, self._tables, self._keys), self._wholes)):
            return True
        if self._refilled and _torch.train_flags(self._refilled) != self._refilled_state:
            return True
        return _torch.leaf_states(self._fixed) != self._state

    def rows(self) -> list[Row]:
        """Return the rows that show the modules their local tensors."""
        return [(table, key, local) for table, key, _, local, _ in self._places]

    def opened(self) -> None:
        """After the rows are in place: route the gradients of parameters with user hooks through autograd."""
        if self._count_hooks() != self._num_hooks:
            self._look_at_hooks()
        for table, key, twin in self._through:
            if self.is_hooked(twin.whole):
                table[key] = _ThroughAutograd.apply(twin.whole, twin)

    def replaced_buffers(self) -> list[Row]:
        """Return rows for the buffers that the forward has replaced, in the layouts of the old ones."""
        if all(map(is_, map(getitem, self._buffer_tables, self._buffer_keys), self._buffer_locals)):
            return []
        return [
            (table, key, _in_layout(table[key], whole))
            for table, key, whole, local, _ in self._buffers
            if table[key] is not local
        ]

    def _count_hooks(self) -> list[int]:
        return list(map(add, map(len, self._hooks_before), map(len, self._hooks_after)))

    def _look_at_hooks(self) -> None:
        """Let the DTensors whose hooks have come or gone get their gradients accordingly."""
        counts = self._count_hooks()
        for position, twin in enumerate(self._parameters):
            # a rehearsal takes all hooks off for a while, with the tables that they are in
            if counts[position] != self._num_hooks[position] and _torch.hook_tables(twin.whole)[0] is twin.hooks[0]:
                self._num_hooks[position] = counts[position]
                twin.look_at_hooks(self.is_hooked(twin.whole))
        self._through = self._find_through()

    def _find_through(self) -> list[tuple[dict, str, Twin]]:
        """Return the places of the parameters whose gradients autograd must add up before hooks see them."""
        places = [(table, key, twin) for table, key, _, _, twin in self._places]
        hooked = [place for place in places if place[-1].is_hooked]
        return [place for place in hooked if not place[-1].is_alone or taker_of(place[-1].whole) is None]

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that take gradients."""
        return frozenset(twin.name for twin in self.twins if twin.trained)

    def __iter__(self) -> Iterator[Twin]:
        return iter(self.twins)


def _columns(places: Sequence[tuple]) -> tuple[list, ...]:
    return tuple([*column] for column in zip(*places, strict=True)) if places else ([], [], [], [], [])


def _memory_of(parameter: DTensor) -> Memory | None:
    return vars(parameter).get(MEMORY)


def _is_freed(parameter: DTensor) -> bool:
    return (memory := _memory_of(parameter)) is not None and memory.frees


def held_by(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that modules hold themselves."""
    return {id(parameter) for module in modules for parameter in _torch.tensor_tables(module)[0].values()}


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
        # the alias has no guard: it must wait for values that are on their way, and may not for those that come later
        return _torch.alias(twin.local) if _is_freed(twin.whole) else twin.local.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        return ctx.twin.whole_gradient(grad), None
