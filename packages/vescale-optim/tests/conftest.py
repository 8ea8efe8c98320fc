"""The problem that most tests train, small and uneven; and all that tests share to break, set or watch the package."""

import contextlib
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor.extension import Failures
from vescale.optim import DDP, _torch
from vescale.optim._forward import local_batch
from vescale.optim._gradients import early, reducer, reduction
from vescale.optim._gradients.bucket import FlatBucket, FlatSlot
from vescale.optim._muon.newton_schulz import NewtonSchulz
from vescale.optim._parameters.gathers import BucketGather
from vescale.optim._parameters.guard import Guard
from vescale.optim._parameters.offload import HostMemory
from vescale.optim._parameters.sharded_values import ShardedValues
from vescale.optim._parameters.units import Unit
from vescale.optim._ranks import axis
from vescale.optim._ranks.span import Span
from vescale.optim._state import state_dtype
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


# ------------------------------------------------------------------------------------------------- faults

#: Where tests break the package, to see that what they compare can differ. Only this table knows the code.
PLACES = {
    "a bucket stores its mean": (FlatBucket, "store"),
    "the mean of a step is kept": (early._Sum, "store"),
    "a slot is made ready for a reduction": (FlatSlot, "settle"),
    "the mean of a sum": (reduction, "average_"),
    "a bucket gathers parameters": (FlatBucket, "gather_values"),
    "a guard closes": (Guard, "close"),
    "a unit is freed": (Unit, "free"),
    "the parameters of a unit have come": (ShardedValues, "finish"),
    "a shard is copied to the device": (HostMemory, "bring"),
    "a gradient is copied to the host": (HostMemory, "keep"),
    "the host waits for copies of gradients": (HostMemory, "wait_before_reading"),
    "whether a module draws": (local_batch._Draws, "__call__"),
    "the check for draws that were not watched": (local_batch._LocalBatch, "_check"),
    "whether a replica counts in a norm": (Span, "is_first_along"),
    "the store of failures": (_torch, "default_store"),
}


@pytest.fixture
def fault():
    """`fault(patch, place, make)` puts ``make(function)`` in the place of the function at one of `PLACES`."""

    def install(patch, place, make):
        owner, name = PLACES[place]
        patch.setattr(owner, name, make(getattr(owner, name)))

    return install


@pytest.fixture
def lost_exchanges():
    """`lost_exchanges(patch, which)` zeroes what comes by every second all-to-all: the first (0), or the second (1)."""

    def install(patch, which):
        exchange, calls = dist.all_to_all_single, []

        def lossy(received, *args, **kwargs):
            work = exchange(received, *args, **kwargs)
            calls.append(work)
            if len(calls) % 2 != which:
                work.wait()
                received.zero_()
            return work

        patch.setattr(dist, "all_to_all_single", lossy)

    return install


# ------------------------------------------------------------------------------------------------- settings


@pytest.fixture(autouse=True)
def settled_sharing(monkeypatch):
    """Ignore the thread of gloo that holds the memory of the last gather a moment longer."""
    ask_again(monkeypatch, BucketGather, "is_shared")


@pytest.fixture
def impatient_reducer(monkeypatch):
    """Wait a short time only where waiting longer could deadlock."""
    monkeypatch.setattr(reducer, "PATIENCE", 0.05)


@pytest.fixture
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


@pytest.fixture
def gathers_by_broadcasts(monkeypatch):
    """Gather small shards over gloo as large ones."""
    monkeypatch.setattr(axis, "IN_PLACE_BYTES", 0)


@pytest.fixture
def parts_of(monkeypatch):
    """`parts_of(num_bytes)`: widen the state of this many bytes of parameters at a time."""
    return lambda num_bytes: monkeypatch.setattr(state_dtype, "PART_BYTES", num_bytes)


# ------------------------------------------------------------------------------------------------- observation


@pytest.fixture
def late_gathers():
    """Return what lets gathers begin late, given a monkeypatch; all ranks must wait for buckets in the same order."""

    def install(patch):
        begin_late(patch, FlatBucket, "gather_values")
        # Outside of an optimizer's step its tensors over a bucket would count as those of strangers.
        patch.setattr(BucketGather, "is_shared", lambda _values, _num_views: False)

    return install


@pytest.fixture
def on_gathers():
    """`on_gathers(patch, before, after)` calls both with the number of a bucket, around its gather."""

    def install(patch, before, after):
        gather = FlatBucket.gather_values

        def gather_values(bucket):
            before(bucket.plan.index)
            pending = gather(bucket)
            pending.at_end = lambda: after(bucket.plan.index)
            return pending

        patch.setattr(FlatBucket, "gather_values", gather_values)

    return install


@pytest.fixture
def iterations():
    """`iterations(patch)` returns the list of shapes of the matrices that this process orthogonalizes from now on."""

    def install(patch):
        shapes, iterate = [], NewtonSchulz.__call__
        patch.setattr(NewtonSchulz, "__call__", lambda self, x: shapes.append(tuple(x.shape)) or iterate(self, x))
        return shapes

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
