"""Gradient receivers: one per parameter, whichever way a gradient arrives."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from vescale.dtensor import init_device_mesh
from vescale.dtensor.extension import (
    aligned_gradient,
    as_gradient,
    attach_gradient_receiver,
    detach_gradient_receiver,
    gets_several_gradients,
    gradient_receiver,
    has_gradient_hooks,
    stand_in_for,
)
from vescale_testing import ranks
from vescale_testing.gradient_receivers import GivenGradient, check_gradient_receiver


class Adding:
    """Adds gradients to ``.grad``, each at once."""

    def __init__(self, parameter):
        self.parameter = parameter

    def receive(self, local, placements):
        parameter = self.parameter
        with torch.no_grad():
            gradient = as_gradient(parameter, aligned_gradient(parameter, local, placements), parameter.placements)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Forgetting(Adding):
    """Takes a partial gradient for the full one."""

    def receive(self, local, _placements):
        super().receive(local, self.parameter.placements)


class Keeping:
    """Keeps plain gradients, and whether more than one is to come."""

    def __init__(self, parameter):
        self.parameter, self.received, self.several = parameter, [], []
        attach_gradient_receiver(parameter, self)

    def receive(self, local, placements):
        assert placements == ()
        self.received.append(local.tolist())
        self.several.append(gets_several_gradients(self.parameter))


@ranks(2)
def test_the_checks_of_the_protocol():
    check_gradient_receiver(lambda parameter: attach_gradient_receiver(parameter, Adding(parameter)))
    with pytest.raises(AssertionError, match="by autograd: expected"):
        check_gradient_receiver(lambda parameter: attach_gradient_receiver(parameter, Forgetting(parameter)))
    with pytest.raises(AssertionError, match="no receiver is attached"):
        check_gradient_receiver(lambda _parameter: None)


def test_one_receiver_and_two_hooks():
    weight = nn.Parameter(torch.zeros(2))
    weight.register_hook(lambda gradient: 2 * gradient)
    assert gradient_receiver(weight) is None
    assert has_gradient_hooks(weight)
    first = Keeping(weight)
    second = Keeping(weight)
    assert attach_gradient_receiver(weight, second) is second
    assert gradient_receiver(weight) is second
    assert [len(weight._backward_hooks), len(weight._post_accumulate_grad_hooks)] == [2, 1]
    assert next(iter(weight._backward_hooks)) == max(weight._backward_hooks)  # ours, registered later, runs first
    (3 * weight).sum().backward()
    assert (first.received, second.received, weight.grad) == ([], [[6.0, 6.0]], None)
    detach_gradient_receiver(weight)
    assert gradient_receiver(weight) is None
    (3 * weight).sum().backward()
    assert weight.grad.tolist() == [6.0, 6.0]
    assert len(second.received) == 1


def test_grad_is_as_it_was_while_a_receiver_receives():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = before = torch.ones(2)
    seen = []

    class Looking:
        def receive(self, _local, _placements):
            seen.append(weight.grad is before)

    attach_gradient_receiver(weight, Looking())
    (3 * weight).sum().backward()
    assert seen == [True]
    assert weight.grad is before
    (found,) = torch.autograd.grad((3 * weight).sum(), weight)
    assert found.tolist() == [3.0, 3.0]
    assert (seen, weight.grad) == ([True], before)
    GivenGradient.apply(weight, None).backward()  # a function gives no gradient
    assert (seen, weight.grad) == ([True], before)


def test_several_gradients_in_one_backward():
    weight = nn.Parameter(torch.zeros(2))
    keeper = Keeping(weight)
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    handles = [stand_in_for(weight, leaf, ()) for leaf in leaves]
    for used, several in (([leaves[0]], False), (leaves, True), ([weight], False), ([weight, leaves[1]], True)):
        sum((3 * leaf).sum() for leaf in used).backward()
        assert keeper.received == [[3.0, 3.0]] * len(used)
        assert keeper.several == [several] * len(used)
        assert [leaf.grad for leaf in leaves] == [None, None]
        keeper.received.clear()
        keeper.several.clear()
    handles[0].remove()
    leaves[0].sum().backward()
    assert leaves[0].grad.tolist() == [1.0, 1.0]
    assert not keeper.received


def test_what_is_refused():
    with pytest.raises(
        ValueError, match=r"shape \(2,\) has no gradient receiver: call attach_gradient_receiver before"
    ):
        stand_in_for(nn.Parameter(torch.zeros(2)), torch.zeros(2, requires_grad=True), ())
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        attach_gradient_receiver(torch.zeros(2), Adding(None))


@ranks(1)
def test_a_plain_gradient_of_a_dtensor_is_refused():
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    attach_gradient_receiver(weight, Adding(weight))
    with pytest.raises(
        TypeError, match=r"got a gradient with placements None \(None: a plain tensor\) of shape \(2,\)"
    ):
        GivenGradient.apply(weight, torch.ones(2)).backward()


@ranks(1)
def test_a_history_reaches_the_receiver():
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    histories = []

    class Looking:
        def receive(self, local, _placements):
            histories.append(local.requires_grad)

    attach_gradient_receiver(weight, Looking())
    weight.pow(3).sum().to_local().backward(create_graph=True)
    weight.pow(3).sum().to_local().backward()
    assert histories == [True, False]


def test_nothing_is_kept_alive():
    weight = nn.Parameter(torch.zeros(2))
    keeper, leaf = Keeping(weight), torch.zeros(2, requires_grad=True)
    stand_in_for(weight, leaf, ())
    (leaf.sum() + weight.sum()).backward()
    references = [weakref.ref(each) for each in (weight, leaf, keeper)]
    del weight, leaf, keeper
    gc.collect()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
