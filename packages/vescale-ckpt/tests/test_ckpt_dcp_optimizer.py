"""A run goes on in another library: the optimizers of torch, saved by one and loaded by the other, under any layout."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load_dcp, save_dcp
from vescale_testing import ranks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95)),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01),
}
WORLDS = (1, 2, 3)


def build(kind: str, world: int, *, seed: int = 0):
    """Return a model of sharded rows, and an optimizer with two groups in another order than the model's."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placement = Shard(0) if name == "weight" else Replicate()
                sharded = distribute_tensor(parameter.detach(), mesh, [placement])
                setattr(module, name, torch.nn.Parameter(sharded))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1},
    ]
    return model, OPTIMIZERS[kind](groups)


def train(model, optimizer, steps) -> None:
    for step in steps:
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()


def whole(model) -> dict[str, torch.Tensor]:
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in values.items()}


def count_differences(found: dict, expected: dict) -> int:
    assert found.keys() == expected.keys()
    return sum(not torch.equal(found[name], value) for name, value in expected.items())


def uninterrupted(kind):
    model, optimizer = build(kind, 1)
    train(model, optimizer, range(4))
    return whole(model)


def save_all(kind, world, root):
    model, optimizer = build(kind, world)
    train(model, optimizer, range(2))
    save_dcp(root / f"ours {world}", {"model": model, "optimizer": optimizer})
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        path = root / f"torch {'flat ' * flat}{world}"
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load_here(kind, world, path):
    model, optimizer = build(kind, world, seed=1)
    optimizer.param_groups[1]["lr"] = 5.0
    load_dcp(path, {"model": model, "optimizer": optimizer}, allow_pickle=True)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert optimizer.param_groups[0].get("betas") in (None, (0.8, 0.95))
    return model, optimizer


def load_there(kind, world, path):
    model, optimizer = build(kind, world, seed=1)
    optimizer.param_groups[1]["lr"] = 5.0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return model, optimizer


def go_on(kind, world, root, flat_too):
    """Return the parameters after two more steps, by what was loaded."""
    found = {}
    for source in WORLDS:
        names = [f"ours {source}", f"torch {source}", *([f"torch flat {source}"] if flat_too else [])]
        for name in names:
            model, optimizer = load_here(kind, world, root / name)
            train(model, optimizer, range(2, 4))
            found[f"here, {name}"] = whole(model)
        model, optimizer = load_there(kind, world, root / f"ours {source}")
        train(model, optimizer, range(2, 4))
        found[f"there, ours {source}"] = whole(model)
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_more_steps_equal_those_of_the_run_that_went_on(tmp_path, kind):
    expected = run_ranks(uninterrupted, 1, kind)[0]
    for world in WORLDS:
        run_ranks(save_all, world, kind, world, tmp_path)
    for world in WORLDS:
        for rank in run_ranks(go_on, world, kind, world, tmp_path, True):
            for source, found in rank.items():
                assert count_differences(found, expected) == 0, (world, source)


def test_a_lost_moment_is_found(tmp_path):
    expected = uninterrupted("AdamW")
    model, optimizer = build("AdamW", 1)
    train(model, optimizer, range(2))
    optimizer.state[model[0].weight]["exp_avg"].zero_()
    save_dcp(tmp_path / "c", {"model": model, "optimizer": optimizer})
    model, optimizer = load_here("AdamW", 1, tmp_path / "c")
    train(model, optimizer, range(2, 4))
    assert count_differences(whole(model), expected) == 1


@ranks(2)
def test_stages_of_a_pipeline_become_one_optimizer(tmp_path):
    rank = dist.get_rank()
    model, optimizer = build("AdamW", 1)
    train(model, optimizer, range(2))
    expected = whole(model)
    stage = torch.nn.Sequential(*[layer if i == 2 * rank else torch.nn.Identity() for i, layer in enumerate(model)])
    own = torch.optim.AdamW(stage.parameters(), lr=0.25)
    own.load_state_dict({**own.state_dict(), "state": {
        i: optimizer.state[parameter] for i, parameter in enumerate(stage.parameters())
    }})  # fmt: skip
    save_dcp(tmp_path / "c", {"model": stage, "optimizer": own})

    other, _ = build("AdamW", 1, seed=1)
    whole_optimizer = torch.optim.AdamW(other.parameters())
    model_state, optimizer_state = get_state_dict(other, whole_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "c")
    set_state_dict(other, whole_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert count_differences(whole(other), expected) == 0
    assert whole_optimizer.param_groups[0]["lr"] == 0.25
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole_optimizer.state[same]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_an_optimizer_by_numbers_is_refused_unless_it_is_ignored(tmp_path):
    model, optimizer = build("AdamW", 1)
    train(model, optimizer, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "c")
    other, fresh = build("AdamW", 1, seed=1)
    with pytest.raises(
        CheckpointError,
        match=r"'optimizer/param_groups': expected parameters by name, got numbers.*get_optimizer_state_dict",
    ):
        load_dcp(tmp_path / "c", {"model": other, "optimizer": fresh}, allow_pickle=True)
    load_dcp(tmp_path / "c", {"model": other}, ignore=["optimizer"], allow_pickle=True)
    assert count_differences(whole(other), whole(model)) == 0


def test_flat_hyperparameters_must_agree_in_a_group(tmp_path):
    model, optimizer = build("AdamW", 1)
    train(model, optimizer, range(1))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optimizer": flat}, checkpoint_id=tmp_path / "c")
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        CheckpointError,
        match=r"equal hyperparameters in group 0, got others of '0\.weight' and '0\.bias'; build the optimizer",
    ):
        load_dcp(tmp_path / "c", {"model": model, "optimizer": one_group}, allow_pickle=True)
    empty = torch.nn.Module()
    empty.other = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"expected parameters of group 0 \(\['other'\]\), got none of them"):
        load_dcp(
            tmp_path / "c",
            {"model": empty, "optimizer": torch.optim.AdamW(empty.parameters())},
            allow_pickle=True,
        )
