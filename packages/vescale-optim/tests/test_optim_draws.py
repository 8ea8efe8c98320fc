"""Only modules that draw are watched for random operators, and all draw their part of what one device draws."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale.dtensor import extension
from vescale.optim import DDP
from vescale_testing import ranks

SHARED = torch.Generator()


class Part(nn.Module):
    """A module that notes, for each call, whether it is watched, and whether it is in training."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.rate = 0.5
        self.calls = []

    def forward(self, x):
        self.calls.append((extension.is_watched(), self.training))
        return self.body(self, x)


def own_generator(part, x):
    return x + torch.rand(x.shape, generator=part.generator, dtype=x.dtype)


def attention(part, x):
    heads = x.view(len(x), 1, 2, 3)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=part.rate).reshape(x.shape)


#: Ways to draw, or not to.
BODIES = {
    "nothing": lambda _, x: torch.tanh(x),
    "dropout": lambda part, x: F.dropout(x, part.rate, part.training),
    "attention": attention,
    "noise": lambda _, x: x + torch.randn_like(x),
    "generator of the module": own_generator,
    "generator of the program": lambda _, x: x + torch.rand(x.shape, generator=SHARED, dtype=x.dtype),
    "attention without dropout": lambda _, x: attention(Silent, x),
}


class Silent:
    rate = 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(6, 6)
        self.parts = nn.ModuleDict({name: Part(body) for name, body in BODIES.items()})
        self.parts["generator of the module"].generator = torch.Generator().manual_seed(3)
        self.drop = nn.Dropout(0.0)  # raised later
        self.later = Part(BODIES["dropout"])
        self.uses_later = False
        self.recomputes = False

    def forward(self, x):
        x = self.lift(x)
        for part in self.parts.values():
            x = checkpoint(part, x, use_reentrant=False) if self.recomputes else part(x)
        return self.drop(self.later(x) if self.uses_later else x)


def build():
    torch.manual_seed(0)
    return Net().double()


def rows(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def assert_close(actual, expected):
    """Allow the rounding of products, which some processors compute otherwise for fewer rows; a mask is no rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def part_of(x):
    return x.chunk(2)[dist.get_rank()]


#: What changes before each call of the net.
CHANGES = (
    lambda _: None,
    lambda _: None,
    lambda net: net.eval(),
    lambda net: net.train(),
    lambda net: setattr(net, "uses_later", True),
    lambda net: setattr(net.drop, "p", 0.3),
    lambda net: setattr(net, "recomputes", True),
    lambda net: net.eval(),
)


def history(call, net, take=lambda x: x):
    """Return the outputs and the gradients of several calls, and where the random streams are after each."""
    SHARED.manual_seed(5)
    torch.manual_seed(7)
    found = []
    for step, change in enumerate(CHANGES):
        change(net)
        out = call(take(rows(step)))
        net.zero_grad()
        out.sum().backward()
        found.append((out.detach(), net.lift.weight.grad.clone(), torch.get_rng_state(), SHARED.get_state()))
    return found


def compare(net, model):
    reference = build()
    expected = history(reference, reference)
    for (out, grad, *states), (whole, whole_grad, *whole_states) in zip(
        history(model, net, part_of), expected, strict=True
    ):
        assert_close(out, part_of(whole))
        assert_close(2 * grad, whole_grad)
        assert all(map(torch.equal, states, whole_states))


@ranks(2)
def test_every_call_draws_its_part():
    net = build()
    compare(net, DDP(net, mesh()["dp"]))


@ranks(2)
def test_modules_are_watched_in_their_first_call_and_then_if_they_draw():
    net = build()
    compare(net, DDP(net, mesh()["dp"]))
    quiet = {"nothing", "attention without dropout"}
    for name, part in net.parts.items():
        training = [watched for watched, is_training in part.calls if is_training]
        evaluation = [watched for watched, is_training in part.calls if not is_training]
        for watched, draws in ((training, name not in quiet), (evaluation, name not in quiet | {"dropout"})):
            assert watched[0] or training is watched, name  # a recording may have been the first call in training
            assert set(watched[1:]) == {draws}, name
    assert net.later.calls[0] == (True, True)


@ranks(2)
def test_masks_of_modules_that_nobody_watches_are_seen(fault):
    patch = pytest.MonkeyPatch()
    fault(patch, "whether a module draws", lambda _draws: lambda *_: False)
    fault(patch, "the check for draws that were not watched", lambda _check: lambda *_: None)
    net = build()
    with pytest.raises(RuntimeError, match="drew random numbers that were not drawn when its call was recorded"):
        compare(net, DDP(net, mesh()["dp"]))


# ------------------------------------------------------------------------------------------------- surprises


def trained_at_rate_0(**settings):
    model = DDP(nn.Sequential(nn.Linear(6, 6), Part(BODIES["dropout"])).double(), mesh()["dp"], **settings)
    model.module[1].rate = 0.0
    model(part_of(rows(0)))
    model.module[1].rate = 0.5
    return model


@ranks(2)
def test_a_module_that_draws_after_all_is_an_error():
    model = trained_at_rate_0()
    text = r"^the module \(Sequential\), or a module in it, drew random numbers.* as in its first call in training\. "
    text += r".* rank \d drew as if .*"
    with pytest.raises(RuntimeError, match=text + r"A rate that was 0\?.* Pass watch_draws=True to DDP"):
        model(part_of(rows(1)))
    with pytest.raises(RuntimeError, match=r"^'1', or a module in it, drew"):
        model.module[1](part_of(rows(1)))
    model.module[1].rate = 0.0
    model(part_of(rows(1)))


@ranks(2)
def test_an_error_names_it_before_the_next_module_that_is_watched():
    model = DDP(nn.Sequential(nn.Linear(6, 6), Part(BODIES["dropout"]), nn.Dropout(0.5)).double(), mesh()["dp"])
    model.module[1].rate = 0.0
    model(part_of(rows(0)))
    model.module[1].rate = 0.5
    with pytest.raises(RuntimeError, match="drew random numbers"):
        model(part_of(rows(1)))
    model.module[1].rate = 0.0
    assert model(part_of(rows(1))).shape == (4, 6)


@ranks(2)
def test_watching_every_call():
    model = trained_at_rate_0(watch_draws=True)
    torch.manual_seed(1)
    hidden = model.module[0](rows(1))
    expected = F.dropout(hidden, 0.5)
    torch.manual_seed(1)
    assert_close(model(part_of(rows(1))), part_of(expected))
    assert model.module[1].calls == [(True, True)] * 2


@ranks(2)
def test_a_first_call_that_fails_tells_nothing():
    def fail_once(part, x):
        if len(part.calls) == 1:
            raise ValueError("the first call")
        return F.dropout(x, 0.5)

    model = DDP(nn.Sequential(nn.Linear(6, 6), Part(fail_once)).double(), mesh()["dp"])
    with pytest.raises(ValueError, match="the first call"):
        model(part_of(rows(0)))
    assert not extension.is_watched()
    for _ in range(2):
        torch.manual_seed(1)
        expected = F.dropout(model.module[0](rows(0)), 0.5)
        torch.manual_seed(1)
        assert_close(model(part_of(rows(0))), part_of(expected))
