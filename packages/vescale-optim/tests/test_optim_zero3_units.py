"""Which parameters form a unit, when units are gathered, and when they are freed."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._buckets.plan import ParamInfo
from vescale.optim._parameters.unit_plan import choose_units, plan_units
from vescale.optim._parameters.units import Unit, UnitState
from vescale_testing import ranks


class Stages(nn.Module):
    """Lists in a list, a list inside of an element, a module under two names, and ties of several kinds."""

    def __init__(self):
        super().__init__()
        linear = lambda: nn.Linear(2, 2, bias=False)  # noqa: E731
        self.embed = linear()
        self.stages = nn.ModuleList([nn.Sequential(linear(), linear()), linear()])
        self.stages[1].experts = nn.ModuleList([linear(), linear()])
        self.head = nn.Sequential(nn.Tanh(), linear())
        self.again = self.stages[1]
        self.head[1].weight = self.stages[0][1].weight


def units(module, chosen=None):
    return {spec.name: spec.params for spec in choose_units(module, chosen)}


def test_default_units():
    assert units(Stages()) == {
        "stages.0.0": ("stages.0.0.weight",),
        "stages.1": ("stages.1.weight", "stages.1.experts.0.weight", "stages.1.experts.1.weight"),
        "": ("embed.weight", "stages.0.1.weight"),  # and the tied weight of two units
    }
    assert units(nn.Linear(2, 2)) == {"": ("weight", "bias")}


def test_chosen_units():
    assert units(Stages(), []) == {"": tuple(fqn for fqn, _ in Stages().named_parameters())}
    chosen = units(Stages(), ["embed", r"stages\.1\.experts\.\d", "stages.1"])
    assert chosen["stages.1"] == ("stages.1.weight",)
    assert chosen["stages.1.experts.1"] == ("stages.1.experts.1.weight",)
    assert chosen["embed"] == ("embed.weight",)
    assert units(Stages(), ["again"])["again"] == units(Stages())["stages.1"]
    for chosen in (None, [], ["embed", "stages.1"], [r".*\d"]):
        names = [fqn for params in units(Stages(), chosen).values() for fqn in params]
        assert sorted(names) == sorted(fqn for fqn, _ in Stages().named_parameters())


def test_buckets_do_not_cross_units_and_leave_in_the_order_of_backward():
    module = Stages()
    infos = [ParamInfo(fqn, p.numel(), p.dtype) for fqn, p in module.named_parameters()]
    plan, homes = plan_units(choose_units(module), infos, num_shards=2, bucket_bytes=1)
    assert [bucket.index for bucket in plan.buckets] == list(range(4))
    assert homes == ["stages.1", "", "stages.0.0", ""]
    by_unit = units(module)
    for bucket, home in zip(plan.buckets, homes, strict=True):
        assert {slot.fqn for slot in bucket.slots} <= set(by_unit[home])
    assert len(plan_units(choose_units(module), infos, num_shards=2, bucket_bytes=10**6)[0].buckets) == 3


class Net(nn.Module):
    """Three blocks and a root."""

    def __init__(self, checkpointing):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.checkpointing = checkpointing

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            reentrant = self.checkpointing == "reentrant"
            x = checkpoint(layer, x, use_reentrant=reentrant) if self.checkpointing else layer(x)
            x = torch.tanh(x)
        return x


@contextlib.contextmanager
def events(monkeypatch):
    """Record '+unit' when an all-gather starts, '-unit' when a unit is freed that is not sharded."""
    seen, launch, free = [], Unit.launch, Unit.free

    def launched(self):
        started = launch(self)
        seen.extend([f"+{self.name[-1:] or 'R'}"] if started else [])
        return started

    def freed(self):
        seen.extend([f"-{self.name[-1:] or 'R'}"] if self.state is not UnitState.SHARDED else [])
        free(self)

    with monkeypatch.context() as patch:
        patch.setattr(Unit, "launch", launched)
        patch.setattr(Unit, "free", freed)
        yield seen


def run(monkeypatch, *, checkpointing=None, micros=1, reshard=False, train=True, **settings):
    model = DDP(
        Net(checkpointing),
        init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
        zero=3,
        per_rank=True,
        **settings,
    )
    with events(monkeypatch) as seen, contextlib.nullcontext() if train else torch.no_grad():
        for micro in range(micros):
            seen.append("F")
            with contextlib.nullcontext() if micro == micros - 1 else model.no_sync(reshard=reshard):
                out = model(torch.ones(2, 4)).sum()
                seen.append("B")
                if train:
                    out.backward()
    assert all(unit.state is UnitState.SHARDED for unit in model._sharded.units.all)
    return " ".join(seen)


FORWARD = "F +R +0 +1 -0 +2 -1 -2"


@ranks(2)
def test_what_is_gathered_and_freed_when(monkeypatch):
    assert run(monkeypatch) == f"{FORWARD} B +2 +1 -2 +0 -1 -0 -R"
    assert run(monkeypatch, prefetch=False) == "F +R +0 -0 +1 -1 +2 -2 B +2 -2 +1 -1 +0 -0 -R"
    assert run(monkeypatch, reshard_after_forward=False) == "F +R +0 +1 +2 B -2 -1 -0 -R"
    assert run(monkeypatch, train=False) == f"{FORWARD} -R B"
    assert run(monkeypatch, units=[]) == "F +R B -R"
    assert run(monkeypatch, checkpointing="non-reentrant") == f"{FORWARD} B +2 +1 -2 +0 -1 -0 -R"
    assert run(monkeypatch, checkpointing="reentrant") == f"{FORWARD} B +2 -2 +1 -1 +0 -0 -R"


@ranks(2)
def test_micro_batches_gather_once_unless_asked(monkeypatch):
    assert run(monkeypatch, micros=3) == "F +R +0 +1 +2 B F B F -0 -1 -2 B +2 +1 -2 +0 -1 -0 -R"
    again = f"{FORWARD} B +2 +1 -2 +0 -1 -0 -R"
    assert run(monkeypatch, micros=2, reshard=True) == f"{again} {again}"


@ranks(2)
def test_the_order_of_the_last_forward_is_prefetched(monkeypatch):
    class Reversed(Net):
        def forward(self, x):
            x = self.first(x)
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
            return x

    model = DDP(Reversed(None), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=3)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    lines = []
    for _ in range(2):
        with events(monkeypatch) as seen:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        lines.append(" ".join(seen))
    assert lines[0].startswith("+R +0 +2 -2 +1 -1")  # a wrong guess, freed at the end
    assert lines[1] == "+R +2 +1 -2 +0 -1 -0 +0 +1 -0 +2 -1 -2 -R"


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(1)
def test_one_rank_has_everything_all_the_time(monkeypatch, reshard_after_forward):
    model = DDP(
        Net(None),
        init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)),
        zero=3,
        reshard_after_forward=reshard_after_forward,
    )
    with events(monkeypatch) as seen:
        model(torch.ones(2, 4)).sum().backward()
    assert seen == []
    assert model.first.weight.sum().isfinite()
    assert list(model.state_dict()) == list(Net(None).state_dict())
