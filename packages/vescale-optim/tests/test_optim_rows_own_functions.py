"""The program's own ``autograd.Function``: gradients are those of one device, or the function is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP
from vescale_testing import halved, run_ranks

ROWS, TOKENS, WIDTH = 4, 3, 6


class Own(torch.autograd.Function):
    """Copy; subclasses have other gradients."""

    @staticmethod
    def forward(ctx, x):
        ctx.num_rows = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004 - autograd's signature
        return grad


class Reverse(Own):
    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return -0.3 * grad


class InPlace(Own):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return 2 * grad


class Largest(Own):
    """Two results with gradients and one without."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, x.clone(), places

    @staticmethod
    def backward(ctx, of_values, of_x, _of_places):
        return of_x.scatter_add(-1, ctx.saved_tensors[0], of_values)


class Linear(Own):
    """The gradient of the weight is a sum over rows."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, 1)
        return grad @ weight, rows.T @ x.flatten(0, 1), rows.sum(0)


class Masked(Own):
    """Draw in forward."""

    @staticmethod
    def forward(ctx, x, rate):
        mask = (torch.rand_like(x) > rate) / (1 - rate)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Rounded(Own):
    """Weights in steps of their largest, with the gradients of what was not rounded."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        step = x.abs().max() / 7
        return (x / step).round() * step


class Fused(Own):
    """A mean over rows that computes its gradients in forward, as a fused cross entropy does."""

    @staticmethod
    def forward(ctx, logits, target):
        log = logits.log_softmax(-1)
        ctx.save_for_backward((log.exp() - F.one_hot(target, log.shape[-1])) / len(log))
        return -log.gather(1, target[:, None]).mean()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Summed(Fused):
    """The same as a sum."""

    @staticmethod
    def forward(ctx, logits, target):
        log = logits.log_softmax(-1)
        ctx.save_for_backward(log.exp() - F.one_hot(target, log.shape[-1]))
        return -log.gather(1, target[:, None]).sum()


class Centered(Own):
    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad - grad.mean(0)


class PerRow(Own):
    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.num_rows


class Normalized(Own):
    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad / grad.norm()


class Clipped(Own):
    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad.clamp(-1e-4, 1e-4)


class Noisy(Own):
    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad + torch.randn_like(grad)


class MeanWeight(Linear):
    """The gradient of the weight is a mean over this rank's rows."""

    @staticmethod
    def backward(ctx, grad):
        of_x, of_weight, of_bias = Linear.backward(ctx, grad)
        return of_x, of_weight / len(grad), of_bias


def fused(function):
    return lambda _, y: function.apply(y.flatten(0, 1), y.detach().flatten(0, 1).argmin(-1))


bound = Linear.apply  # as code keeps it
EQUAL = {
    "copy": (lambda _, x: Own.apply(x), None),
    "reversed gradients": (lambda _, x: Reverse.apply(x), None),
    "in place": (lambda _, x: x + InPlace.apply(x), None),
    "several results": (lambda _, x: sum(Largest.apply(x)[:2]), None),
    "parameters": (lambda net, x: bound(x, net.out.weight, net.out.bias), None),
    "draws": (lambda _, x: Masked.apply(x, 0.3), None),
    "weights": (lambda net, x: F.linear(x, Rounded.apply(net.out.weight)), None),
    "in a function that backward repeats": (
        lambda _, x: checkpoint(lambda x: Reverse.apply(x).tanh(), x, use_reentrant=False),
        None,
    ),
    "a mean over rows": (None, fused(Fused)),
    "a sum over rows": (None, fused(Summed)),
}
LINEAR = "(torch.autograd.Function) in the root module is not linear, or does not treat every row alone: gradients of"
REFUSED = {
    "mixes rows": (lambda _, x: Centered.apply(x), f"the backward of Centered {LINEAR}"),
    "reads the number of rows": (lambda _, x: PerRow.apply(x), f"the backward of PerRow {LINEAR}"),
    "normalizes": (lambda _, x: Normalized.apply(x), f"the backward of Normalized {LINEAR}"),
    "clips gradients of rows": (lambda _, x: Clipped.apply(x), f"the backward of Clipped {LINEAR}"),
    "clips gradients of weights": (
        lambda net, x: F.linear(x, Clipped.apply(net.out.weight)),
        f"the backward of Clipped {LINEAR}",
    ),
    "draws in backward": (
        lambda _, x: Noisy.apply(x),
        "Noisy (torch.autograd.Function) in the root module draws random numbers in backward",
    ),
    "a mean in the gradient of a weight": (
        lambda net, x: MeanWeight.apply(x, net.out.weight, net.out.bias),
        f"the backward of MeanWeight {LINEAR}",
    ),
}


class Net(nn.Module):
    """Statistics of all rows, if it has a norm."""

    def __init__(self, body, loss, *, norm):
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.body, self.loss = body or (lambda _, x: x), loss or (lambda _, y: y.square().mean())

    def forward(self, x):
        x = self.body(self, self.lift(x))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.loss(self, self.out(x))


def trained(model, module, x):
    """Return the gradients of two steps, the second with other values."""
    torch.manual_seed(1)
    for factor in (1, 2):
        model(factor * x).backward()
    return [p.grad for p in module.parameters()]


def difference(body, loss, norm, **settings):
    """Return the largest difference of a gradient from one device."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(ROWS * size, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = []
    for part in (slice(None), slice(ROWS * rank, ROWS * (rank + 1))):
        torch.manual_seed(0)
        module = model = Net(body, loss, norm=norm).double()
        if part.stop is not None:
            model = DDP(module, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), **settings)
        found.append(trained(model, module, x[part]))
    return max((one - other).abs().max().item() for one, other in zip(*found, strict=True))


def differences(cases, norm, **settings):
    return {name: difference(*case, norm, **settings) for name, case in cases.items()}


@halved
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("norm", [False, True])
def test_gradients_are_those_of_one_device(norm, size):
    for found in run_ranks(differences, size, EQUAL, norm, timeout=120):
        assert max(found.values()) < 1e-10, found


def test_ranks_that_are_worlds_of_their_own_differ():
    cases = {name: (body, None) for name, (body, _) in REFUSED.items()}
    for found in run_ranks(differences, 2, cases, False, per_rank=True):
        assert min(found.values()) > 1e-7, found


def texts(norm):
    found = {}
    for name, (body, _) in REFUSED.items():
        model = DDP(Net(body, None, norm=norm), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        with pytest.raises(RuntimeError) as error:
            model(torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())))
        found[name] = str(error.value)
    return found


@pytest.mark.parametrize("norm", [False, True])
def test_what_differs_is_refused(norm):
    for found in run_ranks(texts, 2, norm):
        for name, (_, text) in REFUSED.items():
            assert text in found[name]
            assert "pass per_rank=True to DDP" in found[name]
