"""A loss outside of the module that ignores other numbers of targets on each rank is warned of, once it is seen."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vescale.dtensor import check_ranks
from vescale.optim import DDP
from vescale_testing import halved, ranks

IGNORED = -100


def words(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pixels(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets)


def scores(logits, targets):
    kept = targets != IGNORED
    return F.mse_loss(logits.sum(-1)[kept], targets[kept].to(logits.dtype))


def train(loss, num_ignored, *, steps=1, scale_of=lambda _: 1.0, **settings):
    """Return the warnings of some steps in which this rank ignores the first targets of its rows."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 5), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), **settings)
    targets = torch.arange(8).reshape(2, 4) % 5
    targets.view(-1)[:num_ignored] = IGNORED
    caught = _Caught()
    logging.getLogger("vescale.optim").addHandler(caught)
    try:
        for _ in range(steps):
            scale = scale_of(model)
            (loss(model(torch.randn(2, 4, 3)), targets) * scale).backward()
    finally:
        logging.getLogger("vescale.optim").removeHandler(caught)
    return caught.texts


class _Caught(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@halved
@pytest.mark.parametrize("loss", [words, pixels, scores])
@pytest.mark.parametrize("zero", [0, 2, 3])
@ranks(2)
def test_other_numbers_on_each_rank_are_warned_of(loss, zero):
    texts = train(loss, (1, 3)[dist.get_rank()], steps=3, zero=zero)
    if dist.get_rank():
        assert texts == []  # one rank says it for all
    else:
        assert len(texts) == 1
        assert texts[0].startswith("the outputs of Linear get no gradient at 1 places on one rank and at 3 on another")
        assert "multiply them by DDP.global_mean_scale(count), or compute the loss inside of the module" in texts[0]


@pytest.mark.parametrize("loss", [words, pixels, scores])
@ranks(2)
def test_equal_numbers_are_not(loss):
    assert train(loss, 2, steps=2) == []


@ranks(2)
def test_losses_that_are_scaled_are_not():
    num_ignored = (1, 3)[dist.get_rank()]
    assert train(words, num_ignored, scale_of=lambda model: model.global_mean_scale(8 - num_ignored)) == []


@ranks(2)
def test_ranks_that_are_worlds_of_their_own_are_not():
    assert train(words, (1, 3)[dist.get_rank()], per_rank=True) == []


@ranks(2)
def test_comparisons_that_are_switched_off():
    check_ranks(every=0)
    assert train(words, (1, 3)[dist.get_rank()]) == []


class Inside(nn.Module):
    """Returns its loss, and the logits that it is made of."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 5)

    def forward(self, x, targets):
        logits = self.lift(x)
        return words(logits, targets), logits


@ranks(2)
def test_a_loss_inside_of_the_module_is_that_of_one_device():
    caught = _Caught()
    logging.getLogger("vescale.optim").addHandler(caught)
    model = DDP(Inside(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    targets = torch.full((2, 4), 1)
    targets.view(-1)[: (1, 3)[dist.get_rank()]] = IGNORED
    model(torch.randn(2, 4, 3), targets)[0].backward()
    logging.getLogger("vescale.optim").removeHandler(caught)
    assert caught.texts == []
