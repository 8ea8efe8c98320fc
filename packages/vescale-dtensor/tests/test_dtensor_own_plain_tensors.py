"""Plain tensors that torch's own formulas and functions make are equal on all ranks and count as replicated.

A plain tensor of the program may differ between the ranks and stays refused: in forward, beside the same functions, and
in the backward of the program's own `autograd.Function`, and in gradient hooks.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

from vescale.dtensor import DTensor, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks


def twice(function):
    """Return a function that gives the gradient of the squared gradient of `function`."""

    def second(x):
        y = function(x).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return first.square().sum()

    return second


def causal_attention(x):
    torch.manual_seed(3)
    q = x.view(1, 1, 4, 6).repeat(2, 1, 1, 1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5)


FUNCTIONS = {
    "prod": lambda x: x.prod(1),
    "mvlgamma": lambda x: torch.mvlgamma(x + 3, 3),
    "quantile": lambda x: (x.quantile(0.3), x.quantile(0.3, 1), torch.nanquantile(x, 0.4, 0)),
    "masked mean": lambda x: (torch.masked.mean(x, 1), torch.masked.mean(x, 1, mask=x > 1), torch.masked.var(x, 0)),
    "combinations": lambda x: torch.combinations(x[0]),
    "powers": lambda x: [torch.vander(y, *n) for y in (x.detach()[0], x.detach()[:, 1]) for n in ((), (3, True), (1,))],
    "causal attention": causal_attention,
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
def test_gradients_of_a_redistributed_tensor(assert_equals_one_device):
    """The formula of copysign has plain zeros for the gradient of the sign."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def copy_sign(x):
        sign = x.redistribute(placements=[Shard(0)]).clone() if isinstance(x, DTensor) else x.clone()
        return x.copysign(sign)

    assert assert_equals_one_device(twice(copy_sign), operand(), mesh) == 4


@ranks(2)
def test_zeros_without_memory():
    """The gradient of a sign is zeros for which torch takes no memory, and a plain tensor beside DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.rand(4, 6), mesh, [Shard(0)]).requires_grad_()
    for _ in range(2):
        x.to_local().sgn().sum().backward()
    x.grad += x.sgn() + torch.sgn(x) + x.clone().sgn_()
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 6), 3.0))

    parameter = x.detach().clone().requires_grad_()
    parameter.sgn().sum().backward()
    assert isinstance(parameter.grad, DTensor)

    local = torch.rand(2, 6, requires_grad=True)
    y = DTensor.from_local(local, mesh, [Shard(0)])
    (first,) = torch.autograd.grad(y.abs().sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), y, retain_graph=True)
    assert torch.equal((second + 1).full_tensor(), torch.ones(4, 6))
    first.sum().backward()
    assert torch.equal(local.grad + 1, torch.ones(2, 6))


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


def ones():
    return torch.ones(4, 6, dtype=torch.float64)


class Plain(torch.autograd.Function):
    """Returns a plain gradient for a DTensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(ctx.shape, dtype=grad.dtype)


def hooked_tensor(x, hook):
    y = x * 2
    y.register_hook(hook)
    y.square().sum().backward()


def hooked_node(x, hook):
    y = x * 2
    y.grad_fn.register_prehook(lambda grads: (hook(grads[0]),))
    y.square().sum().backward()


def hooked_module(x, hook):
    module = torch.nn.Tanh()
    module.register_full_backward_hook(lambda _module, grads, _outputs: (hook(grads[0]),))
    (module(x * 2) * 3).sum().backward()


HOOKED = (hooked_tensor, hooked_node, hooked_module)


@ranks(2)
def test_plain_tensors_in_gradient_hooks_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for run in HOOKED:
        x = distribute_tensor(operand()[0].detach(), mesh, [Shard(1)]).requires_grad_()
        with pytest.raises(RuntimeError, match="got mixed"):
            run(x, lambda grad: grad * ones())
        run(x, lambda grad: grad * distribute_tensor(ones(), mesh, [Shard(1)]))
        assert x.grad.full_tensor().any()


@ranks(2)
def test_plain_gradients_from_hooks_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for run in (hooked_tensor, hooked_module):
        x = distribute_tensor(operand()[0].detach(), mesh, [Shard(1)]).requires_grad_()
        with pytest.raises(RuntimeError, match="expected a DTensor from the gradient hook"):
            run(x, lambda grad: ones().to(grad.dtype))
    with pytest.raises(RuntimeError, match="got mixed"):
        Plain.apply(x.tanh()).sum().backward()


@ranks(2)
def test_a_hook_may_allow_them():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def hook(grad):
        with implicit_replication():
            return grad * ones()

    for run in HOOKED:
        x = distribute_tensor(operand()[0].detach(), mesh, [Shard(1)]).requires_grad_()
        run(x * x.prod(1).sum(), hook)  # the formula of prod makes plain tensors after the hook
        with pytest.raises(RuntimeError, match="got mixed"):
            x + ones()


@ranks(2)
def test_a_checkpoint_repeats_what_the_program_allowed():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def forward(x):
        with implicit_replication():
            return (x * ones()).prod(1)

    for reentrant in (False, True):
        x = distribute_tensor(operand()[0].detach(), mesh, [Shard(1)]).requires_grad_()
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
        expected = operand()[0].detach().requires_grad_()
        expected.prod(1).sum().backward()
        assert (x.grad.full_tensor() - expected.grad).abs().max() < 1e-10
