"""Modules that select rows, as experts do, run on each rank's rows, and what mixes rows around them on those of all."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vescale.optim import DDP
from vescale_testing import ranks

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    """Each runs on the rows that chose it; one that no row has chosen does not run."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.keeps_order = True

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in F.one_hot(chosen, EXPERTS).sum(0).nonzero().flatten():
            rows = torch.where(chosen == expert)[0]
            out.index_add_(0, rows, self.each[expert](x[rows]) * weights[rows])
        return out if self.keeps_order else out - out.mean(0)


class Mixture(nn.Module):
    """A loss of the router mixes rows with the same functions that the experts call."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.rate = nn.Linear(WIDTH, EXPERTS), Experts(), 0.0

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        mean = self.gate(x).softmax(-1).mean(0)
        shares = F.one_hot(chosen.flatten(), EXPERTS).to(x.dtype).mean(0)
        return F.dropout(self.experts(x, chosen.flatten(), weights), self.rate), (mean * shares).sum()


def build():
    torch.manual_seed(0)
    return Mixture().double()


def wrapped(module, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(module, mesh, row_wise=[r".*experts"], **settings)


def train(model, rows=slice(None)):
    """Return the losses of steps and the parameters."""
    generator, optimizer = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(4):
        x = torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)
        out, loss = model(x[rows])
        loss = loss + out.square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([*losses, *(p.detach().norm() for p in model.parameters())])


@ranks(3)
def test_experts_of_chosen_rows():
    expected, first = train(build()), 4 * dist.get_rank()
    model = wrapped(build())
    found = train(model, slice(first, first + 4))
    dist.all_reduce(found[:4])
    found[:4] /= 3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert model.islands()
    assert not any("experts" in island for island in model.islands())


@ranks(2)
def test_without_the_name_they_run_on_the_rows_of_all_ranks_and_a_warning_tells_it():
    told = []
    handler = logging.Handler()
    handler.setLevel(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("vescale.dmodule").addHandler(handler)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(400, WIDTH, dtype=torch.float64)
    wrapped(build())(x)
    assert told == []
    model = DDP(build(), mesh)
    model(x)
    assert any("experts" in island for island in model.islands())
    (text,) = told
    assert text.startswith("DDP runs operators of Mixture on the rows of all ranks, which communicates ")
    assert text.endswith("name modules that treat every row alone, such as experts, in DDP(..., row_wise=[...])")


@ranks(2)
def test_one_that_mixes_rows_is_refused():
    model = wrapped(build())
    model.module.experts.keeps_order = False
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"expected that Mixture can run on the rows of all ranks.*output 0"):
        model(x)
    model.module.experts.keeps_order = True
    model(x)[1].backward()


@ranks(2)
def test_one_that_draws_is_refused():
    module = build()
    module.experts.each = nn.ModuleList(nn.Dropout(0.5) for _ in range(EXPERTS))
    with pytest.raises(RuntimeError, match=r"module 'experts' is named in row_wise, but draws random numbers"):
        wrapped(module)(torch.ones(4, WIDTH, dtype=torch.float64).cumsum(0) - 2)


@ranks(1)
def test_names_of_no_module():
    with pytest.raises(ValueError, match=r"^row_wise: '.*experts' matches no module of Linear; near names: \[\]$"):
        wrapped(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"^row_wise must be a list of module names or regular expressions, got 'gate'$"
    ):
        DDP(build(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), row_wise="gate")


@ranks(2)
def test_settings_that_differ_between_ranks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="per_rank="):
        DDP(build(), mesh, per_rank=dist.get_rank() == 0)
