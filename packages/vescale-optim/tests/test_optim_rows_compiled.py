"""What ``torch.compile`` has compiled and mixes rows is refused: compiled code knows the rows of this rank alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP
from vescale_testing import ranks


class Router(nn.Module):
    """A product of two means over rows, as in the loss that balances experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return (weights.mean(0) * (weights > 0.25).double().mean(0)).sum()


class PositionDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.ones(5, 6))

    def forward(self, x):
        return x[:, None] + torch.dropout(self.positions, 0.5, True)


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.up, self.part = nn.Linear(6, 6), part
        self.double()

    def forward(self, x):
        return self.part(self.up(x).tanh()).square().mean()


def whole(model):
    return torch.compile(model, backend="eager")


def part(model):
    model.part = torch.compile(model.part, backend="eager")
    return model


def calls(model):
    model.part.compile(backend="eager")
    return model


def neighbor(model):
    model.up = torch.compile(model.up, backend="eager")
    return model


def gradients(make, wrap=lambda model: model):
    """Return the gradients of one process, and those of this rank with its rows."""
    torch._dynamo.reset()
    found = []
    for is_whole in (True, False):
        torch.manual_seed(0)
        model, x = Net(make()), torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        if not is_whole:
            model, x = wrap(model), x.chunk(2)[dist.get_rank()]
        torch.manual_seed(1)
        model(x).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def ddp(compiled, **options):
    return lambda model: DDP(compiled(model), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), **options)


@pytest.mark.parametrize("compiled", [whole, part, calls, neighbor])
@ranks(2)
def test_what_mixes_rows_is_refused(compiled):
    for make in (Router, PositionDropout, lambda: nn.BatchNorm1d(6)):
        with pytest.raises(
            RuntimeError, match=r"torch\.compile has compiled .* rows are mixed, or drawn for, together"
        ):
            gradients(make, ddp(compiled))


def around(model):
    return torch.compile(ddp(lambda model: model)(model), backend="eager")


@ranks(2)
def test_what_mixes_rows_in_a_compiled_ddp_is_refused():
    for make in (Router, PositionDropout, lambda: nn.BatchNorm1d(6)):
        with pytest.raises(RuntimeError, match="because the DDP around it is compiled"):
            gradients(make, around)


@ranks(2)
def test_what_mixes_no_rows_in_a_compiled_ddp_is_that_of_one_device():
    for make in (nn.Tanh, lambda: nn.Dropout(0.5)):
        for expected, actual in zip(*gradients(make, around), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compiled", [whole, part, calls, neighbor])
@ranks(2)
def test_what_mixes_no_rows_is_that_of_one_device(compiled):
    for make in (nn.Tanh, lambda: nn.Dropout(0.5), lambda: nn.Linear(6, 3)):
        for expected, actual in zip(*gradients(make, ddp(compiled)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@ranks(2)
def test_ranks_that_are_worlds_of_their_own_differ():
    expected, actual = gradients(Router, ddp(whole, per_rank=True))
    assert max((a - e).abs().max() for a, e in zip(actual, expected, strict=True)) > 1e-6
