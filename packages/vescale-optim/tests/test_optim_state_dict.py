"""Optimizer state is named, global in its coordinates, and there before the first step."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import InterleavedShard, distribute_tensor
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import assert_same_training, gather_state, halved, ranks, run_ranks

ADAMW = {"lr": 0.01, "betas": (0.8, 0.99)}


def build(size=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, size), nn.Linear(size, 2)).double()


def wrapped(zero, module=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(module or build(), mesh["dp"], zero=zero, bucket_bytes=100)


def backward(model, seed=0):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model(x).square().mean().backward()


def step(model, optimizer, seed=0):
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 1, 3), (2, 3, 2)])
def test_boxes_of_a_flat_range_by_brute_force(shape):
    param = nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))
    numel = param.numel()
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=nn.ParameterList([param]))
    value = optimizer.state_dict()["state"]["0"]["exp_avg"]
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            state = param.detach().flatten()[start:stop].clone()
            value.tensor, value.piece.start, value.piece.stop = state, start, stop
            seen = torch.full(shape, -1.0)
            for offsets, view in value.__boxes__():
                seen[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] = view
                view += 100
            expected = torch.full((numel,), -1.0)
            expected[start:stop] = torch.arange(start, stop)
            assert torch.equal(seen.flatten(), expected)
            assert torch.equal(state, torch.arange(start, stop) + 100.0)  # the views are live
            assert value.__global_shape__ == shape


@ranks(4)
def test_boxes_of_tensor_parallel_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    module.rows = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh["tp"], [Shard(0)]))
    module.columns = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh["tp"], [Shard(1)]))
    module.whole = nn.Parameter(distribute_tensor(torch.zeros(7), mesh["tp"], [Replicate()]))
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=DDP(module, mesh["dp"], zero=1))
    state = optimizer.state_dict()["state"]
    for fqn, param in module.named_parameters():
        numbers = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
        for offsets, view in state[fqn]["exp_avg"].__boxes__():
            view.copy_(numbers[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))])
        assert torch.equal(gather_state(state)[fqn]["exp_avg"], numbers)


@pytest.mark.parametrize("zero", [None, 0, 1, 2])
@ranks(3)
def test_the_structure(zero):
    model = build() if zero is None else wrapped(zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, **ADAMW)
    for _ in range(2):
        state_dict = optimizer.state_dict()
        assert list(state_dict) == ["state", "param_groups"]
        assert list(state_dict["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for entries in state_dict["state"].values():
            assert sorted(entries) == ["exp_avg", "exp_avg_sq", "step"]
            assert hasattr(entries["exp_avg"], "__boxes__")
            assert entries["step"].shape == ()
        assert json.loads(json.dumps(state_dict["param_groups"]))[0]["betas"] == [0.8, 0.99]
        step(model, optimizer)


def test_state_of_each_rank_is_a_share_of_the_whole():
    def body(zero):
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=wrapped(zero, build(size=400)))
        state = optimizer.state_dict()["state"]
        return sum(view.numel() for entries in state.values() for _, view in entries["exp_avg"].__boxes__())

    total = sum(param.numel() for param in build(size=400).parameters())
    assert run_ranks(body, 4, 0) == [total] * 4
    for zero in (1, 2):
        held = run_ranks(body, 4, zero)
        assert sum(held) == total
        assert max(held) < 1.1 * total / 4


@halved
@pytest.mark.parametrize(
    "optimizer_class, settings",
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Rprop, {}),
    ],
)
@pytest.mark.parametrize("zero", [0, 2])
@ranks(2)
def test_asking_for_state_before_the_first_step_changes_nothing(zero, optimizer_class, settings):
    models = [wrapped(zero), wrapped(zero)]
    optimizers = [DistributedOptimizer(optimizer_class, model=model, **settings) for model in models]
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    for index in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, index)
    for fqn, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[fqn], value)


@halved
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_a_training_goes_on_from_its_state(zero, stepped):
    model = wrapped(zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, **ADAMW)
    step(model, optimizer, 0)
    copy = wrapped(zero)
    copy.load_state_dict(model.state_dict())
    other = DistributedOptimizer(torch.optim.AdamW, model=copy, lr=7.0)
    if stepped:
        step(copy, other, 9)
        copy.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.01
    assert other.param_groups[0]["betas"] == (0.8, 0.99)
    for each, stepper in ((model, optimizer), (copy, other)):
        step(each, stepper, 1)
    for fqn, value in model.state_dict().items():
        assert torch.equal(copy.state_dict()[fqn], value)


@pytest.mark.parametrize("zero", [0, 1])
@ranks(2)
def test_loading_in_place(zero):
    """What a checkpoint does: fill the tensors of state_dict(), then hand the same structure back."""
    reference, model = wrapped(zero), wrapped(zero)
    source = DistributedOptimizer(torch.optim.AdamW, model=reference, **ADAMW)
    step(reference, source)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, **ADAMW)
    target, saved = optimizer.state_dict(), source.state_dict()
    for fqn, entries in target["state"].items():
        for (_, to), (_, come) in zip(
            entries["exp_avg"].__boxes__(), saved["state"][fqn]["exp_avg"].__boxes__(), strict=True
        ):
            to.copy_(come)
        for (_, to), (_, come) in zip(
            entries["exp_avg_sq"].__boxes__(), saved["state"][fqn]["exp_avg_sq"].__boxes__(), strict=True
        ):
            to.copy_(come)
        entries["step"].copy_(saved["state"][fqn]["step"])
    optimizer.load_state_dict(target)
    model.load_state_dict(reference.state_dict())
    for each, stepper in ((reference, source), (model, optimizer)):
        step(each, stepper, 1)
    for fqn, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[fqn], value)


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_loading_whole_tensors_such_as_those_of_a_plain_torch_optimizer(zero):
    reference = build()
    plain = torch.optim.AdamW(reference.parameters(), **ADAMW)
    step(reference, plain)
    names = [fqn for fqn, _ in reference.named_parameters()]
    numbered = plain.state_dict()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in numbered["param_groups"]]
    model = wrapped(zero, build())
    model.load_state_dict(reference.state_dict())
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model)
    optimizer.load_state_dict({"state": {names[i]: v for i, v in numbered["state"].items()}, "param_groups": groups})
    for each, stepper in ((reference, plain), (model, optimizer)):
        step(each, stepper, 1)
    for fqn, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value, rtol=1e-13, atol=0)


@ranks(2)
def test_loaded_state_is_not_shared_between_optimizers():
    models = [wrapped(1), wrapped(1)]
    optimizers = [DistributedOptimizer(torch.optim.AdamW, model=model, **ADAMW) for model in models]
    step(models[0], optimizers[0])
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    before = gather_state(optimizers[1].state_dict()["state"])["0.weight"]["exp_avg"].clone()
    step(models[0], optimizers[0])
    assert torch.equal(gather_state(optimizers[1].state_dict()["state"])["0.weight"]["exp_avg"], before)


def test_errors_on_loading():
    model = build()
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, **ADAMW)
    good = optimizer.state_dict()

    def with_state(**changes):
        state = {**good["state"], **changes}
        return {"state": {k: v for k, v in state.items() if v is not None}, "param_groups": good["param_groups"]}

    with pytest.raises(
        ValueError, match=r"another model or optimizer: parameters missing \['0.bias'\], unexpected \['x'\]"
    ):
        optimizer.load_state_dict(with_state(**{"0.bias": None, "x": {}}))
    with pytest.raises(ValueError, match=r"state of '0.bias' missing \['exp_avg', .*unexpected \['momentum_buffer'\]"):
        optimizer.load_state_dict(with_state(**{"0.bias": {"momentum_buffer": torch.zeros(5)}}))
    with pytest.raises(
        ValueError, match=r"has 0 param groups, this optimizer has 1; build it with the same param_groups"
    ):
        optimizer.load_state_dict({"state": good["state"], "param_groups": []})
    wrong = {**good["state"]["0.bias"], "exp_avg": torch.zeros(6)}
    with pytest.raises(ValueError, match=r"state of '0.bias' has global shape \(5,\), got \(6,\)"):
        optimizer.load_state_dict(with_state(**{"0.bias": wrong}))


@ranks(2)
def test_state_of_another_layout_is_refused():
    sharded = DistributedOptimizer(torch.optim.AdamW, model=wrapped(1)).state_dict()
    whole = DistributedOptimizer(torch.optim.AdamW, model=build())
    with pytest.raises(
        ValueError, match=r"other rectangles than this rank's .*load a checkpoint of another layout with"
    ):
        whole.load_state_dict(sharded)


class Counting(torch.optim.SGD):
    """Keeps a number per parameter whose initial value is unknown."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["number"] = torch.tensor(7.0)
        return super().step(closure)


def test_state_with_an_unknown_initial_value():
    model = build()
    optimizer = DistributedOptimizer(Counting, model=model)
    with pytest.raises(NotImplementedError, match=r"Counting keeps 'number' per parameter.* after the first step"):
        optimizer.state_dict()
    step(model, optimizer)
    assert "number" in optimizer.state_dict()["state"]["0.weight"]


def test_state_of_a_merged_projection_is_where_its_parameter_is():
    """Of an interleaved shard a rank holds several rectangles, of which ZeRO cuts a flat range."""
    weight = torch.arange(60.0).view(5, 12)

    def body(zero):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Module()
        module.w = nn.Parameter(distribute_tensor(weight, mesh["tp"], [InterleavedShard(1, 3)]))
        model = DDP(module, mesh["dp"], zero=zero)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model)
        state = optimizer.state_dict()["state"]["w"]["exp_avg"]
        piece = state.piece
        with torch.no_grad():  # write the elements' own numbers: the box says which they should be
            state.tensor.view(-1).copy_(piece.param.to_local().reshape(-1)[piece.start : piece.stop])
        boxes = [(offsets, view.clone()) for offsets, view in state.__boxes__()]
        wrong = [(tuple(o + 1 for o in offsets), view) for offsets, view in boxes]
        return boxes, [torch.equal(whole(offsets, view), view) for offsets, view in wrong]

    def whole(offsets, view):
        return weight[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))]

    for zero in (0, 1, 2):
        found = run_ranks(body, 4, zero)
        seen = torch.zeros(5, 12)
        for boxes, shifted in found:
            for offsets, view in boxes:
                assert torch.equal(whole(offsets, view), view)
                seen[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] += 1
            assert not any(shifted)
        assert (seen == (2 if zero == 0 else 1)).all()


def test_state_after_training_is_that_of_one_process(problem):
    """Also where a parameter's parts are on several ranks, and on a rank that has none of it."""
    expected = problem.one_process(torch.optim.AdamW, lr=0.01)

    def body():
        model = wrapped(2, problem.model())
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
        return problem.train(model, optimizer, coord=dist.get_rank(), size=4)

    for record in run_ranks(body, 4):
        assert_same_training(record, expected, rtol=1e-12)
