"""Autograd counts writes to DTensors in a list, as to plain tensors: gradients have them, saved tensors are safe."""

import pytest
import torch

from vescale.dtensor import DTensor, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

WRITES = {
    "add": lambda x: torch._foreach_add_([x], [x]),
    "mul": lambda x: torch._foreach_mul_([x], 3.0),
    "sqrt": lambda x: torch._foreach_sqrt_([x]),
    "lerp": lambda x: torch._foreach_lerp_([x], [2 * x], 0.5),
    "addcmul": lambda x: torch._foreach_addcmul_([x], [x * 2], [x * 3]),
}


def gradient(x, view, write):
    """Return the gradient through a view to which a list was written."""
    x.requires_grad_()
    y = view(x * 1)
    write(y)
    weight = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    if isinstance(x, DTensor):
        weight = distribute_tensor(weight, x.device_mesh, [Replicate()])
    return torch.autograd.grad(y, x, weight)[0]


VIEWS = {
    "all": lambda x: x,
    "a new dim": lambda x: x.unsqueeze(0),
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:],
}


@ranks(2)
def test_gradients_of_views_have_the_write():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    for placement in (Replicate(), Shard(0), Shard(1)):
        for name, view in VIEWS.items():
            for kind, write in WRITES.items():
                expected = gradient(whole.clone(), view, write)
                actual = gradient(distribute_tensor(whole, mesh, [placement]), view, write).full_tensor()
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0, msg=f"{kind} {name} {placement}")


def backward_of_a_changed_tensor(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    y = x.exp()
    with torch.no_grad():
        torch._foreach_mul_([y.detach()], 2.0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient.full_tensor()


@ranks(2)
def test_a_saved_tensor_that_has_changed_is_an_error():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_of_a_changed_tensor(init_device_mesh("cpu", (2,)))


@ranks(2)
def test_inference_tensors_have_no_count():
    with torch.inference_mode():
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        torch._foreach_mul_([x], 2.0)
    assert x.full_tensor().sum() == 8


@ranks(2)
def test_stock_torch_does_not_count():
    mesh = init_device_mesh("cpu", (2,))
    x = torch.ones(3, 4, dtype=torch.float64)
    with disabled("operators"):
        backward_of_a_changed_tensor(mesh)
        assert gradient(distribute_tensor(x, mesh, [Replicate()]), VIEWS["a new dim"], WRITES["mul"]).max() < 3
    assert gradient(x, VIEWS["a new dim"], WRITES["mul"]).max() == 6
