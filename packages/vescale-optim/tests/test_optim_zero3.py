"""ZeRO 3 is ZeRO 2 bit for bit, and one process up to rounding, whatever a module does with its parameters."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP, DistributedOptimizer, clip_grad_norm_
from vescale_testing import RankFailure, run_ranks

WIDTH = 6


class Block(nn.Module):
    """Two layers, the second perhaps frozen, dropout, and a residual."""

    def __init__(self, *, frozen=False):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.down.requires_grad_(not frozen)

    def forward(self, x):
        return x + self.gain * self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.1, training=self.training))


class Net(nn.Module):
    """Blocks, one of them used twice, one frozen, one never used; weights tied within the root and across units."""

    path = (0, 1, 2, 3, 1)

    def __init__(self, checkpointing=None):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Block(), Block(frozen=True), Block(), Block(), Block()])
        self.layers[3].requires_grad_(False)
        self.layers[2].up.weight = self.layers[0].up.weight
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def run(self, layer, x):
        if self.checkpointing is None or not torch.is_grad_enabled():
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")

    def forward(self, ids):
        x = self.embed(ids)
        for index in self.path:
            x = self.run(self.layers[index], x)
        return self.head(x)


class Once(Net):
    """Uses no trained parameter of a block twice, which reentrant checkpointing would deliver in two parts."""

    path = (0, 1, 2, 3)

    def __init__(self, checkpointing=None):
        super().__init__(checkpointing)
        self.layers[2].up.weight = nn.Parameter(torch.randn(9, WIDTH))


class TwoAtOnce(Once):
    """Checkpoints two blocks together."""

    def forward(self, ids):
        x = self.embed(ids)
        for pair in ((0, 1), (2, 3)):

            def both(x, pair=pair):
                return self.layers[pair[1]](self.layers[pair[0]](x))

            x = checkpoint(both, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def ids(step, micro, *, coord=0, size=1):
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, 11, (12, 3), generator=generator).chunk(size)[coord]


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def build(kind=Net, **kwargs):
    torch.manual_seed(3)
    return kind(**kwargs).double()


def train(
    zero, *, kind=Net, checkpointing=None, micros=1, sync=False, reshard=False, clip=None, evaluate=False, **settings
):
    """Train 3 steps; return losses, norms and parameters. ``zero`` None: in one process, with torch's own optimizer."""
    model = build(kind, checkpointing=checkpointing)
    coord, size = (0, 1) if zero is None else (dist.get_rank(), dist.get_world_size())
    if zero is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        model = DDP(model, mesh["dp"], zero=zero, **settings)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.05, weight_decay=0.1)
    seen = []
    for step in range(3):
        for micro in range(micros):
            last = micro == micros - 1 or sync
            with contextlib.nullcontext() if zero is None or last else model.no_sync(reshard=reshard):
                loss = loss_of(model, ids(step, micro, coord=coord, size=size)) / micros
                loss.backward()
            seen.append(loss.detach().clone())
        if clip is not None:
            seen.append((nn.utils.clip_grad_norm_ if zero is None else clip_grad_norm_)(_target(model, zero), clip))
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                seen.append(loss_of(model.eval(), ids(step, 77, coord=coord, size=size)))
            model.train()
    with contextlib.nullcontext() if zero is None else model.unsharded():
        return seen, {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def _target(model, zero):
    return model.parameters() if zero is None else model


CASES = {
    "plain": {},
    "keep": {"reshard_after_forward": False},
    "no prefetch": {"prefetch": False},
    "names": {"units": ["embed", r"layers\.[02]"]},
    "nested": {"units": ["layers.0", "layers.0.down", "layers.1"]},
    "root only": {"units": []},
    "small root buckets": {"bucket_bytes": 64, "overlap": False},
    "non-reentrant": {"checkpointing": "non-reentrant"},
    "reentrant": {"checkpointing": "reentrant", "kind": Once},
    "regions": {"checkpointing": "non-reentrant", "kind": TwoAtOnce},
    "reentrant regions": {"checkpointing": "reentrant", "kind": TwoAtOnce},
    "accumulation": {"micros": 3},
    "resharded accumulation": {"micros": 3, "reshard": True},
    "reduced every time": {"micros": 3, "sync": True},
    "evaluation": {"evaluate": True, "clip": 0.5},
    "ordered": {"reduction": "ordered"},
}


def settings_of(case):
    """Return what the case means for any stage, and for ZeRO 3 alone."""
    only = ("reshard_after_forward", "prefetch", "units")
    return {k: v for k, v in case.items() if k not in only}, {k: v for k, v in case.items() if k in only}


def all_cases(zero):
    records = {}
    for name, case in CASES.items():
        common, own = settings_of(case)
        records[name] = train(zero, **common, **(own if zero == 3 else {}))
    return records


def assert_same(actual, expected, *, rtol):
    for a, b in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=0)
    assert actual[1].keys() == expected[1].keys()
    for fqn, value in expected[1].items():
        torch.testing.assert_close(actual[1][fqn], value, rtol=rtol, atol=0 if rtol == 0 else 1e-13)


class Branches(nn.Module):
    """A unit of which a call uses one half or both, and never the last layer."""

    def __init__(self):
        super().__init__()
        self.always, self.odd, self.never = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, use_odd):
        x = torch.tanh(self.always(x))
        return torch.tanh(self.odd(x)) if use_odd else x


class Branching(nn.Module):
    """Two such units."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Branches(), Branches()])

    def forward(self, x, use_odd):
        for layer in self.layers:
            x = layer(x, use_odd)
        return x


def branching(find_unused):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(Branching().double(), mesh["dp"], zero=3, find_unused_parameters=find_unused, per_rank=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        model(torch.ones(2, 3, dtype=torch.float64), dist.get_rank() == 1).square().mean().backward()
        optimizer.step()
        assert model.layers[0].odd.weight.grad is not None
        assert model.layers[0].never.weight.grad is None
        optimizer.zero_grad()
    with model.unsharded():
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def test_parameters_that_no_rank_or_only_one_uses():
    torch.manual_seed(0)
    model = Branching().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    x = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(3):
        ((model(x, False).square().mean() + model(x, True).square().mean()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for actual in run_ranks(branching, 2, True):
        for fqn, value in model.named_parameters():
            torch.testing.assert_close(actual[fqn], value.detach(), rtol=1e-12, atol=1e-14)
    with pytest.raises(RankFailure, match=r"parameters got no gradient on rank 0 .*'layers.0.odd.weight'"):
        run_ranks(branching, 2, False)


def test_two_ranks_give_the_bits_of_zero_2():
    ranks2, ranks3 = run_ranks(all_cases, 2, 2), run_ranks(all_cases, 2, 3)
    for rank in range(2):
        for name in CASES:
            if "clip" not in CASES[name]:  # a norm is a sum over all, whose order depends on the layout
                assert_same(ranks3[rank][name], ranks2[rank][name], rtol=0)
    with pytest.raises(AssertionError):
        assert_same(ranks3[0]["plain"], ranks2[0]["accumulation"], rtol=0)


def stale(finish):
    """Show, from the second gather on, the values of the first."""

    def finish_with_stale_values(held):
        finish(held)
        for param in held.params:
            param.first = getattr(param, "first", param.detach().clone())
            param.data.copy_(param.first)

    return finish_with_stale_values


def test_values_from_before_a_step_are_seen(monkeypatch, fault):
    expected = run_ranks(train, 2, 2)[0]
    fault(monkeypatch, "the parameters of a unit have come", stale)
    with pytest.raises(AssertionError):
        assert_same(run_ranks(train, 2, 3)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_is_one_process(world_size):
    def means(records):
        return [sum(values) / len(values) for values in zip(*(r[0] for r in records), strict=True)]

    names = ["plain"] if world_size == 3 else [*CASES]

    def selected():
        return {name: train(3, **CASES[name]) for name in names}

    records = run_ranks(selected, world_size)
    for name in names:
        common, _ = settings_of(CASES[name])
        kept = {k: v for k, v in common.items() if k in ("checkpointing", "kind", "micros", "evaluate", "clip")}
        expected = train(None, **kept)
        for record in records:
            assert_same((means([r[name] for r in records]), record[name][1]), expected, rtol=1e-12)
