"""Modules with a tensor-parallel plan that mix rows, or draw where no row is, train under `DDP` as on one device."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import RankFailure, gather_full, halved, run_ranks

TOKENS, WIDTH, STEPS = 6, 8, 3
WHOLE, COLUMNS = {"tp": Replicate()}, {"tp": Shard(2)}
PLAN = {
    "parameter": {r"(.*\.)?up\.(weight|bias)": {"tp": Shard(0)}, r"(.*\.)?down\.weight": {"tp": Shard(1)}},
    "forward": {r"(.*\.)?up\.input": [WHOLE], r"(.*\.)?down\.input": [COLUMNS], r"(.*\.)?down\.output": [WHOLE]},
}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Statistics(MLP):
    """Statistics of a batch, and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        return F.dropout(self.norm(super().forward(x)), 0.3)


class ShardedDropout(MLP):
    """Dropout on shards of columns, and of what belongs to no row."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.ones(TOKENS, WIDTH))

    def forward(self, x):
        x = x + F.dropout(self.positions, 0.5)
        return x + self.down(F.dropout(self.up(x), 0.4))


class SequenceFirst(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x.transpose(0, 1)), 0.5).transpose(0, 1)


class Router(MLP):
    """The loss of a mixture's router: a product of means."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = super().forward(x)
        weights = self.gate(x).softmax(-1)
        taken = F.one_hot(weights.argmax(-1), 4).to(x.dtype).mean((0, 1))
        return x.square().mean() + (weights.mean((0, 1)) * taken).sum()


class Contrast(MLP):
    def forward(self, x):
        x = super().forward(x)
        return F.cross_entropy(x[:, 0] @ x[:, 1].T, torch.arange(len(x)))


class Ignoring(MLP):
    """A mean over targets, some of which are ignored, on each rank another number."""

    def forward(self, x):
        targets = (3 * x.sum(-1)).long().abs() % WIDTH
        targets = targets.masked_fill(x[..., 0] > 0.3, -100)
        return F.cross_entropy(super().forward(x).flatten(0, 1), targets.flatten())


class Sum(MLP):
    def forward(self, x):
        return 1e-2 * super().forward(x).square().sum()


class BatchSize(MLP):
    """Reads the number of rows."""

    def forward(self, x):
        return super().forward(x).square().sum() / x.shape[0]


class Regularized(MLP):
    """A term of parameters, and statistics that reach the loss."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (super().forward(self.scale * x) - x.mean(0)).square().mean() + 0.1 * self.scale.norm()


class Checkpointed(nn.Module):
    """Backward recomputes layers with dropout and statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Statistics(), ShardedDropout()])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Tied(nn.Module):
    """A weight in two places, one of which is statistics of the batch."""

    def __init__(self):
        super().__init__()
        self.mlp, self.one, self.other = MLP(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.one(self.mlp(x)) + self.other(x.mean(0, keepdim=True))


class Penalty(MLP):
    """A gradient of gradients."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = super().forward(x).square().mean()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + 50 * gradient.square().sum()


MIXING = (
    Statistics,
    ShardedDropout,
    SequenceFirst,
    Router,
    Contrast,
    Ignoring,
    Sum,
    BatchSize,
    Regularized,
    Checkpointed,
    Tied,
)


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def batches(num_rows, micros):
    generator = torch.Generator().manual_seed(5)
    shape = micros, num_rows, TOKENS, WIDTH
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(model, batches, rows=slice(None)):
    """Return the losses, the parameters and buffers by name, and the random state."""
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
        values = {name: gather_full(p.detach()).clone() for name, p in model.named_parameters()}
    values |= {name: gather_full(buffer).double() for name, buffer in model.named_buffers()}
    return torch.stack(losses), values, torch.get_rng_state()


def largest_difference(kind, mesh, mode, micros=1, allow_implicit=False, **settings):
    """Return the largest difference of ranks to one device, relative to the largest value."""
    data, size, rank = mesh["dp"], mesh["dp"].size(), mesh["dp"].get_local_rank()
    given = batches(2 * size, micros)
    losses, values, state = train(build(kind), given)
    model = parallelize_module(build(kind), mesh["tp"], PLAN, mode=mode, allow_implicit=allow_implicit)
    mine, my_values, my_state = train(DDP(model, data, **settings), given, slice(2 * rank, 2 * rank + 2))
    dist.all_reduce(mine, group=data.get_group())
    pairs = [(mine / size, losses), *((my_values[name], value) for name, value in values.items())]
    assert settings.get("per_rank") or torch.equal(state, my_state)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def each(shape, kinds, *args, **settings):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return {kind.__name__: largest_difference(kind, mesh, *args, **settings) for kind in kinds}


@halved
@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("zero", [0, 3])
def test_training_is_that_of_one_device(mode, zero):
    for found in run_ranks(each, 4, (2, 2), MIXING, mode, zero=zero):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.thorough), "static"])
def test_micro_batches(mode):
    for found in run_ranks(each, 4, (2, 2), MIXING, mode, micros=2, zero=1):
        assert max(found.values()) < 1e-10, found


def test_gradients_of_gradients():
    for found in run_ranks(each, 4, (2, 2), [Penalty], "eager"):
        assert max(found.values()) < 1e-10, found


def of_inputs(kind, shape, mode):
    """Return the largest difference of the gradient of this rank's inputs, each a summand of a mean over ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    coord, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    whole = batches(2 * size, 1)[0][0].requires_grad_()
    mine = whole.detach().chunk(size)[coord].clone().requires_grad_()
    model = DDP(parallelize_module(build(kind), mesh["tp"], PLAN, mode=mode), mesh["dp"])
    for run, x in ((build(kind), whole), (model, mine)):
        torch.manual_seed(1)
        out = run(x)
        (out if out.ndim == 0 else out.square().mean()).backward()
    return (gather_full(mine.grad) / size - whole.grad.chunk(size)[coord]).abs().max().item()


@halved
@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("kind", [Statistics, Router, Contrast])
def test_gradients_of_inputs_are_those_of_one_device(kind, mode):
    assert max(run_ranks(of_inputs, 4, kind, (2, 2), mode)) < 1e-14


def scaled(model, rows, scale=1.0):
    """Return the gradient of a sum of losses over some rows."""
    ((model(rows).square().sum()) * scale).backward()
    return {name: gather_full(p.grad) for name, p in model.named_parameters()}


def uneven(kind, mode):
    """Run a call with even rows, then one with three on the first rank and one on the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = DDP(parallelize_module(build(kind), mesh["tp"], PLAN, mode=mode), mesh["dp"])
    x = batches(4, 1)[0][0]
    mine = (x[:3], x[3:])[mesh["dp"].get_local_rank()]
    model.global_mean_scale(2)
    model(x.chunk(2)[mesh["dp"].get_local_rank()]).sum().backward()
    model.zero_grad()
    alone, actual = scaled(build(kind), x, 1 / 4), scaled(model, mine, model.global_mean_scale(len(mine)))
    return max((actual[name] - value).abs().max().item() for name, value in alone.items())


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_uneven_rows_are_refused_only_where_rows_are_mixed(mode):
    assert max(run_ranks(uneven, 4, MLP, mode)) < 1e-12
    with pytest.raises(RankFailure, match="expected the same number of rows on all ranks, since Statistics mixes rows"):
        run_ranks(uneven, 4, Statistics, mode)


def test_ranks_that_are_worlds_of_their_own_differ():
    kinds = [kind for kind in MIXING if kind not in (SequenceFirst, ShardedDropout, BatchSize)]
    for found in run_ranks(each, 4, (2, 2), kinds, "eager", per_rank=True):
        assert min(found.values()) > 1e-6, found
