"""A state with other names than the checkpoint: parts of models are loaded, wherever they were."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load, save
from vescale_testing import ranks


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)


@pytest.fixture
def saved(tmp_path):
    model = Classifier()
    save(tmp_path / "c", {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.25), "step": 7})
    return tmp_path / "c", model


def test_a_part_of_a_model(saved):
    path, model = saved
    encoder = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    load(path, {"encoder": encoder}, rename={"model/backbone.": "encoder/"}, ignore=["model", "optimizer", "step"])
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, model.backbone.state_dict()[name])


def test_without_it_the_names_are_missing(saved):
    """The sibling that breaks it."""
    with pytest.raises(CheckpointError, match=r"requested and not stored .*'encoder/0.bias'"):
        load(saved[0], {"encoder": nn.Sequential(nn.Linear(3, 5))})


def test_the_longest_beginning_counts(saved):
    path, model = saved
    state = {"net": {"first": nn.Linear(3, 5), "rest": {"backbone.1.weight": torch.zeros(4, 5)}}, "count": 0}
    rename = {"model/backbone.0.": "net/first/", "model/": "net/rest/", "step": "count"}
    load(path, state, rename=rename, strict=False)
    assert torch.equal(state["net"]["first"].weight, model.backbone[0].weight)
    assert torch.equal(state["net"]["rest"]["backbone.1.weight"], model.backbone[1].weight)
    assert state["count"] == 7


def test_an_optimizer_by_another_name(saved):
    path, model = saved
    fresh = torch.optim.AdamW(model.parameters())
    load(path, {"model": model, "adam": fresh, "step": 0}, rename={"optimizer": "adam"})
    assert fresh.param_groups[0]["lr"] == 0.25


@ranks(2)
def test_other_layouts(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(15.0).reshape(3, 5)
    save(tmp_path / "c", {"a": {"w": distribute_tensor(value, mesh, [Shard(0)])}})
    target = distribute_tensor(torch.zeros(3, 5), mesh, [Shard(1)])
    load(tmp_path / "c", {"b": target}, rename={"a/w": "b"})
    assert torch.equal(target.full_tensor(), value)
    given = {"a/w": "b"} if dist.get_rank() else {"a/": "b"}
    with pytest.raises(CheckpointError, match="expected the same rename on all ranks, got"):
        load(tmp_path / "c", {"b": target}, rename=given)


REFUSED = {
    "no such name": ({"net/": "model/"}, "expected beginnings of stored names in rename, got 'net/'; the names are"),
    "one name twice": (
        {"model/backbone.0.": "x/", "model/backbone.1.": "x/"},
        r"expected distinct names after rename, got 'x/bias' for 'model/backbone.0.bias' and",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(saved, case):
    rename, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=f"^{saved[0]}: {message}"):
        load(saved[0], {"model": saved[1]}, rename=rename)
