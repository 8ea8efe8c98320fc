"""A rehearsal finds what mixes rows in one process, and how a loss adds up over rows."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale.dmodule.rows import Rehearsal
from vescale_testing import ranks, run_ranks

ROWS, WIDTH = 6, 4


class Model(nn.Module):
    """A linear layer and a loss."""

    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, WIDTH), loss
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x, target):
        return self.loss(self, self.linear(x), target)


def in_a_constant(_model, x, _target):
    """Collect rows in a tensor of zeros, and add means to a constant."""
    whole = torch.zeros(len(x), 2 * WIDTH)
    whole[:, :WIDTH], whole[:, WIDTH:] = x, x.square()
    total = torch.zeros(())
    total += whole.mean()
    return total + 0.5 - torch.ones(())


def selected(_model, x, target):
    """Select all rows in order, and take a path that a truth value of integers decides."""
    rows, columns = torch.arange(len(x))[:, None, None], torch.arange(WIDTH)
    x = x[rows, columns].squeeze(1)
    return (x if (target >= 0).all() else -x).mean()


def averaged(model, x, _target):
    """Keep a moving average of rows in a buffer."""
    model.seen.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x.mean()


def counted(model, x, _target):
    """Count calls in a buffer."""
    model.seen += 1
    return x.mean()


def experts(_model, x, _target):
    """Select rows by their values."""
    chosen = x.argmax(-1) == 0
    return x[chosen].sum()


class Doubled(torch.autograd.Function):
    """A linear backward that treats every row alone."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004 - autograd's signature
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return 2 * grad


class Centered(Doubled):
    """A backward that mixes rows."""

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad - grad.mean(0)


MEANS = {
    "own backward": lambda _, x, __: Doubled.apply(x).square().mean(),
    "mean": lambda _, x, __: x.square().mean(),
    "sum over the number of rows": lambda _, x, __: x.square().sum() / len(x),
    "cross entropy": lambda _, x, target: F.cross_entropy(x, target),
    "a constant": in_a_constant,
    "selection": selected,
    "several": lambda _, x, target: x.mean() + 0.1 * F.nll_loss(x.log_softmax(-1), target),
    "counts calls": counted,
}
SUMS = {
    "sum": lambda _, x, __: x.square().sum(),
    "sum over a given number": lambda _, x, target: F.cross_entropy(x, target, reduction="sum") / 24,
}
MIXERS = {
    "contrast": (lambda _, x, __: F.cross_entropy(x @ x.t(), torch.arange(len(x))), "matmul in the root module"),
    "centered": (lambda _, x, __: (x - x.mean(0)).square().mean(), "sub in the root module"),
    "root of a mean": (lambda _, x, __: x.square().mean().sqrt(), "sqrt in the root module"),
    "masked mean": (lambda _, x, t: (x.sum(-1) * (t > 0)).sum() / (t > 0).sum(), "div in the root module"),
    "router": (lambda _, x, __: (x.softmax(-1).mean(0) * x.sigmoid().mean(0)).sum(), "mul in the root module"),
    "count read": (lambda _, x, t: x.sum() / (t > 0).sum().item(), "item in the root module"),
    "mean times rows": (lambda _, x, __: x.square().mean() * len(x), "neither a mean nor a sum"),
    "sum and a constant": (lambda _, x, __: x.square().sum() + 1, "add in the root module"),
    "sum and a penalty": (lambda m, x, __: x.square().sum() + m.linear.weight.sum(), "add in the root module"),
    "row numbers": (lambda _, x, __: (x * torch.arange(len(x))[:, None]).mean(), "neither a mean nor a sum"),
    "moving average": (averaged, "a write of statistics of rows to buffer 'seen'"),
    "own backward": (
        lambda _, x, __: Centered.apply(x).square().mean(),
        "the backward of Centered (torch.autograd.Function) in the root module is not linear, or does not treat every",
    ),
    "selected by value": (experts, "__getitem__ in the root module"),
}


def rehearsed(loss, **options):
    torch.manual_seed(0)
    model = Model(loss)
    x, target = torch.randn(ROWS, WIDTH), torch.randint(0, WIDTH, (ROWS,))
    rehearsal = Rehearsal(model, device_type="cpu", **options)
    return rehearsal.run(lambda args, kwargs: model(*args, **kwargs), (x,), {"target": target})


@ranks(1)
def test_means_over_rows_are_clean():
    for name, loss in MEANS.items():
        found = rehearsed(loss)
        assert (found.is_clean, found.error, found.is_sum) == (True, None, False), name


@ranks(1)
def test_sums_over_rows_are_told_from_means():
    for name, loss in SUMS.items():
        found = rehearsed(loss)
        assert (found.is_clean, found.error, found.is_sum) == (True, None, True), name


@ranks(1)
def test_means_over_targets_are_listed():
    assert rehearsed(MEANS["cross entropy"]).counted == ("cross_entropy in the root module",)
    assert rehearsed(MEANS["several"]).counted == ("nll_loss in the root module",)
    assert rehearsed(MEANS["mean"]).counted == rehearsed(SUMS["sum over a given number"]).counted == ()


@ranks(1)
def test_buffers_that_a_call_writes_are_listed():
    assert rehearsed(counted).written == ("seen",)
    assert rehearsed(MEANS["mean"]).written == ()


def texts_of_mixers():
    found = {name: rehearsed(loss) for name, (loss, _) in MIXERS.items()}
    return {name: "; ".join((*each.mixing, each.doubt)) for name, each in found.items()}


@functools.cache
def texts():
    return run_ranks(texts_of_mixers, 1)[0]


@pytest.mark.parametrize("name", MIXERS)
def test_what_mixes_rows_is_named(name):
    assert MIXERS[name][1] in texts()[name]


class Sorting(nn.Module):
    """Treats every row alone, but sorts rows by a choice first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        order = (x[:, 0] > 0).long().argsort()
        back = order.argsort()
        return (x[order] * self.weight[(x[order][:, 0] > 0).long()])[back]


@ranks(1)
def test_row_wise_modules_run_on_their_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sorting())
    x = torch.randn(ROWS, WIDTH)
    call = lambda args, _: model(*args).mean()  # noqa: E731
    assert "argsort in module '1'" in Rehearsal(model, device_type="cpu").run(call, (x,), {}).mixing
    assert Rehearsal(model, device_type="cpu", row_wise=["1"]).run(call, (x,), {}).is_clean


@ranks(1)
def test_nothing_is_left_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, state = torch.randn(ROWS, WIDTH), torch.get_rng_state()
    found = Rehearsal(model, device_type="cpu").run(lambda args, _: model(*args).mean(), (x,), {})
    assert found.mixing[0] == "batch_norm in module '1'"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@ranks(1)
def test_an_error_of_the_module_is_its_own():
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ZeroDivisionError):
        Rehearsal(model, device_type="cpu").run(lambda *_: 1 / 0, (torch.ones(2, WIDTH),), {})
