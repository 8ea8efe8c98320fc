"""State goes from ranks to a plain torch optimizer and back, and both trainings go on as one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import InterleavedShard, distribute_tensor
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import ranks, run_ranks


class Net(nn.Module):
    """Layers of odd sizes, a frozen one in the middle and one that is never used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.last = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x))))) * self.scale


def build():
    torch.manual_seed(0)
    return Net().double()


def train(model, optimizer, steps, coord=0, size=1):
    for step in steps:
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(size)[coord]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def groups_of(model):
    trainable = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for p in trainable.values() if p.ndim < 2], "lr": 0.02},
        {"params": [p for p in trainable.values() if p.ndim >= 2]},
    ]


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


CASES = [
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
]


def assert_same_state(actual, expected):
    """Compare two state dicts of torch, names of parameters aside."""
    assert set(actual["state"]) == set(expected["state"])
    for number, entries in expected["state"].items():
        assert set(actual["state"][number]) == set(entries)
        for name, value in entries.items():
            if value is None:
                assert actual["state"][number][name] is None
            else:
                torch.testing.assert_close(actual["state"][number][name], value, rtol=1e-12, atol=1e-14)
    for ours, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
        theirs = {key: value for key, value in theirs.items() if key != "param_names"}
        assert ours == theirs


def both_ways(grouped):
    """Train on ranks, go on in a plain optimizer; train in a plain optimizer, go on on ranks."""
    coord, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    for optimizer_class, settings in CASES:
        alone = build()
        plain = optimizer_class(groups_of(alone) if grouped else trainable(alone), **settings)
        half = train(alone, plain, range(2))
        saved = copy.deepcopy(plain.state_dict())
        expected = train(alone, plain, range(2, 4))
        for zero in (0, 1, 2):
            model = DDP(build(), mesh["dp"], zero=zero, bucket_bytes=200)
            groups = groups_of(model) if grouped else None
            optimizer = DistributedOptimizer(optimizer_class, model=model, param_groups=groups, **settings)
            train(model, optimizer, range(2), coord, size)
            full = optimizer.full_state_dict()
            assert_same_state(full, saved)

            other = build()
            other.load_state_dict(half)
            resumed = optimizer_class(groups_of(other) if grouped else trainable(other), **settings)
            resumed.load_state_dict(full)
            assert_close(train(other, resumed, range(2, 4)), expected)

            model = DDP(build(), mesh["dp"], zero=zero, bucket_bytes=1000)
            model.load_state_dict(half)
            groups = groups_of(model) if grouped else None
            optimizer = DistributedOptimizer(optimizer_class, model=model, param_groups=groups, **settings)
            optimizer.load_full_state_dict(saved)
            assert_close(train(model, optimizer, range(2, 4), coord, size), expected)


def assert_close(actual, expected):
    for fqn, value in expected.items():
        torch.testing.assert_close(actual[fqn], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_both_ways(world_size):
    run_ranks(both_ways, world_size, False)


def test_both_ways_with_groups():
    run_ranks(both_ways, 2, True)


@ranks(2)
def test_muon():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone = build()
    plain = Muon([(fqn, p) for fqn, p in alone.named_parameters() if p.requires_grad], lr=0.02)
    half = train(alone, plain, range(2))
    saved = copy.deepcopy(plain.state_dict())
    expected = train(alone, plain, range(2, 4))
    for zero in (0, 1, 2):
        model = DDP(build(), mesh["dp"], zero=zero, bucket_bytes=200)
        model.load_state_dict(half)
        optimizer = DistributedOptimizer(Muon, model=model, lr=0.02)
        optimizer.load_full_state_dict(saved)
        assert_same_state(optimizer.full_state_dict(), saved)
        assert_close(train(model, optimizer, range(2, 4), dist.get_rank(), 2), expected)


@ranks(4)
def test_tensor_parallel_shards_and_master_weights():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {"rows": Shard(0), "columns": Shard(1), "fused": InterleavedShard(0, 2), "gain": Replicate()}
    shapes = {"rows": (5, 3), "columns": (2, 4), "fused": (8, 3), "gain": (7,)}
    values = {fqn: torch.randn(s, generator=torch.Generator().manual_seed(3)).bfloat16() for fqn, s in shapes.items()}
    wide = {fqn: nn.Parameter(value.float()) for fqn, value in values.items()}
    plain = torch.optim.AdamW(wide.values(), lr=0.01)
    for param in wide.values():
        param.grad = param.detach() * 2
    plain.step()
    for zero in (0, 1, 2):
        module = nn.Module()
        for fqn, value in values.items():
            module.register_parameter(
                fqn, nn.Parameter(distribute_tensor(value.clone(), mesh["tp"], [placements[fqn]]))
            )
        model = DDP(module, mesh["dp"], zero=zero, bucket_bytes=40)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, master_dtype=torch.float32)
        sum((p.to_local() * p.to_local().detach() * 2).sum() for p in model.parameters()).backward()
        optimizer.step()
        full = optimizer.full_state_dict()
        assert_same_state(full, plain.state_dict())
        for fqn, value in wide.items():
            torch.testing.assert_close(full["master_weights"][fqn], value.detach(), rtol=1e-6, atol=1e-7)
        optimizer.step()
        optimizer.load_full_state_dict(full)
        again = optimizer.full_state_dict()
        assert_same_state(again, plain.state_dict())
        assert all(torch.equal(again["master_weights"][fqn], value) for fqn, value in full["master_weights"].items())


@ranks(2)
def test_frozen_parameters_may_be_numbered():
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=1)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.5)
    alone = build()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)  # the frozen layer, too
    train(alone, plain, range(1))
    optimizer.load_full_state_dict(plain.state_dict())
    full = optimizer.full_state_dict()
    assert full["param_groups"][0]["lr"] == 0.01
    by_param = dict(zip(trainable(alone), full["state"].values(), strict=False))
    assert len(full["state"]) == 4  # all but the frozen and the unused
    torch.testing.assert_close(by_param[alone.first.weight]["exp_avg"], plain.state[alone.first.weight]["exp_avg"])


@ranks(2)
def test_a_piece_in_the_wrong_place_is_seen():
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=1)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model)
    train(model, optimizer, range(1), dist.get_rank(), 2)
    expected = optimizer.full_state_dict()
    assert_same_state(optimizer.full_state_dict(), expected)
    for piece in optimizer.pieces:
        piece.start += piece.stop - piece.start == piece.param.numel()  # where the buffer has padding behind it
    with pytest.raises(AssertionError, match="are not close"):
        assert_same_state(optimizer.full_state_dict(), expected)


@ranks(1)
def test_state_of_another_model_is_refused():
    model = build()
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model)
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, range(1))
    saved = plain.state_dict()

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            optimizer.load_full_state_dict({**saved, **changes})

    group = saved["param_groups"][0]
    refused("has 2 param groups, this optimizer has 1; build it with the same", param_groups=[group, group])
    refused(
        "group 0 of the state dict has 1 parameters, expected 6: it is of another",
        param_groups=[{**group, "params": [0]}],
    )
    names = {**group, "param_names": [f"other.{n}" for n in group["params"]]}
    refused(r"missing \['first.bias', .*: it is of another model or grouping", param_groups=[names])
    state = copy.deepcopy(saved["state"])
    state[1]["exp_avg"] = torch.zeros(7)
    refused(r"state of 'first.weight' has global shape \(7, 5\), got \(7,\)", state=state)
    del state[1]["exp_avg"]
    refused(r"state of 'first.weight' missing \['exp_avg'\], unexpected \[\]", state=state)
