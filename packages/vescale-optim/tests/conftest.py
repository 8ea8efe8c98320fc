"""The problem that most tests train: small, uneven, with everything that a flat layout can get wrong."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.optim import DDP
from vescale.optim._gradients.bucket import FlatBucket
from vescale.optim._parameters.gathers import BucketGather
from vescale_testing import TrainingRecord, ask_again, begin_late


class Net(nn.Module):
    """Layers of odd sizes, a tied weight, a frozen layer and a parameter without dims."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 7)
        self.narrow = nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.tied(self.narrow(self.frozen(hidden))) * self.scale


@dataclass(frozen=True)
class Problem:
    """A regression in float64 on batches of 12 rows, which 1, 2, 3 and 4 ranks divide evenly."""

    steps: int = 3
    accumulation: int = 1

    def model(self):
        torch.manual_seed(1)
        return Net().double()

    def batch(self, index, *, coord=0, size=1):
        """Return rows of coord's part of batch `index`."""
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(12, 7, generator=generator, dtype=torch.float64)
        return x.chunk(size)[coord], y.chunk(size)[coord]

    def train(self, model, optimizer, *, coord=0, size=1, before_step=lambda: None, no_sync=True):
        """Train and return what is left; `before_step` may return a gradient norm."""
        losses, norms = [], []
        for step in range(self.steps):
            for micro in range(self.accumulation):
                x, y = self.batch(10 * step + micro, coord=coord, size=size)
                loss = ((model(x) - y) ** 2).mean() / self.accumulation
                local = no_sync and isinstance(model, DDP) and micro < self.accumulation - 1
                with model.no_sync() if local else contextlib.nullcontext():
                    loss.backward()
            losses.append(_mean(loss, size))
            norm = before_step()
            optimizer.step()
            norm = getattr(optimizer, "grad_norm", None) if norm is None else norm
            norms += [] if norm is None else [norm]
            optimizer.zero_grad()
        with model.unsharded() if isinstance(model, DDP) else contextlib.nullcontext():
            return TrainingRecord.collect(getattr(model, "module", model), optimizer, losses=losses, grad_norms=norms)

    def one_process(self, optimizer_class, *, clip=None, **kwargs):
        """Train in this process alone, with torch's own optimizer and clipping."""
        model = self.model()
        optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], **kwargs)

        def before_step():
            return None if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip)

        return self.train(model, optimizer, before_step=before_step)


def _mean(loss, size):
    loss = loss.detach().clone()
    if size > 1:
        dist.all_reduce(loss)
    return loss / size


@pytest.fixture
def problem():
    return Problem()


@pytest.fixture
def accumulating_problem():
    return Problem(accumulation=3)


@pytest.fixture(autouse=True)
def settled_sharing(monkeypatch):
    """Ignore the thread of gloo that holds the memory of the last gather a moment longer."""
    ask_again(monkeypatch, BucketGather, "is_shared")


@pytest.fixture
def late_gathers():
    """Return what lets gathers begin late, given a monkeypatch; all ranks must wait for buckets in the same order."""

    def install(patch):
        begin_late(patch, FlatBucket, "gather_values")
        # Outside of an optimizer's step its tensors over a bucket would count as those of strangers.
        patch.setattr(BucketGather, "is_shared", lambda _values, _num_views: False)

    return install


class Deliver(torch.autograd.Function):
    """As a pipeline engine does: a loss whose backward hands out gradients that were computed before."""

    @staticmethod
    def forward(ctx, loss, grads, *_params):
        ctx.grads = grads
        return loss

    @staticmethod
    def backward(ctx, grad):
        return None, None, *[None if g is None else g * grad for g in ctx.grads]


@pytest.fixture
def deliver():
    """`deliver(loss, grads, *params)` gives a loss whose backward hands these gradients to the parameters."""
    return Deliver.apply
