"""What a forward leaves in attributes of its module is what one device leaves there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP
from vescale_testing import RankFailure, halved, run_ranks

ROWS, WIDTH, STEPS = 4, 6, 3


class Average(nn.Module):
    """A buffer that each call replaces, with a mean over rows in it; the next call reads it."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.lift(x)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return (x - self.average).square().mean()


class Plain(Average):
    """An attribute that is no buffer, of a part, and a sum."""

    def __init__(self):
        super().__init__()
        del self.average
        self.lift.total = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x):
        x = self.lift(x)
        self.lift.total = self.lift.total + x.detach().sum(0)
        return (x - 0.1 * self.lift.total.tanh()).square().mean()


class Metric(Average):
    """A number that the program logs."""

    def forward(self, x):
        x = self.lift(x)
        self.average = x.detach().abs().mean()
        return x.square().mean()


class Extreme(Average):
    def forward(self, x):
        x = self.lift(x)
        self.average = torch.maximum(self.average, x.detach().amax(0))
        return (x / (1 + self.average.abs())).square().mean()


class OwnLoss(Average):
    """A second loss, which the program adds."""

    adds = True

    def forward(self, x):
        x = self.lift(x)
        self.extra = self.of(x)
        return x.square().mean()

    def of(self, x):
        return x.mean(0).square().sum()


class SummedLoss(OwnLoss):
    def of(self, x):
        return x.square().sum()


class LastRows(Average):
    """This rank's rows, for the next call."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        x = self.lift(x)
        before, self.last = self.last, x.detach()
        return (x if before is None else x + 0.5 * before).square().mean()


class CountedRows(Average):
    """A number of rows that goes into a buffer alone."""

    def forward(self, x):
        self.average += x.shape[0]
        return self.lift(x).square().mean()


class Iterated(nn.Module):
    """A parametrization that changes state at each access to the weight."""

    def __init__(self):
        super().__init__()
        self.lift = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.lift(x).square().mean()


KINDS = (Average, Plain, Metric, Extreme, OwnLoss, SummedLoss, LastRows, CountedRows, Iterated)


def trained(model, module, batches, rows):
    """Return the parameters, and what the calls have left in buffers and attributes, by name."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x in batches:
        loss = model(x[rows])
        (loss + module.extra if hasattr(module, "adds") else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    left = dict(module.named_buffers())
    for part in module.modules():
        left |= {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    left.pop("extra", None)  # a loss is this rank's
    return {name: p.detach() for name, p in module.named_parameters()}, left


def differences(kind, **settings):
    """Return the largest differences of parameters, and of what is left, from one device."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = STEPS, ROWS * size, WIDTH
    batches = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rows = slice(ROWS * rank, ROWS * (rank + 1))
    torch.manual_seed(0)
    whole = kind().double()
    torch.manual_seed(0)
    part = kind().double()
    expected = trained(whole, whole, batches, slice(None))
    model = DDP(part, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), **settings)
    actual = trained(model, part, batches, rows)
    if "last" in expected[1]:
        expected[1]["last"] = expected[1]["last"][rows]
    return [_largest(*pair) for pair in zip(actual, expected, strict=True)]


def _largest(actual, expected):
    assert actual.keys() == expected.keys()
    return max(((actual[name] - expected[name]).abs().max().item() for name in expected), default=0.0)


@halved
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_one_device(kind, size):
    for found in run_ranks(differences, size, kind):
        assert max(found) < 1e-10, found


@pytest.mark.parametrize("kind", [Average, Plain, Metric, Extreme, OwnLoss, SummedLoss, CountedRows])
def test_ranks_that_are_worlds_of_their_own_differ(kind):
    for found in run_ranks(differences, 2, kind, per_rank=True):
        assert max(found) > 1e-4, found


class HiddenOffset(nn.Module):
    """Statistics of rows move with an offset that the normalized rows do not show.

    The offset is the gradient of a mean, which is another one for other numbers of rows.
    """

    def __init__(self):
        super().__init__()
        self.lift, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.lift(x)
        rows = x.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(rows.tanh().mean(), rows)
        return self.norm(x + gradient.abs().mean()).square().mean()


def test_what_results_do_not_show_is_compared():
    with pytest.raises(RankFailure) as failure:
        run_ranks(differences, 2, HiddenOffset)
    for error in failure.value.exceptions.values():
        assert isinstance(error, RuntimeError)
        assert "attribute 'norm.running_mean' is another one on the rows of one rank" in str(error)


class Logged(Average):
    """Means of losses, which a program adds, and sums of them, in a list."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x):
        x = self.lift(x)
        self.losses.append(self.of(x))
        return x.square().mean()

    def of(self, x):
        return x.square().sum()


class LoggedMean(Logged):
    def of(self, x):
        return x.square().mean()


class Chunked(Average):
    """Code that leaves a tensor for many rows, and none for few."""

    def forward(self, x):
        if x.shape[0] > ROWS:
            self.average = x.detach().mean(0)
        return self.lift(x).square().mean()


def refused(kind):
    model = DDP(kind(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(RuntimeError) as error:
        model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())))
    return str(error.value)


@pytest.mark.parametrize(
    "kind, text",
    [
        (Chunked, "it returns 1 tensors and leaves others in average for the rows of all ranks, but 1 tensors"),
        (
            Logged,
            "it leaves values in 'losses', a list, of which each rank has a summand; return them, or leave each in",
        ),
    ],
)
def test_what_has_no_value_of_all_rows_is_refused(kind, text):
    for error in run_ranks(refused, 2, kind):
        assert text in error
        assert "pass per_rank=True to DDP" in error


def kept():
    model = DDP(LoggedMean(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return [model(x).item() for _ in range(2)], [loss.item() for loss in model.module.losses]


def test_means_in_a_list_are_those_of_this_rank_like_the_loss():
    for returned, in_list in run_ranks(kept, 2):
        assert returned == in_list
