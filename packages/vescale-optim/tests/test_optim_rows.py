"""A module that mixes rows, or draws where no row is, trains on ranks as on one device, at every stage of ZeRO."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import halved, run_ranks

TOKENS, WIDTH, STEPS = 6, 8, 3


class Recurrent(nn.Module):
    """Dropout between layers, with the rows on dim 1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)

    def forward(self, x):
        return self.layers(x)[0].square().mean()


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Positions(nn.Module):
    """Dropout of what belongs to no row, and noise without dims of rows."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.ones(TOKENS, WIDTH))

    def forward(self, x):
        return (self.lift(x) + F.dropout(self.positions, 0.5)) * torch.rand(WIDTH, dtype=x.dtype)


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        return F.dropout(self.norm(self.lift(x)), 0.3)


class Router(nn.Module):
    """The loss of a mixture's router: a product of means."""

    def __init__(self):
        super().__init__()
        self.gate, self.lift = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 5)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        taken = F.one_hot(weights.argmax(-1), 4).to(x.dtype).mean((0, 1))
        return self.lift(x).square().mean() + (weights.mean((0, 1)) * taken).sum()


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        likeness = self.one(x[:, 0]) @ self.other(x[:, 1]).T
        return F.cross_entropy(likeness, torch.arange(len(x)))


class Ignoring(nn.Module):
    """A mean over targets, some of which are ignored, on each rank another number."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, 5)

    def forward(self, x):
        targets = (3 * x.sum(-1)).long().abs() % 5
        return F.cross_entropy(self.lift(x).flatten(0, 1), targets.masked_fill(x[..., 0] > 0.3, -100).flatten())


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return 1e-2 * self.lift(x).square().sum()


class Largest(nn.Module):
    """A loss with the largest and the smallest of all rows, whose gradients one rank has."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.lift(x)
        return y.mean((1, 2)).max() - y[:, 0].amin(0).sum() + y[:, :, 1].prod() + y.square().mean()


class Assembled(nn.Module):
    """A result that is put together in memory without values, slice by slice."""

    def __init__(self):
        super().__init__()
        self.lift, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        x = self.lift(x)
        both = x.new_empty(*x.shape[:-1], 2 * WIDTH)
        both[..., :WIDTH].copy_(x)
        both[..., WIDTH:].copy_(self.norm(x)[:, :1].expand(-1, TOKENS, -1))
        return both


class Checkpointed(nn.Module):
    """Backward recomputes layers whose dropout has the rows on dim 1, and one that is shared."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x.transpose(0, 1), use_reentrant=False).transpose(0, 1)
        return self.norm(x)


class Regularized(nn.Module):
    """A loss with a term of parameters, and a weight in two places."""

    def __init__(self):
        super().__init__()
        self.lift, self.back = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.lift.weight
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        return self.back(self.norm(self.lift(x))).square().mean() + 0.1 * self.lift.weight.norm()


MIXING = (Recurrent, SequenceFirst, Positions, Statistics, Router, Contrast, Ignoring, Sum, Largest)
MIXING += (Assembled, Checkpointed, Regularized)


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def batches(num_rows, micros):
    generator = torch.Generator().manual_seed(5)
    shape = micros, num_rows, TOKENS, WIDTH
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(model, batches, rows=slice(None)):
    """Return the losses, the parameters, the buffers and the random state."""
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        for number, x in enumerate(batch):
            is_last = number == len(batch) - 1
            with contextlib.nullcontext() if is_last or not isinstance(model, DDP) else model.no_sync():
                out = model(x[rows])
                loss = (out if out.ndim == 0 else out.square().mean()) / len(batch)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded() if isinstance(model, DDP) else contextlib.nullcontext():
        values = [p.detach().clone() for p in model.parameters()]
    return torch.stack(losses), values, [b.double() for b in model.buffers()], torch.get_rng_state()


def largest_difference(kind, shape, micros, **settings):
    """Return the largest difference of ranks to one device, relative to the largest value."""
    size, rank = dist.get_world_size(), dist.get_rank()
    given = batches(2 * size, micros)
    losses, values, buffers, state = train(build(kind), given)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp")[-len(shape) :])
    model = DDP(build(kind), mesh, **settings)
    mine, my_values, my_buffers, my_state = train(model, given, slice(2 * rank, 2 * rank + 2))
    dist.all_reduce(mine)
    pairs = [(mine / size, losses), *zip([*my_values, *my_buffers], [*values, *buffers], strict=True)]
    assert settings.get("per_rank") or torch.equal(state, my_state)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def each(kinds, *args, **settings):
    return {kind.__name__: largest_difference(kind, *args, **settings) for kind in kinds}


@halved
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("zero", [0, 3])
def test_training_is_that_of_one_device(zero, shape):
    for found in run_ranks(each, torch.Size(shape).numel(), MIXING, shape, 1, zero=zero):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("zero", [1, 3, *(pytest.param(zero, marks=pytest.mark.thorough) for zero in (0, 2))])
def test_micro_batches_and_gradients_that_are_not_yet_reduced(zero):
    for found in run_ranks(each, 2, MIXING, (2,), 2, zero=zero):
        assert max(found.values()) < 1e-10, found


def test_ranks_that_are_worlds_of_their_own_differ():
    kinds = [kind for kind in MIXING if kind is not Positions]  # whose draws are the same on ranks with one seed
    for found in run_ranks(each, 2, kinds, (2,), 1, per_rank=True):
        assert min(found.values()) > 1e-4, found


class Watching(TorchFunctionMode):
    """A mode of the user, as for logging."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(kind):
    with Watching(), torch.device("cpu"):
        return largest_difference(kind, (2,), 1)


@pytest.mark.parametrize("kind", [Statistics, Recurrent])
def test_a_function_mode_of_the_user_sees_what_one_device_computes(kind):
    assert max(run_ranks(under_a_mode, 2, kind)) < 1e-10


# ------------------------------------------------------------------------------------------------- what is recorded


def shown(kind, *, calls=1):
    model = DDP(build(kind), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    for _ in range(calls):
        model(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64))
    return model.islands()


@pytest.mark.parametrize(
    "kind, name, cost",
    [
        (Statistics, "batch_norm on (4, 6, 8) (Shard(dim=0),)", "2 collectives, 96 B"),
        (Router, "Tensor.mul on (4,) (Partial(avg),), (4,) (Partial(avg),)", "1 collectives, 32 B"),
        (Contrast, "Tensor.matmul on (4, 8) (Shard(dim=0),), (8, 4) (Shard(dim=1),)", "1 collectives, 256 B"),
    ],
)
def test_the_operators_that_mix_rows_are_listed(kind, name, cost):
    for islands in run_ranks(shown, 2, kind):
        (found,) = [given for text, given in islands.items() if name in text]
        assert found == cost


class Plain(nn.Module):
    """Nothing mixes rows, and dropout has them on dim 0. It counts what it does, and hooks a value."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.notes, self.calls = [], 0

    def forward(self, x):
        self.notes.append(x.shape)
        self.calls += 1
        hidden = self.lift(x)
        hidden.register_hook(lambda grad: self.notes.append(grad.shape))
        return F.dropout(hidden, 0.5)


def called(kind):
    model = DDP(build(kind), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    for _ in range(2):
        model(torch.ones(2, TOKENS, WIDTH, dtype=torch.float64)).sum().backward()
    return model.islands(), model.calls, model.notes


def test_a_module_that_mixes_nothing_has_none_and_a_recording_leaves_no_trace():
    shape = torch.Size((2, TOKENS, WIDTH))
    assert run_ranks(called, 2, Plain) == [({}, 2, [shape] * 4)] * 2


HELD = []


class Holed(Assembled):
    """Notes what memory without values holds, in a list that outlives the recording."""

    def forward(self, x):
        memory = x.new_empty(*x.shape[:-1], 2 * WIDTH)
        HELD.append(bool(memory.isnan().any()))
        return super().forward(x)


def holes():
    torch.use_deterministic_algorithms(True)  # which fills memory without values with nan
    model = DDP(build(Holed), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    model(torch.ones(2, TOKENS, WIDTH, dtype=torch.float64))
    return HELD


def test_memory_without_values_has_zeros_where_a_recording_compares_it():
    for record, compared, *others in run_ranks(holes, 2):
        assert (record, compared) == (False, False)
        assert others[-1], "the call itself has what memory holds"


def alone_on_rank_0():
    model = DDP(build(Statistics), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    model(x).sum().backward()
    copied = copy.deepcopy(model.module)
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(x)
        model(x)
        copied.eval()(x)
    return True


def test_evaluation_and_copies_are_this_ranks_own():
    assert run_ranks(alone_on_rank_0, 2) == [True, True]
