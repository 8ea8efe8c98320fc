"""Gradient receivers: one object per parameter takes all its gradients.

A gradient reaches a parameter in two ways. Autograd computes it for the parameter itself, or for a *stand-in*: a plain
leaf that replaces the DTensor in a module's computation. In both cases it is a local tensor with placements, and may be
a partial sum over mesh axes. One receiver processes it::

    autograd --> hooks of the parameter ----+
                                            +--> receiver.receive(local, placements) --> parameter.grad
    autograd --> hook of a stand-in --------+

By default ``vescale.dmodule`` sums partial gradients over the ranks. ``vescale.optim.DDP`` takes its place and puts
gradients into its buckets. For every receiver, the parameter carries one gradient hook and one post-accumulate hook of
this module; each stand-in carries one post-accumulate hook.

Guarantees
    - `GradientReceiver.receive` is called once for every gradient that autograd accumulates. ``parameter.grad`` then
      has its value from before the accumulation. Autograd never adds to ``parameter.grad``.
    - A gradient hook or post-accumulate hook of a user gets the gradient in the placements of the parameter. If the
      parameter has such a hook, the gradient is redistributed first. Our hooks run before those of a user.
    - ``torch.autograd.grad`` returns gradients in the placements of their parameters, and no receiver is called.
    - With ``create_graph=True`` the local gradient has a history; the receiver may keep it.
    - A copy of a parameter, by ``copy.deepcopy`` or pickle, has no receiver.

Note: several gradients in one backward pass
    Autograd adds the gradients of all uses of a leaf, then accumulates once per pass. So a parameter gets at most one
    gradient for itself and one for each stand-in. `gets_several_gradients` returns whether more than one of these
    accumulations runs in the current pass. A receiver that acts as soon as the gradient is complete, as a bucket of DDP
    does, must then wait for the end of the pass.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from ._torch import autograd

__all__ = [
    "GradientReceiver",
    "aligned_gradient",
    "as_gradient",
    "attach_gradient_receiver",
    "detach_gradient_receiver",
    "gets_several_gradients",
    "gradient_receiver",
    "has_gradient_hooks",
    "stand_in_for",
]

ATTRIBUTE = "_vescale_gradients"
NOTHING = object()  # a marker, where None is a value


class GradientReceiver(Protocol):
    """Takes the gradients of one parameter; see the module's docstring."""

    def receive(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Take a gradient while a backward pass runs.

        Args:
            local: this rank's part. It has the shape of the parameter's local tensor if the placements are those of the
                parameter or partial. The receiver owns it. It requires grad in a backward with ``create_graph=True``.
            placements: one per mesh axis of a DTensor parameter; empty for a plain parameter. If a user has registered
                hooks on the parameter, these are the placements of the parameter, and the receiver must have put the
                result into ``parameter.grad`` on return.
        """


def attach_gradient_receiver(parameter: Tensor, receiver: GradientReceiver) -> GradientReceiver | None:
    """Let ``receiver`` take the gradients of ``parameter`` from now on; return the previous receiver, if any.

    Stand-ins of the parameter deliver to the new receiver. May be called again with the same receiver, for example
    after other code has cleared the hooks of the parameter.

    Args:
        parameter: a leaf that requires grad.
        receiver: the receiver.

    Raises:
        RuntimeError: ``parameter`` does not require grad.

    Example:
        >>> import torch
        >>> class Printing:
        ...     def receive(self, local, placements):
        ...         print(local)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> attach_gradient_receiver(weight, Printing())
        >>> (3 * weight).sum().backward()
        tensor([3., 3.])
        >>> weight.grad is None
        True
    """
    intake = _intake_of(parameter)
    if intake is None:
        intake = _Intake(parameter)
        vars(parameter)[ATTRIBUTE] = intake
    intake.install(parameter)
    replaced, intake.receiver = intake.receiver, receiver
    return replaced


def detach_gradient_receiver(parameter: Tensor) -> None:
    """Remove the receiver of a parameter and its hooks. Autograd, and stand-ins, add to ``parameter.grad`` again."""
    intake = _intake_of(parameter)
    if intake is not None:
        intake.remove()
        del vars(parameter)[ATTRIBUTE]


def gradient_receiver(parameter: Tensor) -> GradientReceiver | None:
    """Return the receiver of a parameter, None if it has none or if its hooks were removed."""
    intake = _intake_of(parameter)
    return intake.receiver if intake is not None and intake.is_installed(parameter) else None


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has gradient hooks or post-accumulate hooks other than those of this module."""
    intake = _intake_of(parameter)
    own = 0 if intake is None else len(intake.handles)
    return sum(map(len, autograd.hook_tables(parameter))) > own


def stand_in_for(parameter: DTensor, leaf: Tensor, placements: Sequence[Placement]) -> RemovableHandle:
    """Deliver the gradients of ``leaf`` to the receiver of ``parameter``, until the handle is removed.

    Hooks that a user registers on the parameter run as if autograd had computed the gradient for the parameter.

    Args:
        parameter: a parameter that has a receiver.
        leaf: a plain leaf that requires grad, with the local shape of the parameter. Its ``.grad`` is always None.
        placements: those of the gradient; ``leaf.grad`` is its local tensor.

    Raises:
        ValueError: ``parameter`` has no receiver.
    """
    intake = _intake_of(parameter)
    if intake is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no gradient receiver: call attach_gradient_receiver "
            "before a local leaf stands in for it"
        )
    stand_in = _StandIn(leaf, intake, tuple(placements))
    intake.stand_ins = [known for known in intake.stand_ins if known() is not None]
    intake.stand_ins.append(weakref.ref(stand_in))
    return leaf.register_post_accumulate_grad_hook(stand_in)


def gets_several_gradients(parameter: Tensor) -> bool:
    """Return whether more than one gradient of the parameter arrives in the running backward pass.

    Called by a receiver while it receives. The answer is the same for each of these gradients.
    """
    intake = _intake_of(parameter)
    stand_ins = [] if intake is None else [known for ref in intake.stand_ins if (known := ref()) is not None]
    if not stand_ins:
        return False
    own = autograd.runs_in_backward(stand_ins[0].node_of(parameter))
    if own + len(stand_ins) == 1:
        return False
    leaves = [leaf for stand_in in stand_ins if (leaf := stand_in.leaf()) is not None]
    return own + sum(map(autograd.accumulates, leaves)) > 1


def as_gradient(parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> DTensor:
    """Return ``local`` as a gradient of ``parameter``, differentiably."""
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def aligned_gradient(parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> Tensor:
    """Return the local tensor of a gradient in the placements of its parameter; communicate if they differ.

    Differentiable where ``local`` requires grad.
    """
    wanted = parameter.placements
    if tuple(placements) == tuple(wanted):
        return local
    return _local(as_gradient(parameter, local, placements).redistribute(placements=wanted))


def _local(gradient: Tensor) -> Tensor:
    """Return the local tensor of a gradient, with its history if it has one."""
    if isinstance(gradient, DTensor):
        return gradient.to_local() if gradient.requires_grad else autograd.local_of(gradient)
    return gradient


def _intake_of(parameter: Tensor) -> _Intake | None:
    return vars(parameter).get(ATTRIBUTE) or None  # empty in a copy


class _Intake:
    """The hooks of one parameter, and its receiver.

    While autograd accumulates, ``parameter.grad`` is set aside::

        gradient hook           kept = parameter.grad;  parameter.grad = None
        autograd                parameter.grad = gradient
        post-accumulate hook    gradient = parameter.grad;  parameter.grad = kept;  receiver.receive(gradient)

    Attributes:
        receiver: the receiver; None after it was detached.
        handles: of the two hooks.
        tables: the hook tables of the parameter that hold them.
        stand_ins: of the parameter; each lives as long as its leaf.
    """

    def __init__(self, parameter: Tensor):
        self.parameter = weakref.ref(parameter)
        self.receiver: GradientReceiver | None = None
        self.stand_ins: list[weakref.ref[_StandIn]] = []
        self.handles: tuple[RemovableHandle, ...] = ()
        self.tables: tuple[dict, dict] = {}, {}
        self.kept: object = NOTHING

    def __reduce__(self) -> tuple:
        return OrderedDict, ()  # empty; torch.load(weights_only=True) allows it, too

    def install(self, parameter: Tensor) -> None:
        """Register the two hooks, unless they are there."""
        if self.is_installed(parameter):
            return
        self.remove()
        before = parameter.register_hook(_Hook(self.before_accumulation))
        after = parameter.register_post_accumulate_grad_hook(_Hook(self.after_accumulation))
        self.handles, self.tables = (before, after), autograd.hook_tables(parameter)
        for table, handle in zip(self.tables, self.handles, strict=True):
            autograd.put_first(table, handle.id)

    def is_hooked(self) -> bool:
        """Return whether a user has hooked the parameter."""
        before, after = self.tables
        return len(before) + len(after) > len(self.handles)

    def is_installed(self, parameter: Tensor) -> bool:
        """Return whether both hooks are in the tables of the parameter."""
        tables = zip(autograd.hook_tables(parameter), self.handles, strict=False)
        return bool(self.handles) and all(handle.id in table for table, handle in tables)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.receiver = (), None

    def leaves(self) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return what stands in for the parameter, each with what makes its gradients those of the parameter.

        ``torch.autograd.grad`` runs no accumulation, so code that calls it asks here (``docs/protocols.md``).
        """
        found: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
        for stand_in in (ref() for ref in self.stand_ins):
            if stand_in is not None and (leaf := stand_in.leaf()) is not None:
                found[id(leaf)] = leaf, stand_in.of_parameter  # a replaced one may be alive: the newest counts
        return [*found.values()]

    def before_accumulation(self, gradient: Tensor | None) -> Tensor | None:
        """Set ``parameter.grad`` aside; redistribute the gradient if the parameter has hooks of a user."""
        self.kept = NOTHING
        if gradient is None:  # a function returned None as the gradient; nothing is accumulated
            return None
        parameter = self.parameter()
        fits = not isinstance(gradient, DTensor) or gradient.placements == parameter.placements
        if not (fits and parameter.grad is None) and not autograd.accumulates(parameter):
            return None if fits else gradient.redistribute(parameter.device_mesh, parameter.placements)
        self.kept, parameter.grad = parameter.grad, None
        if fits or (gradient.device_mesh == parameter.device_mesh and not has_gradient_hooks(parameter)):
            return None
        return gradient.redistribute(parameter.device_mesh, parameter.placements)

    def after_accumulation(self, parameter: Tensor) -> None:
        """Pass the gradient that autograd has put into ``parameter.grad`` to the receiver."""
        kept, self.kept = self.kept, NOTHING
        if kept is NOTHING:
            return
        gradient, parameter.grad = parameter.grad, kept
        if gradient is None:
            return
        if isinstance(gradient, DTensor) != isinstance(parameter, DTensor):
            raise TypeError(
                f"a parameter with placements {getattr(parameter, 'placements', None)} got a gradient with placements "
                f"{getattr(gradient, 'placements', None)} (None: a plain tensor) of shape {tuple(gradient.shape)}; "
                "compute with DTensors or with plain tensors throughout"
            )
        self.receiver.receive(_local(gradient), gradient.placements if isinstance(gradient, DTensor) else ())

    def deliver_specially(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Deliver the gradient of a stand-in to a parameter without a receiver, or with hooks of a user."""
        parameter = self.parameter()
        local = aligned_gradient(parameter, local, placements)
        gradient = as_gradient(parameter, local, parameter.placements)
        if self.receiver is None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return
        before, after = ([*table.items()] for table in self.tables)
        own = [handle.id for handle in self.handles]
        dtype = getattr(parameter, "grad_dtype", None)
        gradient = gradient if dtype is None else gradient.to(dtype)
        for hook in [hook for key, hook in before if key not in own]:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        self.receiver.receive(_local(gradient), gradient.placements)
        for hook in [hook for key, hook in after if key not in own]:
            hook(parameter)


class _Hook:
    """A hook that calls a method of an `_Intake` and does not keep it alive.

    The garbage collector cannot see torch's references to hooks, so a cycle through a hook is never freed. The
    parameter's attribute holds the intake and thus the receiver, which may hold the parameter.
    """

    __torch_unserializable__ = True  # copies of a parameter have no hooks; torch need not warn
    _vescale_accumulates = True  # docs/protocols.md

    def __init__(self, method: Callable[[Tensor | None], Tensor | None]):
        self._method = weakref.WeakMethod(method)

    def __call__(self, value: Tensor | None) -> Tensor | None:
        method = self._method()
        return None if method is None else method(value)


class _StandIn:
    """The post-accumulate hook of a leaf that stands in for a parameter.

    Attributes:
        leaf: weak reference to the leaf. The leaf holds this hook, so a strong reference would be a cycle that is never
            freed.
    """

    __torch_unserializable__ = True

    def __init__(self, leaf: Tensor, intake: _Intake, placements: tuple[Placement, ...]):
        self.leaf, self.intake, self.placements = weakref.ref(leaf), intake, placements
        self._node: Node | None = None

    def node_of(self, parameter: Tensor) -> Node:
        """Return the node that accumulates for the parameter itself. Kept here, as it keeps the parameter alive."""
        if self._node is None:
            self._node = autograd.accumulation_node(parameter)
        return self._node

    def of_parameter(self, local: Tensor) -> DTensor:
        """Return a gradient of the leaf as one of the parameter, in its placements."""
        parameter = self.intake.parameter()
        assert parameter is not None, "the parameter of a leaf was freed"
        return as_gradient(parameter, aligned_gradient(parameter, local, self.placements), parameter.placements)

    def __call__(self, leaf: Tensor) -> None:
        local = leaf.grad
        if local is None:  # autograd calls hooks also if a function returned None
            return
        leaf.grad = None
        intake = self.intake
        if intake.receiver is None or intake.is_hooked():
            intake.deliver_specially(local, self.placements)
        else:  # the hot path of static mode
            intake.receiver.receive(local, self.placements)
