"""The batch as an axis of a static program: code that mixes rows, and draws of any shape, are those of one device."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, half_of, in_halves, ranks


def rows(number, step=0):
    return torch.randn(number, 6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


class Net(nn.Module):
    """Two layers around a body, and a loss over all rows."""

    def __init__(self, make):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.body = make()
        self.double()

    def forward(self, x):
        loss = self.body(self.down(self.up(x).tanh()))
        return loss if loss.ndim == 0 else (loss + 1).square().square().mean()


class BatchStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, h):
        return self.norm(h)


class Contrast(nn.Module):
    """Every row is compared with every other row."""

    def forward(self, h):
        rows = functional.normalize(h.flatten(1), dim=-1)
        return functional.cross_entropy(rows @ rows.t() / 0.1, torch.arange(len(rows)))


class Router(nn.Module):
    """A product of two means over rows, as in the loss that balances experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)

    def forward(self, h):
        weights = self.gate(h).softmax(-1).flatten(0, 1)
        chosen = functional.one_hot(weights.topk(2).indices, 4).sum(1).to(h.dtype)
        return 4 * (chosen.mean(0) * weights.mean(0)).sum() + h.square().mean()


class Recurrent(nn.Module):
    """Dropout on [time, rows, features], and a state of a size that the code reads."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5)

    def forward(self, h):
        return self.lstm(h)[0]


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.5)

    def forward(self, h):
        return self.layer(h.transpose(0, 1))


class PositionDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.drop = nn.Parameter(torch.ones(6, 8)), nn.Dropout(0.5)

    def forward(self, h):
        return h + self.drop(self.positions)


class LocalSizes(nn.Module):
    """Tensors of the number of rows that the code makes itself: constant, counted and random ones."""

    def forward(self, h):
        number = h.size(0)
        h = h + torch.zeros(number, 6, 1, dtype=h.dtype) + h.new_ones(number, 1, 8)
        h = h * torch.arange(1, number + 1, dtype=h.dtype)[:, None, None]
        keep = torch.rand(number, 1, 1, dtype=h.dtype) > 0.15
        return h * keep + torch.randn(h.shape[0], h.shape[1], 1, dtype=h.dtype)


class MaskedTargets(nn.Module):
    """Ignored targets, which are not the same number in all rows."""

    def forward(self, h):
        target = torch.where(h[..., 0] > 0, torch.arange(6), -100)
        return functional.cross_entropy(h.flatten(0, 1), target.flatten())


class UsedTwice(nn.Module):
    """A weight that an island uses, where rows are uneven, and local code, too: each gives a part of the gradient."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, h):
        return self.proj(h) + h * self.proj.weight.t()[1]


class TiedWeight(nn.Module):
    """A weight that is used with this rank's rows, and with all rows after an operator that gives them to all ranks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, h):
        return (h * self.weight).flip(0) * self.weight


class ChosenTokens(nn.Module):
    """Tokens that one expert takes, as many in each step as it happens."""

    def forward(self, h):
        tokens = h.flatten(0, 1)
        chosen = (tokens[:, 0] > 0).nonzero().squeeze(-1)
        taken = torch.zeros_like(tokens)
        taken.index_add_(0, chosen, tokens[chosen].tanh())
        return (taken + tokens).view_as(h)


BODIES = [
    BatchStatistics,
    Contrast,
    Router,
    Recurrent,
    TimeFirst,
    PositionDropout,
    LocalSizes,
    MaskedTargets,
    UsedTwice,
    TiedWeight,
    ChosenTokens,
]
SHAPES = [(2,), (3,), (2, 2)]
SIZES = [[6, 6, 6], [5, 5, 4]]  # rows that the ranks share evenly, and not
R = {"dp": Shard(0), "tp": Replicate()}
PLANS = {
    ("dp",): {"parameter": {}, "forward": {"input": [{"dp": Shard(0)}]}},
    ("dp", "tp"): {
        "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
        "forward": {"input": [R], r"up\.input": [R], r"down\.output": [R]},
    },
}


def build(make):
    torch.manual_seed(0)
    return Net(make)


def parallel(make, *shape, **options):
    names = ("dp", "tp")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return parallelize_module(build(make), mesh, PLANS[names], mode="static", **options)


def train(model, sizes):
    """Return losses, gradients and buffers of steps with batches of some sizes, and the generator's state."""
    torch.manual_seed(1)
    found = {}
    for step, size in enumerate(sizes):
        model.zero_grad()
        loss = model(rows(size, step))
        loss.backward()
        found[f"{step} loss"] = gather_full(loss.detach())
        found |= {f"{step} {n}": gather_full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"{step} {n}": gather_full(b).double() for n, b in model.named_buffers()}
    return found, torch.get_rng_state()


def assert_same(actual, expected, what):
    (found, state), (wanted, wanted_state) = actual, expected
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{what} {name}: {text}"
        )
    assert torch.equal(state, wanted_state), what


@in_halves
@pytest.mark.parametrize("shape", SHAPES)
@ranks(4, timeout=180)
def test_a_program_over_the_batch_axis(shape, half):
    if dist.get_rank() >= math.prod(shape):
        return
    for make, sizes in half_of(half + SHAPES.index(shape), BODIES, SIZES):
        actual = train(parallel(make, *shape, allow_implicit=True), sizes)
        assert_same(actual, train(build(make), sizes), make.__name__)


class DropoutOfChosen(nn.Module):
    """Dropout of the tokens of one expert and of all tokens, by the same function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))

    def forward(self, tokens):
        chosen = (tokens[:, 0] > 0).nonzero().squeeze(-1)
        taken = functional.dropout(tokens[chosen], 0.5)
        every = functional.dropout(tokens * self.weight, 0.5)
        return every.index_add(0, chosen, taken).square().mean()


@ranks(2)
def test_as_many_chosen_tokens_as_a_rank_has():
    """A tensor of 12 of 24 rows may be all chosen tokens, or this rank's half of all tokens."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = parallelize_module(DropoutOfChosen(), mesh, PLANS["dp",], mode="static", allow_implicit=True)
    alone = DropoutOfChosen()
    torch.manual_seed(3)
    for num_chosen in (24, 12, 7, 24, 12):
        tokens = rows(4, num_chosen).reshape(-1)[: 24 * 4].view(24, 4).abs()
        tokens[num_chosen:, 0] *= -1
        found = []
        for each in (model, alone):
            with torch.random.fork_rng():
                loss = each(tokens)
                loss.backward()
            found.append((gather_full(loss.detach()), gather_full(each.weight.grad)))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=lambda t, n=num_chosen: f"{n}: {t}")


@ranks(2)
def test_each_rank_alone_is_another_program():
    for make in BODIES:
        if make in (PositionDropout, UsedTwice, TiedWeight, ChosenTokens):  # the same on each rank alone
            continue
        model, mine = build(make), rows(6).chunk(2)[dist.get_rank()]
        torch.manual_seed(1)
        model(mine).backward()
        gradients = {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        expected, _ = train(build(make), [6])
        assert any((gradients[name] - expected[f"0 {name}"]).abs().max() > 1e-4 for name in gradients), make


@ranks(2)
def test_without_permission_to_communicate_it_is_refused():
    with pytest.raises((NotLocalFriendlyError, RuntimeError)):
        train(parallel(Contrast, 2), [6])


class OneRow(nn.Module):
    """Code that leaves out a call where there is one row only, as on the last of three ranks with five rows."""

    def __init__(self, *, fails=False):
        super().__init__()
        self.fails, self.weight = fails, nn.Parameter(torch.linspace(1, 2, 8, dtype=torch.float64))

    def forward(self, h):
        number, positions = h.size(0), torch.arange(6)[None]
        if number != len(positions):
            positions = positions.expand(number, -1)
        elif self.fails:
            raise ValueError("one row only")
        mask = torch.arange(number)[:, None, None] >= torch.arange(6)[None, :, None] - 3
        h = h * self.weight * mask.expand(number, -1, 1) + positions[..., None]
        return h.flip(0).square().mean()


@ranks(3)
def test_code_that_leaves_out_a_call_on_one_rank():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    for fails, size in ((False, 5), (True, 6)):
        model = parallelize_module(OneRow(fails=fails), mesh, PLANS["dp",], mode="static", allow_implicit=True)
        assert_same(train(model, [size]), train(OneRow(), [size]), "leaves out")


@ranks(3)
def test_code_that_fails_on_one_rank_is_refused_on_all():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    model = parallelize_module(OneRow(fails=True), mesh, PLANS["dp",], mode="static", allow_implicit=True)
    with pytest.raises((NotLocalFriendlyError, ValueError), match=r"another rank|one row only"):
        train(model, [5])
