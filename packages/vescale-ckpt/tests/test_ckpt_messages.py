"""Ranks send each other JSON of known types: nothing that another rank sends is run, and other types are refused."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, PerRank, latest, load, save
from vescale.ckpt import _control as control
from vescale_testing import ranks


def state(mesh, fill):
    w = distribute_tensor(torch.full((5, 4), fill), mesh, [Shard(0)])
    return {"w": w, "b": torch.full((3,), fill), "step": int(fill), "rank": PerRank(dist.get_rank() + fill)}


@ranks(3)
def test_nothing_is_pickled(tmp_path, monkeypatch):
    mesh = init_device_mesh("cpu", (3,))
    saved, target = state(mesh, 1.0), state(mesh, 0.0)

    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    with monkeypatch.context() as patches:
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            patches.setattr(f"pickle.{name}", refuse)
        save(tmp_path / "step-1", saved, metadata={"note": "größer"}, keep_last=2)
        load(latest(tmp_path), target)
        with pytest.raises(CheckpointError, match=r"rank 1: 'fault': expected a tensor"):
            save(tmp_path / "step-2", {"fault": object() if dist.get_rank() == 1 else 1})
    assert torch.equal(target["w"].to_local(), saved["w"].to_local())
    assert torch.equal(target["b"], saved["b"])
    assert (target["step"], target["rank"].value) == (1, dist.get_rank() + 1.0)


@ranks(2)
def test_a_message_of_another_type_is_refused(tmp_path, monkeypatch):
    """As of a rank with another version of the package."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    stock = control._message

    def of_another_version(item):
        tree = json.loads(stock(item))
        return json.dumps({**tree, "since_version_2": []} if isinstance(tree, dict) else tree).encode()

    if dist.get_rank() == 1:
        monkeypatch.setattr(control, "_message", of_another_version)
    expected = "the message of rank 1: expected one of the keys .*, got 'since_version_2'"
    with pytest.raises(CheckpointError, match=expected):
        save(tmp_path / "c", {"w": tensor})
