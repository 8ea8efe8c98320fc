"""A folder of Hugging Face is complete or refused, whenever a save ends; one that exists is not overwritten unasked."""

import os
import pathlib

import pytest
import torch

from vescale.ckpt import CheckpointError, load_hf, save_hf


def build(value):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def loaded(folder):
    """Return the one value of all tensors in a folder."""
    module = build(-1)
    load_hf(folder, module)
    (value,) = {float(each) for parameter in module.parameters() for each in parameter.detach().view(-1)}
    return value


@pytest.fixture
def folder(tmp_path):
    save_hf(tmp_path / "hf", build(1), max_shard_bytes=80)
    return tmp_path / "hf"


def test_an_existing_folder_is_refused(folder, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"hf: expected a path that does not exist, or an empty folder, got one with"
    ):
        save_hf(folder, build(2))
    assert loaded(folder) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder, got a file; save to another path"):
        save_hf(tmp_path / "file", build(2), overwrite=True)
    with pytest.raises(CheckpointError, match="expected a writable path, got NotADirectoryError"):
        save_hf(tmp_path / "file" / "hf", build(2))


@pytest.mark.parametrize("max_shard_bytes", [10**6, 80, 1])
def test_overwrite_replaces_the_weights_alone(folder, max_shard_bytes):
    (folder / "tokenizer.json").write_text("{}")
    save_hf(folder, build(2), max_shard_bytes=max_shard_bytes, overwrite=True)
    assert loaded(folder) == 2
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert len(list(folder.glob("*.safetensors"))) == {10**6: 1, 80: 2, 1: 4}[max_shard_bytes]
    assert not list(folder.glob(".vescale-*"))


def outcome(call):
    """Return what a call returns, or the text of its error."""
    try:
        return call()
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("max_shard_bytes", [10**6, 80])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_ends_anywhere_leaves_no_folder_of_two(tmp_path, monkeypatch, max_shard_bytes, overwrite):
    """Let the n-th change of the folder fail, for every n: the folder has old weights, is refused, or has new ones."""
    left = [10**6]

    def guarded(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise OSError("the disk is full")
            return function(*args, **kwargs)

        return call

    for name in ("replace", "pwrite", "fsync"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    monkeypatch.setattr(pathlib.Path, "unlink", guarded(pathlib.Path.unlink))
    found = []
    for number in range(100):
        folder = tmp_path / f"hf-{number}"
        if overwrite:
            save_hf(folder, build(1), max_shard_bytes=80)
        left[0] = number
        text = outcome(lambda: save_hf(folder, build(2), max_shard_bytes=max_shard_bytes, overwrite=overwrite))  # noqa: B023
        left[0] = 10**6
        found.append(outcome(lambda: loaded(folder)))  # noqa: B023
        if text is None:
            break
        assert "the disk is full" in text
    refused = [value for value in found if isinstance(value, str)]
    assert all("got neither" in text for text in refused)
    states = ["refused" if isinstance(value, str) else value for value in found]
    assert states == sorted(states, key=[1.0, "refused", 2.0].index)
    assert set(states) == {1.0, "refused", 2.0} - ({1.0} if not overwrite else set())


def test_what_a_killed_save_leaves_is_no_obstacle(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / ".vescale-0123abcd-0").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="got neither"):
        loaded(tmp_path / "hf")
    save_hf(tmp_path / "hf", build(2))
    assert loaded(tmp_path / "hf") == 2


def test_a_config_is_saved_with_the_weights(tmp_path):
    class Config:
        def save_pretrained(self, folder):
            (tmp_path / "hf" / "config.json").write_text(f"{folder}")

    module = build(2)
    module.config = Config()
    save_hf(tmp_path / "hf", module)
    assert (tmp_path / "hf" / "config.json").read_text() == str(tmp_path / "hf")
