"""The state of one optimizer is not loaded into another: a strict load names both and changes nothing."""

import pytest
import torch

from vescale.ckpt import CheckpointError, load, read_manifest, save


def trained(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "step-1", trained(torch.optim.AdamW))
    return tmp_path / "step-1"


def test_the_manifest_names_the_class(path):
    assert read_manifest(path).optimizers == {"optimizer": "AdamW"}


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})]
)
def test_another_optimizer_is_refused(path, kind, options):
    state = trained(kind, **options)
    before = state["optimizer"].state_dict()
    expected = (
        rf"different optimizer \(1\): 'optimizer': expected {kind.__name__}, got the state of AdamW in the checkpoint; "
        r"build the stored optimizer, or leave yours out of the state and pass ignore=\['optimizer'\]"
    )
    with pytest.raises(CheckpointError, match=expected):
        load(path, state)
    assert str(state["optimizer"].state_dict()) == str(before)


def test_the_same_optimizer_is_loaded(path):
    state = trained(torch.optim.AdamW, weight_decay=0.5)
    load(path, state)
    assert state["optimizer"].param_groups[0]["weight_decay"] == 0.01


def test_the_ways_out_that_the_error_names(path):
    saved = trained(torch.optim.AdamW)
    model = trained(torch.optim.SGD)["model"]
    assert not torch.equal(model.weight, saved["model"].weight)
    load(path, {"model": model}, ignore=["optimizer"])
    assert torch.equal(model.weight, saved["model"].weight)
    state = trained(torch.optim.Adam)
    load(path, state, strict=False)
    assert state["optimizer"].param_groups[0]["weight_decay"] == saved["optimizer"].param_groups[0]["weight_decay"]


def test_a_checkpoint_without_classes_is_loaded(path, rewrite_manifest):
    rewrite_manifest(path, lambda body: body.pop("optimizers"))
    state = trained(torch.optim.Adam)
    load(path, state)
    assert state["optimizer"].param_groups[0]["weight_decay"] == 0.01
