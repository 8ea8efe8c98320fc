"""What cannot run on the rows of all ranks is refused before a wrong value, with the way out, and nothing hangs."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vescale.optim import DDP
from vescale_testing import halved, ranks

WAY_OUT = "if results need not be those of one device, pass per_rank=True to DDP: then every rank is a world of its own"


class Net(nn.Module):
    """Runs a function behind a layer."""

    def __init__(self, function):
        super().__init__()
        self.lift = nn.Linear(4, 4)
        self.function = function
        self.rate = 0.0

    def forward(self, x, *others):
        return self.function(self, self.lift(x), *others)


def wrapped(function, **settings):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(Net(function), mesh, **settings)


def last(value, other):
    """Return `other` on the last rank, `value` on all others."""
    return other if dist.get_rank() == dist.get_world_size() - 1 else value


def through_numpy(_, x):
    return x * torch.from_numpy(x.detach().numpy())


def first_row_changes(_, x):
    x[0].mul_(2)
    return x


def python_draws(_, x):
    return x * random.random()


def numpy_draws(_, x):
    return x * np.random.rand()


@halved
@pytest.mark.parametrize(
    "function, reason",
    [
        (through_numpy, r"RuntimeError: .*numpy"),
        (first_row_changes, r"RuntimeError: output 0 is another one on the rows of one rank: it differs by up to \d"),
        (
            python_draws,
            "RuntimeError: its forward draws from random, so every rank uses numbers of its own for its rows",
        ),
        (numpy_draws, "RuntimeError: its forward draws from numpy.random"),
    ],
)
@pytest.mark.parametrize("zero", [0, 3])
@ranks(2)
def test_a_module_that_runs_on_plain_tensors_alone(zero, function, reason):
    text = rf"expected that Net can run on the rows of all ranks, as one device does, but it cannot: .*{WAY_OUT}"
    model = wrapped(function, zero=zero)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text) as caught:
            model(torch.ones(2, 4))
    if dist.get_rank() == 0:
        caught.match(reason)
    model = wrapped(function, zero=zero, per_rank=True)
    model(torch.ones(2, 4)).sum().backward()


@ranks(3)
def test_calls_that_differ():
    rows = (
        r"^the number of rows \(dim 0 of the first input\) of the module given to DDP must be equal on all ranks: "
        r"expected 2 as on ranks 0, 1, got 3 on rank 2; give all ranks the same number of rows .*global_mean_scale"
    )
    shapes = rf"^the call of the module given to DDP must be equal on all ranks: .*; call the module .*; {WAY_OUT}"
    values = (
        r"^the values of arguments \[0\] \[1\] must be equal on all ranks: expected values with checksum .*; a tensor "
        "whose dim 0 is not that of the rows belongs to all rows, so all ranks must pass the same one"
    )
    model = wrapped(lambda _, x, *__: x)
    for arguments, text in (
        ((torch.ones(last(2, 3), 4),), rows),
        ((torch.ones(2, 4), last(False, True)), shapes),
        ((torch.ones(2, 4), torch.ones(5).add(last(0, 1))), values),
    ):
        with pytest.raises(ValueError, match=text):
            model(*arguments)
    model(torch.ones(2, 4), torch.ones(5)).sum().backward()


@ranks(2)
def test_code_that_differs():
    model = wrapped(lambda _, x: x.tanh() if dist.get_rank() else x)
    with pytest.raises(ValueError, match=r"sequence of torch functions in a call must be equal .* run the same code"):
        model(torch.ones(2, 4))
    model = wrapped(lambda _, x: x.tanh() if dist.get_rank() else x, per_rank=True)
    model(torch.ones(2, 4)).sum().backward()


@ranks(2)
def test_an_error_of_the_module_stays_its_own():
    def fail(module, _x):
        module.seen = True
        raise ValueError("of the module")

    model = wrapped(fail)
    with pytest.raises(ValueError, match=r"^of the module$"):
        model(torch.ones(2, 4))
    assert model.seen


@ranks(2)
def test_an_error_on_the_rows_of_one_rank():
    def fail(_, x):
        if (x < 0).any():
            raise ValueError("of the module")
        return x

    model = wrapped(fail)
    rows = last(0.0, -1.0) + torch.zeros(2, 4)
    model.module.lift = nn.Identity()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        model(rows)
    texts = [None, None]
    dist.all_gather_object(texts, str(caught.value))
    assert texts[1] == "of the module"
    assert texts[0].startswith("expected that Net can run on the rows of all ranks, as one device does, but it cannot")


@ranks(2)
def test_a_draw_that_was_not_recorded():
    """A module that mixes rows has random operators at recorded places."""

    def norm_and_dropout(module, x):
        return F.dropout(F.batch_norm(x, None, None, training=True), module.rate)

    model = wrapped(norm_and_dropout)
    model(torch.ones(2, 4)).sum().backward()  # equal rows do not hide that the module mixes them
    assert len(model.islands()) == 1
    model.module.rate = 0.5
    with pytest.raises(
        RuntimeError, match=rf"drew random numbers that were not drawn when its call was recorded.*{WAY_OUT}"
    ):
        model(torch.randn(2, 4))
    model.module.rate = 0.0
    model(torch.randn(2, 4)).sum().backward()


@ranks(2)
def test_uneven_rows_of_a_module_that_mixes_them():
    model = wrapped(lambda _, x: F.batch_norm(x, None, None, training=True))
    model(torch.randn(3, 4)).sum().backward()
    scale = model.global_mean_scale(last(3, 2))
    with pytest.raises(
        RuntimeError, match=r"expected the same number of rows on all ranks, since Net mixes rows.*2 to 3"
    ):
        model(torch.randn(last(3, 2), 4))
    (model(torch.randn(3, 4)).sum() * scale).backward()


@ranks(2)
def test_statistics_of_a_local_batch():
    """Compiled code is not recorded."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[0].compile(backend="eager")
    model = DDP(module, mesh)
    with pytest.raises(
        RuntimeError, match=r"torch.compile has compiled module '0'.*batch_norm on .* in module '1'.*per_rank"
    ):
        model(torch.ones(4, 3))
    model.eval()(torch.ones(4, 3))
