"""Modules that select rows, named in `row_wise`, train in a pipeline whose other stages have none of them."""

import pytest
import torch
from torch import nn

import vescale
from vescale_testing import ranks


class Selects(nn.Module):
    """A layer for some of the rows, as an expert is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, self.linear(x[rows]))


class Layer(nn.Module):
    def __init__(self, *, selects):
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.selected = Selects() if selects else nn.Identity()

    def forward(self, x):
        return self.selected(self.dense(x).tanh())


class Net(nn.Module):
    """Of four layers, the last selects rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(selects=number == 3) for number in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build():
    torch.manual_seed(0)
    return Net().double()


def train(plan, row_wise):
    """Return the losses of three steps on the layout and on one process."""
    model, optimizer = vescale.parallelize(
        plan, build(), torch.optim.AdamW, loss_fn=nn.functional.mse_loss, row_wise=row_wise
    )
    plain = build()
    its_optimizer = torch.optim.AdamW(plain.parameters())
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses, expected = [], []
    for _ in range(3):
        loss = model(**model.local_batch({"x": x, "target": x.sin()})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.global_loss(loss).item())
        its_loss = nn.functional.mse_loss(plain(x), x.sin())
        its_loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        expected.append(its_loss.item())
    return losses, expected


@pytest.mark.parametrize("row_wise", [r".*\.selected", "layers.3.selected", "layers.3", r"layers\..*"])
@ranks(4)
def test_a_module_of_one_stage(row_wise):
    losses, expected = train(vescale.Plan(dp=2, pp=2, num_microbatches=2), [row_wise])
    assert losses == pytest.approx(expected, rel=1e-10)


@ranks(4)
def test_ranks_of_several_stages():
    plan = vescale.Plan(dp=2, pp=2, num_microbatches=2, schedule="zb_v")
    losses, expected = train(plan, [r".*\.selected"])
    assert losses == pytest.approx(expected, rel=1e-10)


@ranks(2)
def test_unnamed_it_is_refused():
    with pytest.raises(RuntimeError, match="expected that Net treats every row alone"):
        train(vescale.Plan(pp=2, num_microbatches=2), [])


@ranks(2)
def test_a_module_of_no_stage_is_refused_on_every_rank():
    with pytest.raises(ValueError, match=r"row_wise: expected names of modules of Net.* got 'layers.7', which matches"):
        train(vescale.Plan(pp=2, num_microbatches=2), ["layers.7"])
