"""Checks of the gradient-receiver protocol of `vescale.dtensor.extension`, for any receiver.

A package that attaches a receiver of its own runs them in a test::

    @ranks(2)
    def test_my_receiver():
        check_gradient_receiver(lambda parameter: attach_gradient_receiver(parameter, MyReceiver(parameter)))
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from vescale.dtensor.extension import gradient_receiver, stand_in_for

__all__ = ["GivenGradient", "check_gradient_receiver"]


class GivenGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to ``leaf`` is ``gradient``."""

    @staticmethod
    def forward(ctx: Any, _leaf: Tensor, gradient: Tensor | None) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient, None


def check_gradient_receiver(attach: Callable[[nn.Parameter], object], mesh: DeviceMesh | None = None) -> None:
    """Check that a receiver keeps the protocol. All ranks of the mesh call this.

    Args:
        attach: attaches the receiver to a parameter of shape (4,), replicated over ``mesh``. The receiver must sum
            partial gradients by the end of the backward pass, or scale the sum by a number that is the same for all.
        mesh: of one axis; by default all ranks.

    Raises:
        AssertionError: the receiver violates the protocol; the message names the case.
    """
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False))
    attach(parameter)
    assert gradient_receiver(parameter) is not None, "no receiver is attached"
    weight = cast(DTensor, parameter)  # nn.Parameter makes a parameter of the tensor's own class
    given = Given(weight, mesh)
    once = given.backward([Replicate()])
    assert bool(once.any()), "a full gradient did not arrive"
    ways: tuple[list[Placement], ...] = ([Partial()], [Replicate()])
    for placements in ways:
        for by_stand_in in (False, True):
            way = f"a gradient {placements[0]}, {'by a stand-in' if by_stand_in else 'by autograd'}"
            expect(given.backward(placements, by_stand_in=by_stand_in), once, way)
    parameter.grad = None
    (given.use([Partial()]) + given.use([Partial()], by_stand_in=True)).backward()
    expect(given.taken(), 2 * once, "two gradients in one backward pass")
    _check_hooks(weight, given, once)
    found = cast(DTensor, torch.autograd.grad(given.use([Partial()]), [parameter])[0])
    assert found.placements == weight.placements, f"torch.autograd.grad returned {found.placements}"
    assert parameter.grad is None, "torch.autograd.grad touched .grad"
    for copied in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert gradient_receiver(copied) is None, "a copy has a receiver"


def _check_hooks(parameter: DTensor, given: Given, once: Tensor) -> None:
    seen: list[tuple[Placement, ...]] = []
    before = parameter.register_hook(lambda gradient: seen.append(gradient.placements))
    after = parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.placements))
    for by_stand_in in (False, True):
        expect(given.backward([Partial()], by_stand_in=by_stand_in), once, "with hooks of a user")
        assert seen == [tuple(parameter.placements)] * 2, f"hooks of a user saw gradients {seen}"
        seen.clear()
    before.remove()
    after.remove()


class Given:
    """Uses of a parameter whose full gradient is 1, 2, 3, 4."""

    def __init__(self, parameter: DTensor, mesh: DeviceMesh):
        self.parameter, self.mesh, self.total = parameter, mesh, torch.arange(1.0, 5.0)

    def use(self, placements: Sequence[Placement], *, by_stand_in: bool = False) -> Tensor:
        """Return a scalar; the parameter gets a gradient in these placements, or its stand-in the local tensor."""
        factor, num_others = 1, self.mesh.size() - 1
        if placements[0].is_partial():  # the factors of all ranks add up to 1
            factor = 1 - 2 * num_others if self.mesh.get_local_rank() == 0 else 2
        local = self.total * factor
        if by_stand_in:
            leaf = torch.zeros(4, requires_grad=True)
            stand_in_for(self.parameter, leaf, placements)
            used: Tensor = GivenGradient.apply(leaf, local)
        else:
            gradient = DTensor.from_local(local, self.mesh, placements, run_check=False)
            used = GivenGradient.apply(self.parameter, gradient)
        return used

    def backward(self, placements: Sequence[Placement], *, by_stand_in: bool = False) -> Tensor:
        """Return the gradient after one backward pass, and clear it."""
        self.use(placements, by_stand_in=by_stand_in).backward()
        return self.taken()

    def taken(self) -> Tensor:
        """Return the local tensor of ``.grad``, and clear it."""
        gradient, self.parameter.grad = self.parameter.grad, None
        assert isinstance(gradient, DTensor), f"after the backward pass .grad is {gradient}, not a DTensor"
        assert gradient.placements == self.parameter.placements, f".grad has placements {gradient.placements}"
        return gradient.to_local().clone()


def expect(actual: Tensor, expected: Tensor, way: str) -> None:
    """Check a gradient."""
    assert torch.allclose(actual, expected), f"{way}: expected {expected.tolist()}, got {actual.tolist()}"
