"""A clip value is a positive number: others would stop a training or turn its gradients around, without a word."""

import math

import pytest
import torch

from vescale.optim import DistributedOptimizer, clip_grad_norm_

REFUSED = [
    (-1.0, ValueError, "expected a positive number, got -1.0; pass a norm such as 1.0"),
    (0, ValueError, "expected a positive number, got 0.0; pass"),
    (math.nan, ValueError, "expected a positive number, got nan; pass"),
    (-math.inf, ValueError, "expected a positive number, got -inf; pass"),
    ("1", TypeError, "expected a positive number, got '1'; pass"),
    (None, TypeError, "expected a positive number, got None; pass"),
    (True, TypeError, "expected a positive number, got True; pass"),
    ([1.0], TypeError, r"expected a positive number, got \[1.0\]; pass"),
]


def with_gradient():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    return weight


@pytest.mark.parametrize(("value", "error", "message"), REFUSED)
def test_the_function_refuses(value, error, message):
    weight = with_gradient()
    with pytest.raises(error, match=f"^clip_grad_norm_: max_norm: {message}"):
        clip_grad_norm_([weight], value)
    assert weight.grad.tolist() == [3, 4]


@pytest.mark.parametrize(("value", "error", "message"), [row for row in REFUSED if row[0] is not None])
def test_the_optimizer_refuses(value, error, message):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(error, match=f"^DistributedOptimizer: clip_grad_norm: {message}"):
        DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, clip_grad_norm=value)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, clip_grad_norm=1.0)
    optimizer.clip_grad_norm = value  # changed later, as a schedule does
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(error, match=f"^clip_grad_norm_: max_norm: {message}"):
        optimizer.step()


@pytest.mark.parametrize("norm_type", [-1.0, 0, math.nan, "2", None])
def test_other_orders_are_refused(norm_type):
    with pytest.raises((ValueError, TypeError), match=r"^clip_grad_norm_: norm_type: expected a positive number, got"):
        clip_grad_norm_([with_gradient()], 1.0, norm_type=norm_type)


@pytest.mark.parametrize("value", [2, 2.0, torch.tensor(2.0)])
def test_positive_numbers_clip(value):
    weight = with_gradient()
    assert clip_grad_norm_([weight], value).item() == 5
    torch.testing.assert_close(weight.grad, torch.tensor([1.2, 1.6]))


def test_infinity_measures():
    weight = with_gradient()
    assert clip_grad_norm_([weight], math.inf).item() == 5
    assert weight.grad.tolist() == [3, 4]


def test_torch_turns_gradients_around():
    weight = with_gradient()
    torch.nn.utils.clip_grad_norm_([weight], -1.0)
    assert weight.grad[0] < 0
