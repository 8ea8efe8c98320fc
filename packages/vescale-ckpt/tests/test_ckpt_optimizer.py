"""Optimizers of torch.optim are stored by parameter name and move between layouts and pipeline stages."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load, read_manifest, save
from vescale_testing import ranks, run_ranks

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def build_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))


def shard_rows(model: torch.nn.Module, mesh) -> torch.nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(module, name, torch.nn.Parameter(sharded))
    return model


def build_optimizer(model: torch.nn.Module, kind=torch.optim.AdamW, **options) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, in another order than the model's."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1},
    ]
    return kind(groups, lr=0.01, **options)


def step_with_fixed_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizer.step()


def state_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters and all optimizer state, whole, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            found[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return found


def assert_equal_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(value),
)
def test_state_moves_between_one_process_and_shards(tmp_path, kind, options):
    def train_and_save(path, world):
        model = build_model(0)
        if world > 1:
            shard_rows(model, init_device_mesh("cpu", (world,)))
        optimizer = build_optimizer(model, kind, **options)
        for _ in range(2):
            step_with_fixed_gradients(model, optimizer)
        save(path, {"model": model, "optimizer": optimizer})
        return state_by_name(model, optimizer)

    def load_all(world):
        results = []
        for source in (1, 2):
            model = build_model(5)
            if world > 1:
                shard_rows(model, init_device_mesh("cpu", (world,)))
            optimizer = build_optimizer(model, kind, **options)
            load(tmp_path / str(source), {"model": model, "optimizer": optimizer})
            results.append(state_by_name(model, optimizer))
        return results

    expected = [run_ranks(train_and_save, world, tmp_path / str(world), world)[0] for world in (1, 2)]
    for world in (1, 2, 4):
        for found in run_ranks(load_all, world, world):
            assert_equal_state(found[0], expected[0])
            assert_equal_state(found[1], expected[1])


@ranks(2)
def test_one_optimizer_becomes_one_per_stage_and_back(tmp_path):
    rank = dist.get_rank()
    whole = build_model(0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.5)
    step_with_fixed_gradients(whole, optimizer)
    expected = state_by_name(whole, optimizer)
    save(tmp_path / "whole", {"model": whole, "optimizer": optimizer})

    stage = build_model(1)
    stage[1 - rank] = torch.nn.Identity()
    own = torch.optim.AdamW(stage.parameters(), lr=0.1)
    load(tmp_path / "whole", {"model": stage, "optimizer": own})
    assert own.param_groups[0]["lr"] == 0.5
    mine = {name: value for name, value in expected.items() if name.startswith(str(rank))}
    assert_equal_state(state_by_name(stage, own), mine)

    save(tmp_path / "stages", {"model": stage, "optimizer": own})
    again = build_model(2)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
    load(tmp_path / "stages", {"model": again, "optimizer": optimizer})
    assert_equal_state(state_by_name(again, optimizer), expected)


def test_names_in_the_manifest_are_the_models(tmp_path):
    model = build_model(0)
    optimizer = build_optimizer(model)
    step_with_fixed_gradients(model, optimizer)
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    manifest = read_manifest(tmp_path / "c")
    keys = {f"optimizer/state/{name}/{key}" for name in NAMES for key in ("exp_avg", "exp_avg_sq", "step")}
    assert {name for name in manifest.tensors if name.startswith("optimizer/")} == keys
    assert all("params" not in group for group in manifest.leaves["optimizer/param_groups"])


def test_loading_replaces_state_that_the_optimizer_already_has(tmp_path):
    model = build_model(0)
    optimizer = build_optimizer(model)
    save(tmp_path / "fresh", {"model": model, "optimizer": optimizer})
    step_with_fixed_gradients(model, optimizer)
    expected = state_by_name(model, optimizer)
    save(tmp_path / "stepped", {"model": model, "optimizer": optimizer})
    step_with_fixed_gradients(model, optimizer)
    load(tmp_path / "stepped", {"model": model, "optimizer": optimizer})
    assert_equal_state(state_by_name(model, optimizer), expected)
    load(tmp_path / "fresh", {"model": model, "optimizer": optimizer})
    assert not optimizer.state_dict()["state"]


def test_a_learning_rate_held_as_a_tensor_is_restored(tmp_path):
    model = build_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    load(tmp_path / "c", {"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"].item() == 0.25


def test_an_optimizer_without_its_model_is_refused(tmp_path):
    model = build_model(0)
    state = {"optimizer": build_optimizer(model), "other": build_model(1)}
    with pytest.raises(
        CheckpointError,
        match=r"'optimizer': expected parameter 0 \(param_groups\[0\], shape \(6,\)\) of AdamW in a module",
    ):
        save(tmp_path / "c", state)
    step_with_fixed_gradients(model, state["optimizer"])
    with pytest.raises(CheckpointError, match="put the optimizer itself into the state, next to its model"):
        save(tmp_path / "c", {"model": model, "optimizer": state["optimizer"].state_dict()})


def test_other_groups_are_refused_before_anything_changes(tmp_path):
    model = build_model(0)
    optimizer = build_optimizer(model)
    step_with_fixed_gradients(model, optimizer)
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    target = build_model(1)
    one_group = torch.optim.AdamW(target.parameters())
    with pytest.raises(CheckpointError, match="'optimizer/param_groups': expected 1, got 2 in the checkpoint"):
        load(tmp_path / "c", {"model": target, "optimizer": one_group})
    assert torch.equal(target[0].weight, build_model(1)[0].weight)
    assert not one_group.state


def test_state_in_containers_is_refused(tmp_path):
    model = build_model(0)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model[0].weight]["history"] = [torch.ones(3)]
    with pytest.raises(
        CheckpointError, match=r"parameter '0\.weight': expected .* of SGD, got a container in 'history'"
    ):
        save(tmp_path / "c", {"model": model, "optimizer": optimizer})
