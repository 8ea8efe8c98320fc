"""What a forward sees of gradients, and does to them in backward, is that of one device, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP
from vescale_testing import RankFailure, halved, run_ranks

ROWS, WIDTH = 4, 6


class Net(nn.Module):
    """Statistics of all rows, if it has a norm."""

    def __init__(self, *, norm):
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.lift(x)
        self.hook(x)
        return self.out(self.norm(x + self.shift).tanh()).square().mean()

    def hook(self, x):
        pass


class Forces(Net):
    """The gradient of each row's energy by its positions."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = self.out(self.norm(self.lift(x)).tanh()).sum(-1)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + (forces.norm(dim=-1) - 1).square().mean()


class MeanForces(Net):
    """The gradient of a mean over rows, which is smaller for more rows."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = self.out(self.lift(x).tanh()).mean()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + (forces.norm(dim=-1) - 1).square().mean()


class Reversed(Net):
    """Hooks of what rows have, of what all rows have in common, and one that only looks."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def hook(self, x):
        x.register_hook(lambda grad: -grad * torch.arange(WIDTH))
        x.register_hook(lambda grad: self.seen.append(grad.shape))
        (2 * self.shift).register_hook(lambda grad: grad / 2)


class Noisy(Net):
    def hook(self, x):
        x.register_hook(lambda grad: grad + torch.randn_like(grad))


class Centered(Net):
    def hook(self, x):
        x.register_hook(lambda grad: grad - grad.mean(0))


class Clipped(Net):
    """Gradients of one device are smaller, since it takes the mean over more rows."""

    def hook(self, x):
        x.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))


class PerRow(Net):
    """It reads the number of rows."""

    def hook(self, x):
        x.register_hook(lambda grad: grad / grad.shape[0])


class ClippedInCommon(Net):
    """Each rank clips its summand."""

    def forward(self, x):
        shift = 2 * self.shift
        shift.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return self.out((self.lift(x) + shift).tanh()).square().mean()


def trained(model, module, x):
    loss = model(x)
    loss.backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def difference(kind, norm, **settings):
    """Return the largest difference of a gradient from one device."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS * size, WIDTH, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    whole = kind(norm=norm).double()
    torch.manual_seed(0)
    part = kind(norm=norm).double()
    expected = trained(whole, whole, x)
    model = DDP(part, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), **settings)
    actual = trained(model, part, x[ROWS * rank : ROWS * (rank + 1)])
    if isinstance(part, Reversed):
        assert part.seen == [(ROWS, WIDTH)], "the recording leaves no trace"
    return max((one - other).abs().max().item() for one, other in zip(actual, expected, strict=True))


@halved
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", [Forces, Reversed])
def test_gradients_are_those_of_one_device(kind, norm, size):
    assert max(run_ranks(difference, size, kind, norm)) < 1e-10


@pytest.mark.parametrize("kind", [MeanForces, Noisy, Centered, Clipped, PerRow])
def test_ranks_that_are_worlds_of_their_own_differ(kind):
    assert max(run_ranks(difference, 2, kind, False, per_rank=True)) > 1e-6


def refused(kind, norm):
    model = DDP(kind(norm=norm), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(RuntimeError) as error:
        model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())))
    return str(error.value)


HOOK = "a hook of a gradient (register_hook) in the root module"
NO_SUCH_HOOK = f"{HOOK} is not linear, or does not treat every row alone: gradients of this rank are parts and"


@pytest.mark.parametrize(
    "kind, text",
    [
        (MeanForces, "output 0 is another one on the rows of one rank"),
        (Noisy, f"{HOOK} draws random numbers in backward"),
        (
            Centered,
            "a hook of a gradient (register_hook) in the root module is not linear, or does not treat every row",
        ),
        (Clipped, NO_SUCH_HOOK),
        (PerRow, NO_SUCH_HOOK),
        (ClippedInCommon, NO_SUCH_HOOK),
    ],
)
def test_what_differs_is_refused(kind, text):
    for error in run_ranks(refused, 2, kind, False):
        assert text in error
        assert "pass per_rank=True to DDP" in error


def gradients_of_gradients(norm):
    torch.manual_seed(0)
    module = Net(norm=norm)
    model = DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())))
    grads = torch.autograd.grad(loss, list(module.norm.parameters()), create_graph=True)
    return [grad.shape for grad in grads]


def test_gradients_of_gradients_of_what_all_ranks_have_are_refused():
    error = r"each rank has a part, got one of shape \(6,\), which all ranks have, used by an operator on DTensors"
    with pytest.raises(RankFailure, match=error):
        run_ranks(gradients_of_gradients, 2, True)
