"""Names and values of a folder of torch.distributed.checkpoint: what loads into which part of a state."""

import logging
from collections import Counter

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

from vescale.ckpt import CheckpointError, load_dcp, save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

VALUES = {
    "integer": 3,
    "float": 0.1,
    "infinite": float("inf"),
    "text": "äß",
    "none": None,
    "flag": True,
    "bytes": b"\0\xff",
    "list": [1, [2, 3]],
    "tuple": (1, (2, "a")),
    "list of dicts": [{"a": 1}, {"a": 2, "b": (3, 4)}],
    "dict": {"a": {"b": [1, 2]}, "c": 4},
}


@pytest.mark.parametrize("write", ["torch", "ours"])
@pytest.mark.parametrize("name", VALUES)
def test_plain_values(tmp_path, name, write):
    if write == "torch":
        dcp.save({"value": VALUES[name]}, checkpoint_id=tmp_path / "c")
    else:
        save_dcp(tmp_path / "c", {"value": VALUES[name]})
        found = {"value": VALUES[name]}
        dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
        assert found["value"] == VALUES[name]
    state = {"value": VALUES[name]} if isinstance(VALUES[name], dict | list | tuple) else {"value": "another"}
    load_dcp(tmp_path / "c", state, allow_pickle=True)
    assert state["value"] == VALUES[name]
    assert type(state["value"]) is type(VALUES[name])


def test_scalars_and_arrays_of_numpy(tmp_path):
    save_dcp(tmp_path / "c", {"lr": numpy.float64(0.5), "ids": numpy.arange(4)})
    found = {"lr": 0.0, "ids": torch.zeros(4, dtype=torch.int64)}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["lr"] == 0.5
    assert found["ids"].tolist() == [0, 1, 2, 3]
    state = {"lr": numpy.float64(0), "ids": numpy.zeros(4, dtype=numpy.int64)}
    load_dcp(tmp_path / "c", state, allow_pickle=True)
    assert state["lr"] == 0.5
    assert state["ids"].tolist() == [0, 1, 2, 3]


def test_dicts_with_integers_as_keys_get_them_back(tmp_path):
    """DCP makes strings of them; the state that is loaded says where they are integers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 80])
    state = {"scheduler": scheduler, "counts": {3: 1}, "names": {"3": 1}}
    dcp.save({**state, "scheduler": scheduler.state_dict()}, checkpoint_id=tmp_path / "torch")
    save_dcp(tmp_path / "ours", state)
    for path in ("torch", "ours"):
        other = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5])
        again = {"scheduler": other, "counts": {}, "names": {"3": 0}}
        again["counts"] = {7: 0}
        load_dcp(tmp_path / path, again, allow_pickle=True)
        assert other.milestones == Counter({3: 1, 80: 1})
        assert (again["counts"], again["names"]) == ({3: 1}, {"3": 1})


def test_tied_weights(tmp_path):
    def build():
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model = build()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torch")
    save_dcp(tmp_path / "ours", {"model": model})
    for path in ("torch", "ours"):
        other = build()
        load_dcp(tmp_path / path, {"model": other}, allow_pickle=True)
        assert torch.equal(other["embed"].weight, model["embed"].weight)
        assert other["head"].weight is other["embed"].weight
    found = {"model": build().state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert torch.equal(found["model"]["head.weight"], model["embed"].weight)


def test_a_part_of_a_model_under_another_name(tmp_path):
    model = torch.nn.ModuleDict({"backbone": torch.nn.Linear(4, 3), "head": torch.nn.Linear(3, 1)})
    dcp.save({"app": {"model": model.state_dict(), "step": 7}}, checkpoint_id=tmp_path / "c")
    encoder = torch.nn.Linear(4, 3)
    names = {"app/model/backbone.": "encoder/", "app/": ""}
    load_dcp(tmp_path / "c", {"encoder": encoder}, rename=names, ignore=["model", "step"], allow_pickle=True)
    assert torch.equal(encoder.weight, model["backbone"].weight)
    with pytest.raises(CheckpointError, match=r"expected beginnings of stored names in rename, got 'other/'"):
        load_dcp(tmp_path / "c", {"encoder": encoder}, rename={"other/": ""}, allow_pickle=True)


def test_missing_and_left_over_names_are_refused(tmp_path):
    dcp.save({"w": torch.ones(2), "step": 1}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"requested and not stored \(1\): 'v'"):
        load_dcp(tmp_path / "c", {"w": torch.zeros(2), "v": torch.zeros(2), "step": 0}, allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"stored and requested by no rank \(1\): 'step'"):
        load_dcp(tmp_path / "c", {"w": torch.zeros(2)}, allow_pickle=True)
    state = {"w": torch.zeros(2), "v": torch.zeros(2)}
    manifest = load_dcp(tmp_path / "c", state, strict=False, allow_pickle=True)
    assert torch.equal(state["w"], torch.ones(2))
    assert manifest.leaves == {"step": 1}
    assert manifest.tensors["w"].meta.shape == (2,)


def test_a_dtype_is_converted_if_asked(tmp_path):
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path / "c")
    state = {"w": torch.zeros(6, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="allow_dtype_cast=True converts"):
        load_dcp(tmp_path / "c", state, allow_pickle=True)
    load_dcp(tmp_path / "c", state, allow_dtype_cast=True, allow_pickle=True)
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({1, 2}, "expected a value that JSON knows, got set|expected what torch.load"),
        ((torch.ones(2), 3), "expected a plain value, got tensors inside of one"),
        (torch.zeros(2, dtype=torch.float8_e5m2fnuz), "expected a dtype of .*, got float8_e5m2fnuz"),
    ],
    ids=["set", "tuple of tensors", "dtype"],
)
def test_what_no_state_holds_is_named_or_skipped(tmp_path, caplog, value, fault):
    dcp.save({"a": {"odd": value, "w": torch.ones(2)}}, checkpoint_id=tmp_path / "c")
    state = {"a": {"w": torch.zeros(2)}}
    with pytest.raises(CheckpointError, match=rf"'a/odd': .*({fault}).*; to skip them, pass ignore=\['a/odd'\]"):
        load_dcp(tmp_path / "c", state, allow_pickle=True)
    load_dcp(tmp_path / "c", state, ignore=["a/odd"], allow_pickle=True)
    assert torch.equal(state["a"]["w"], torch.ones(2))
    with caplog.at_level(logging.WARNING, "vescale.ckpt"):
        load_dcp(tmp_path / "c", state, strict=False, allow_pickle=True)
    assert "1 values cannot be read, skipped: 'a/odd'" in caplog.text


def test_a_flat_state_dict_without_paths_has_its_keys_as_names(tmp_path):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model.w": torch.ones(2)}, checkpoint_id=tmp_path / "c", planner=planner)
    state = {"model.w": torch.zeros(2)}
    load_dcp(tmp_path / "c", state, allow_pickle=True)
    assert torch.equal(state["model.w"], torch.ones(2))
