"""Local parameters: the plain leaves that replace DTensor parameters while a module runs on local tensors.

Every DTensor parameter has a local parameter, a plain leaf tensor over the same storage, so an optimizer step on the
DTensor also updates the leaf. During forward the leaf replaces the DTensor in ``module._parameters``; at all other
times the DTensor is registered::

    storage  <---  DTensor           registered in the module; the optimizer and the state dict use it
             <---  local parameter   in the module while the program is open; backward accumulates into it
                        |
                        +-- local gradient --> gradient receiver of the DTensor

The local parameter is a stand-in of its DTensor (see `vescale.dtensor.extension`): the gradient receiver of the
parameter gets the local gradient, partial or full. Gradient hooks of a user must see the sum of all gradients. So if
the DTensor has such a hook, the table holds the output of an autograd function over the DTensor instead of the leaf.

Note: memory that data parallelism frees
    Data parallelism may withdraw the values of a parameter for a while. Such a parameter has an attribute
    ``_vescale_memory``, see :class:`Memory`. The local parameter is registered there, and is guarded as the parameter
    is. With ZeRO 1 and 2 of ``vescale.optim``, any read blocks until the all-gather in flight completes. ZeRO 3 frees
    and refills the memory of one storage object, so equal addresses do not imply equal memory. There the local
    parameter follows its parameter to another storage object, and addresses are not compared between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, getitem, is_
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from vescale.dtensor.extension import as_gradient, has_gradient_hooks, stand_in_for

from .. import _torch
from .._boundary.convert import as_dtensor
from .._execution.patch import Row

__all__ = ["LocalParameter", "LocalParameters", "Memory"]

MEMORY = "_vescale_memory"


class Memory(Protocol):
    """The owner of a parameter's memory: its attribute ``_vescale_memory``, None in copies.

    Attributes:
        frees: whether the memory is freed and refilled. If so, the values are present only while a module needs them,
            and addresses must not be compared. If not, any read blocks until the values are present.
    """

    frees: bool

    def share(self, parameter: Tensor, tensor: Tensor, *, is_view: bool) -> None:
        """Register ``tensor`` as a second reference to the values of ``parameter``, for its lifetime.

        It must not be read while the values are absent. If it ``is_view`` of the local memory of the parameter, it
        must follow the parameter to other memory.
        """


Hook = Callable[[Tensor], None]


@dataclass(eq=False)
class LocalParameter:
    """A parameter or buffer and the local tensor that stands in for it.

    Attributes:
        name: fully qualified name; the first one of a tied parameter.
        dtensor: the parameter or buffer that is registered in the module.
        local: the plain tensor that modules see; a leaf.
        gradient: layout of the local gradient; None until it is recorded.
        trained: whether the parameter requires a gradient.
        hooks: the tables of gradient hooks of the DTensor; None for a buffer.
        is_hooked: whether a user has hooked the DTensor.
        handle: of the hook that receives the local gradients.
        is_silent: whether ``local`` shows negative zeros, see :func:`silenced`.
    """

    name: str
    dtensor: DTensor
    local: Tensor
    gradient: tuple[Placement, ...] | None = None
    hooks: tuple[dict, dict] | None = None
    is_hooked: bool = False
    trained: bool = False
    handle: RemovableHandle | None = None
    is_silent: bool = False

    def expect(self, gradient: tuple[Placement, ...] | None, hook: Hook | None) -> None:
        """Set the layout of the local gradients and the hook that receives them.

        Args:
            gradient: the layout.
            hook: receives the gradient and clears ``local.grad``; None delivers it to the receiver of the DTensor.
        """
        self.gradient = gradient
        if not self.trained:
            return
        if self.handle is not None:
            self.handle.remove()
        if hook is None:
            self.handle = stand_in_for(self.dtensor, self.local, gradient)
        else:
            self.handle = self.local.register_post_accumulate_grad_hook(hook)

    def dtensor_gradient(self, local: Tensor) -> DTensor:
        """Return a local gradient as a DTensor in the placements of the parameter."""
        wanted, gradient = tuple(self.dtensor.placements), self.gradient
        if gradient in (None, wanted) and not local.requires_grad:
            return _torch.wrap_like(local, self.dtensor)
        return as_gradient(self.dtensor, local, gradient or wanted).redistribute(placements=wanted)


class LocalParameters:
    """The local tensors of all DTensor parameters and DTensor buffers of a module.

    Args:
        modules: names and modules that will run on local tensors. Only the tensors that a module holds directly get a
            local parameter.
        silent_axes: returns, for a module and a key, the axes along which only the first rank adds the tensor, see
            :func:`silenced`.

    Attributes:
        tensors: one per parameter and per buffer; a tensor with several sets of silent axes has several.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        silent_axes: Callable[[nn.Module, str], tuple[int, ...]],
    ):
        self.tensors: list[LocalParameter] = []
        self._places: list[tuple[dict, str, DTensor, Tensor, LocalParameter]] = []
        by_id: dict[int, dict[tuple, LocalParameter]] = {}
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
        # columns that every call reads
        self._tables, self._keys, self._dtensors, *_ = _columns(self._places)
        self._buffers = [place for place in self._places if place[-1].hooks is None]
        self._buffer_tables, self._buffer_keys, _, self._buffer_locals, _ = _columns(self._buffers)
        self._parameters = [parameter for parameter in self.tensors if parameter.hooks is not None]
        self._fixed = [parameter.dtensor for parameter in self.tensors if not _is_freed(parameter.dtensor)]
        self._refilled = [parameter.dtensor for parameter in self.tensors if _is_freed(parameter.dtensor)]
        self._state, self._refilled_state = _torch.leaf_states(self._fixed), _torch.train_flags(self._refilled)
        self._hooks_before, self._hooks_after = ([parameter.hooks[i] for parameter in self._parameters] for i in (0, 1))
        self._num_hooks = self._count_hooks()
        self._through = self._find_through()

    def _add(self, name: str, dtensor: DTensor, silent: tuple[int, ...]) -> LocalParameter:
        local = silenced(dtensor, silent)
        parameter = LocalParameter(name, dtensor, local, is_silent=local is not _torch.local_of(dtensor))
        if isinstance(dtensor, nn.Parameter):
            parameter.local = _torch.leaf_over(local, requires_grad=dtensor.requires_grad)
            vars(parameter.local).update(vars(dtensor))
            parameter.trained = dtensor.requires_grad
            parameter.hooks = _torch.hook_tables(dtensor)
            parameter.is_hooked = has_gradient_hooks(dtensor)
            if (memory := _memory_of(dtensor)) is not None:
                memory.share(dtensor, parameter.local, is_view=local is _torch.local_of(dtensor))
        self.tensors.append(parameter)
        return parameter

    def silent(self) -> dict[int, DTensor]:
        """Return the parameters whose local tensors show negative zeros, by the identity of the local tensor."""
        return {id(parameter.local): parameter.dtensor for parameter in self.tensors if parameter.is_silent}

    def stale(self) -> bool:
        """Return whether a tensor was replaced, moved, frozen or unfrozen since the local parameters were made."""
        if not all(map(is_, map(getitem, self._tables, self._keys), self._dtensors)):
            return True
        if self._refilled and _torch.train_flags(self._refilled) != self._refilled_state:
            return True
        return _torch.leaf_states(self._fixed) != self._state

    def rows(self) -> list[Row]:
        """Return the rows that put the local tensors into the modules."""
        return [(table, key, local) for table, key, _, local, _ in self._places]

    def opened(self) -> None:
        """Route the gradients of parameters with user hooks through autograd; called after the rows are applied."""
        if self._count_hooks() != self._num_hooks:
            self._look_at_hooks()
        for table, key, parameter in self._through:
            if has_gradient_hooks(parameter.dtensor):  # a dry run removes them temporarily
                table[key] = _ThroughAutograd.apply(parameter.dtensor, parameter)

    def replaced_buffers(self) -> list[Row]:
        """Return rows for the buffers that the forward replaced, in the layouts of the previous buffers."""
        if all(map(is_, map(getitem, self._buffer_tables, self._buffer_keys), self._buffer_locals)):
            return []
        return [
            (table, key, _in_layout(table[key], dtensor))
            for table, key, dtensor, local, _ in self._buffers
            if table[key] is not local
        ]

    def _count_hooks(self) -> list[int]:
        return list(map(add, map(len, self._hooks_before), map(len, self._hooks_after)))

    def _look_at_hooks(self) -> None:
        """Reroute the gradients of the parameters whose user hooks were added or removed."""
        counts = self._count_hooks()
        for position, parameter in enumerate(self._parameters):
            # a dry run temporarily removes all hooks, by replacing their tables
            if (
                counts[position] != self._num_hooks[position]
                and _torch.hook_tables(parameter.dtensor)[0] is parameter.hooks[0]
            ):
                self._num_hooks[position] = counts[position]
                parameter.is_hooked = has_gradient_hooks(parameter.dtensor)
        self._through = self._find_through()

    def _find_through(self) -> list[tuple[dict, str, LocalParameter]]:
        """Return the table entries of the parameters with user hooks, which must see the sum of all gradients."""
        return [(table, key, parameter) for table, key, _, _, parameter in self._places if parameter.is_hooked]

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that require gradients."""
        return frozenset(parameter.name for parameter in self.tensors if parameter.trained)

    def __iter__(self) -> Iterator[LocalParameter]:
        return iter(self.tensors)


def _columns(places: Sequence[tuple]) -> tuple[list, ...]:
    return tuple([*column] for column in zip(*places, strict=True)) if places else ([], [], [], [], [])


def _memory_of(parameter: DTensor) -> Memory | None:
    return vars(parameter).get(MEMORY)


def _is_freed(parameter: DTensor) -> bool:
    return (memory := _memory_of(parameter)) is not None and memory.frees


def _in_layout(new: object, dtensor: DTensor) -> object:
    """Return the value with which a forward replaced a buffer, in the buffer's layout."""
    if not isinstance(new, Tensor) or isinstance(new, DTensor):
        return new
    local = _torch.local_of(dtensor)
    if new.shape == local.shape:
        return DTensor.from_local(
            new, dtensor.device_mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride()
        )
    return as_dtensor(new, dtensor.device_mesh)


def silenced(dtensor: DTensor, axes: tuple[int, ...]) -> Tensor:
    """Return the local tensor that this rank adds to a partial sum over ``axes``.

    The sum over ranks must contain the tensor once, so only the rank at coordinate 0 of those axes adds it. The other
    ranks add a tensor of negative zeros (``x + -0.0`` is ``x`` for every ``x``), which gets the same gradient.
    """
    local = _torch.local_of(dtensor)
    if all(dtensor.device_mesh.get_local_rank(axis) == 0 for axis in axes):
        return local
    return torch.full_like(local, -0.0)


class _ThroughAutograd(torch.autograd.Function):
    """Return the local tensor of a DTensor parameter; the gradient is a DTensor in the parameter's placements."""

    @staticmethod
    def forward(ctx, _dtensor: DTensor, parameter: LocalParameter) -> Tensor:
        ctx.parameter = parameter
        # An alias is unguarded. Freed memory needs that: a guard would refuse values that are gathered later. With an
        # all-gather in flight, `detach` of the guarded leaf blocks until it completes.
        return _torch.alias(parameter.local) if _is_freed(parameter.dtensor) else parameter.local.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        return ctx.parameter.dtensor_gradient(grad), None
