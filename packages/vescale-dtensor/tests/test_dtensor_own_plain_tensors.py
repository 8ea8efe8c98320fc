"""Plain tensors that torch's own formulas and functions make are equal on all ranks and count as replicated.

A plain tensor of the program may differ between the ranks and stays refused: in forward, beside the same functions, and
in the backward of the program's own `autograd.Function`.
"""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks


def twice(function):
    """Return a function that gives the gradient of the squared gradient of `function`."""

    def second(x):
        y = function(x).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return first.square().sum()

    return second


FUNCTIONS = {
    "prod": lambda x: x.prod(1),
    "mvlgamma": lambda x: torch.mvlgamma(x + 3, 3),
    "quantile": lambda x: (x.quantile(0.3), x.quantile(0.3, 1), torch.nanquantile(x, 0.4, 0)),
    "masked mean": lambda x: (torch.masked.mean(x, 1), torch.masked.mean(x, 1, mask=x > 1), torch.masked.var(x, 0)),
    "combinations": lambda x: torch.combinations(x[0]),
    "second gradient of unbind": twice(lambda x: x.unbind(1)[0] * x.unbind(0)[1].sum()),
    "second gradient of split": twice(lambda x: x.split(2, 1)[0] * 3),
}


def operand():
    return [(torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.5).requires_grad_()]


@ranks(2)
def test_equal_one_device(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for name, function in FUNCTIONS.items():
        assert assert_equals_one_device(function, operand(), mesh) == 4, name


@ranks(2)
def test_numbers_written_at_a_mask(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def write(x):
        y, z = x * 1, x * 1
        y[y > 1] = 0
        z[x[:, 0] > 1] = x[0]
        return y, z, x.index_put([x > 1], x.sum())

    assert assert_equals_one_device(write, operand(), mesh) == 4


class Scaled(torch.autograd.Function):
    """Multiplies the gradient by a plain tensor of the program."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.ones(ctx.shape, dtype=torch.float64)


class ScaledBoxed(Scaled):
    """The same, with its gradients in a list."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads[0] if isinstance(grads[0], list) else grads
        return grad * torch.ones(ctx.shape, dtype=torch.float64)


@ranks(2)
def test_plain_tensors_of_the_program_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    (whole,) = operand()
    x = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    with pytest.raises((NotImplementedError, RuntimeError), match="got mixed"):
        torch.quantile(x, torch.tensor([0.1, 0.2], dtype=torch.float64), dim=1) + 0
    for function in (Scaled, ScaledBoxed):
        with pytest.raises(RuntimeError, match="got mixed"):
            function.apply(x).sum().backward()
    with pytest.raises(RuntimeError, match="got mixed"):
        x + torch.ones(4, 6, dtype=torch.float64)


@ranks(2)
def test_stock_torch_refuses_its_own():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(operand()[0].detach(), mesh, [Replicate()]).requires_grad_()
    with disabled("operators"), pytest.raises(RuntimeError, match="got mixed"):
        x.prod(1).sum().backward()
