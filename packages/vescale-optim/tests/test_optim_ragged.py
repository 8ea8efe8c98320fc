"""Parts of parameters and of state are DTensors: whole by `full_tensor`, in any placement, and back, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import InterleavedShard, RaggedShard, Replicate, Shard, distribute_tensor
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_state, ranks, run_ranks


class Net(nn.Module):
    """Odd sizes, parameters that one rank has, a tied and a frozen weight, one without elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.tiny = nn.Parameter(torch.ones(1))
        self.stack = nn.Parameter(torch.randn(3, 5, 2))
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.layers[0].weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0, 3), requires_grad=False)

    def forward(self, x):
        x = self.frozen(self.layers[1](torch.tanh(self.layers[0](x)))) * self.tiny
        return self.tied(torch.einsum("bi,eio->bi", x, self.stack))


def build(zero, *, module=None, mesh=None, seed=0, **settings):
    torch.manual_seed(seed)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(module or Net().double(), mesh, zero=zero, bucket_bytes=500, **settings)
    return model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.05)


def step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_parameters(model):
    with model.unsharded():
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def state_dtensors(optimizer):
    state = optimizer.state_dict()["state"]
    return {fqn: {k: entries[k].to_dtensor() for k in ("exp_avg", "exp_avg_sq")} for fqn, entries in state.items()}


def check_whole(model, optimizer):
    """Assert that DTensors of parameters and state are those that other means find; return how many ranks hold each."""
    expected = whole_parameters(model)
    shards = model.sharded_parameters()
    assert list(shards) == list(expected)
    for fqn, shard in shards.items():
        assert isinstance(shard, DTensor)
        assert shard.shape == expected[fqn].shape
        assert torch.equal(shard.full_tensor(), expected[fqn]), fqn
        for placement in (Replicate(), Shard(0), Shard(shard.ndim - 1)):
            moved = shard.redistribute(placements=[placement])
            assert torch.equal(moved.full_tensor(), expected[fqn]), fqn
            again = moved.redistribute(placements=shard.placements)
            assert torch.equal(again.to_local(), shard.to_local()), fqn
    state = gather_state(optimizer.state_dict()["state"])
    for fqn, entries in state_dtensors(optimizer).items():
        for name, value in entries.items():
            assert torch.equal(value.full_tensor(), state[fqn][name]), (fqn, name)
            assert value.full_tensor().abs().sum() > 0
    return shards


BLOCKS = {"granularity": {r"layers\..*": "rows", "stack": "expert"}}
CASES = {2: [(0, {}), (1, BLOCKS)], 3: [(2, {}), (3, BLOCKS)], 4: [(3, {})]}


@pytest.mark.parametrize("num_ranks", CASES)
def test_parts_are_the_whole(num_ranks):
    def body():
        for zero, settings in CASES[num_ranks]:
            model, optimizer = build(zero, **settings)
            step(model, optimizer)
            shards = check_whole(model, optimizer)
            ragged = {fqn for fqn, shard in shards.items() if isinstance(shard.placements[0], RaggedShard)}
            trained = {fqn for fqn, param in model.named_parameters() if param.requires_grad}
            assert ragged == {0: set(), 3: set(shards) - {"nothing"}}.get(zero, trained)
            if zero:
                units = shards["tiny"].placements[0].local_units
                assert sorted(units) == [0] * (num_ranks - 1) + [1]
                assert shards["tiny"].to_local().numel() == units[dist.get_rank()]
            if settings:
                assert sum(shards["stack"].placements[0].local_units) <= 3  # units are experts, or more

    run_ranks(body, num_ranks)


@ranks(3)
def test_they_are_live_and_can_be_loaded():
    for zero in (1, 2, 3):
        model, optimizer = build(zero)
        step(model, optimizer)
        shards, state = model.sharded_parameters(), state_dtensors(optimizer)
        params, saved = whole_parameters(model), gather_state(optimizer.state_dict()["state"])
        kept = {fqn: shard.clone() for fqn, shard in shards.items()}
        kept_state = {f: {k: v.clone() for k, v in entries.items()} for f, entries in state.items()}
        del shards, state
        step(model, optimizer, seed=1)
        assert not torch.equal(whole_parameters(model)["stack"], params["stack"])

        for fqn, shard in model.sharded_parameters().items():  # written in place
            shard.to_local().copy_(kept[fqn].to_local())
        model.gather_parameters()
        assert_equal(whole_parameters(model), params)

        for form in (lambda v: v, lambda v: v.redistribute(placements=[Shard(0)]), lambda v: v.full_tensor()):
            other, its_optimizer = build(zero, seed=1)
            step(other, its_optimizer, seed=2)
            assert not torch.equal(whole_parameters(other)["stack"], params["stack"])
            other.load_state_dict({fqn: form(value) for fqn, value in kept.items()}, strict=False)
            assert_equal(whole_parameters(other), params)
            loaded = its_optimizer.state_dict()
            for fqn, entries in kept_state.items():
                loaded["state"][fqn] |= {name: form(value) for name, value in entries.items()}
            its_optimizer.load_state_dict(loaded)
            found = gather_state(its_optimizer.state_dict()["state"])
            for fqn, entries in kept_state.items():
                assert_equal({k: found[fqn][k] for k in entries}, {k: saved[fqn][k] for k in entries})


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


class Parallel(nn.Module):
    """Parameters that tensor parallelism shards, replicates or does not know, and a merged projection."""

    def __init__(self, mesh, num_rows=6):
        super().__init__()
        for name, shape, placement in [
            ("rows", (num_rows, 5), Shard(0)),
            ("columns", (3, 6), Shard(1)),
            ("merged", (12, 3), InterleavedShard(0, 3)),
            ("whole", (7,), Replicate()),
        ]:
            setattr(self, name, nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [placement])))
        self.plain = nn.Parameter(torch.randn(3, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


def give_gradients(model):
    """Set gradients that all ranks agree about, without a forward."""
    loss = sum((p.full_tensor() if isinstance(p, DTensor) else p).pow(3).sum() for p in model.parameters())
    loss.backward()


@ranks(4)
def test_tensor_parallel_parameters_are_over_both_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for zero in (0, 1, 2):
        torch.manual_seed(0)
        model, optimizer = build(zero, module=Parallel(mesh["tp"]), mesh=mesh["dp"])
        give_gradients(model)
        optimizer.step()
        shards, state = model.sharded_parameters(), optimizer.state_dict()["state"]
        expected = gather_state(state)
        for fqn, param in model.named_parameters():
            value = param.full_tensor() if isinstance(param, DTensor) else param
            assert torch.equal(shards[fqn].full_tensor(), value), fqn
            if isinstance(param, DTensor):
                assert shards[fqn].device_mesh.mesh_dim_names == ("dp", "tp")
                assert shards[fqn].placements[1] == param.placements[0]
            if fqn == "scale":
                continue
            moment = state[fqn]["exp_avg"].to_dtensor()
            assert isinstance(moment.placements[0], RaggedShard if zero else Replicate)
            assert torch.equal(moment.full_tensor(), expected[fqn]["exp_avg"]), fqn
            whole = moment.clone().redistribute(placements=[Replicate()] * moment.device_mesh.ndim)
            state[fqn]["exp_avg"].tensor.zero_()
            state[fqn]["exp_avg"].load(whole)
            assert torch.equal(state[fqn]["exp_avg"].to_dtensor().full_tensor(), expected[fqn]["exp_avg"]), fqn
        kept = {fqn: shard.clone() for fqn, shard in shards.items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(kept)
        for fqn, param in model.named_parameters():
            value = param.full_tensor() if isinstance(param, DTensor) else param
            assert torch.equal(value, kept[fqn].full_tensor()), fqn


@ranks(4)
def test_sharded_tensor_parallel_parameters():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    for part, placement in zip(module, (Shard(0), Shard(1)), strict=True):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh["tp"], [placement]))
    expected = {fqn: p.full_tensor().detach().clone() for fqn, p in module.named_parameters()}
    dist.broadcast(expected["0.weight"], 0)
    model = DDP(module, mesh["dp"], zero=3)
    with model.unsharded():
        expected = {fqn: p.full_tensor().detach().clone() for fqn, p in model.named_parameters()}
    shards = model.sharded_parameters()
    for fqn, shard in shards.items():
        assert isinstance(shard.placements[0], RaggedShard)
        assert torch.equal(shard.full_tensor(), expected[fqn])
        assert torch.equal(model.state_dict()[fqn].to_dtensor().full_tensor(), expected[fqn])
    kept = {fqn: shard.redistribute(placements=[Shard(0), Replicate()]) for fqn, shard in shards.items()}
    for shard in shards.values():
        shard.to_local().zero_()
    model.load_state_dict(kept)
    with model.unsharded():
        for fqn, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), expected[fqn])


@ranks(4)
def test_hybrid_shards_are_replicated_over_the_other_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for zero in (1, 3):
        model, optimizer = build(zero, mesh=mesh)
        step(model, optimizer)
        expected = whole_parameters(model)
        for fqn, shard in model.sharded_parameters().items():
            assert shard.placements[0] == Replicate()
            assert torch.equal(shard.full_tensor(), expected[fqn]), fqn
        assert isinstance(shards_placement(model, "stack"), RaggedShard)
        moment = optimizer.state_dict()["state"]["stack"]["exp_avg"].to_dtensor()
        number = list(model.slots()).index("stack")
        assert torch.equal(moment.full_tensor(), optimizer.full_state_dict()["state"][number]["exp_avg"])


def shards_placement(model, fqn):
    return model.sharded_parameters()[fqn].placements[1]


@ranks(3)
def test_master_weights_are_dtensors_of_their_own_dtype():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    model = DDP(nn.Linear(5, 7).bfloat16(), mesh, zero=2)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.05, master_dtype=torch.float32)
    model(torch.ones(2, 5).bfloat16()).sum().backward()
    optimizer.step()
    masters = optimizer.full_state_dict()["master_weights"]
    for fqn, entries in optimizer.state_dict()["state"].items():
        found = entries["master_weight"].to_dtensor()
        assert found.dtype == torch.float32
        assert torch.equal(found.full_tensor(), masters[fqn])
        assert torch.equal(model.sharded_parameters()[fqn].full_tensor(), masters[fqn].bfloat16())


@ranks(4)
def test_what_no_placement_says_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model, optimizer = build(1, module=Parallel(mesh["tp"], num_rows=5), mesh=mesh["dp"])
    give_gradients(model)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    expected = gather_state(state)
    for fqn in ("columns", "merged", "whole"):  # cut alike by all ranks, although shards of "rows" differ in size
        assert torch.equal(state[fqn]["exp_avg"].to_dtensor().full_tensor(), expected[fqn]["exp_avg"])
    for fqn, entries in expected.items():  # no placement is needed for the whole
        assert torch.equal(state[fqn]["exp_avg"].full_tensor(), entries["exp_avg"]), fqn
    uneven = r"'rows' is a DTensor over \('tp',\) with shards of unequal size .* use the rectangles of its StatePiece"
    with pytest.raises(NotImplementedError, match=uneven):
        state["rows"]["exp_avg"].to_dtensor()
    with pytest.raises(NotImplementedError, match=uneven):
        model.sharded_parameters()
    state["plain"]["exp_avg"].to_dtensor()  # over dp alone
    assert build(2, module=Scaled(), mesh=mesh["dp"])[0].sharded_parameters()["scale"].full_tensor() == 2

    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    model, _ = build(1, module=Parallel(mesh["tp"]), mesh=other["data"])
    with pytest.raises(NotImplementedError, match=r"they are no slices by name of one mesh"):
        model.sharded_parameters()

    plain = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=plain, lr=0.1)
    with pytest.raises(ValueError, match=r"state of 'weight' belongs to a model without DDP"):
        optimizer.state_dict()["state"]["weight"]["exp_avg"].to_dtensor()
    with pytest.raises(ValueError, match=r"state of 'weight' belongs to a model without DDP"):
        optimizer.state_dict()["state"]["weight"]["exp_avg"].full_tensor()

    model, optimizer = build(1, mesh=mesh["dp"])
    elsewhere = distribute_tensor(torch.zeros(7, 5).double(), mesh["tp"], [Shard(0)])
    with pytest.raises(ValueError, match=r"'layers.0.weight' is loaded from a DTensor with placements \(Shard"):
        optimizer.state_dict()["state"]["layers.0.weight"]["exp_avg"].load(elsewhere)
