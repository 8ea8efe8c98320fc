"""`vescale-ckpt export-hf` and `import-hf` convert between checkpoints and folders of Hugging Face, without a model."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import diff, load, load_hf, save, save_hf
from vescale.ckpt.__main__ import main
from vescale_testing import ranks


def build(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3).bfloat16())


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("step-1", {"model": build(), "ema": build(2), "step": 1})
    return tmp_path / "step-1"


@pytest.mark.usefixtures("checkpoint")
def test_export(capsys):
    assert main(["export-hf", "step-1", "hf"]) == 0
    assert capsys.readouterr().out.endswith("hf: 1 file, complete with model.safetensors\n")
    loaded = build(3)
    load_hf("hf", loaded)
    for name, value in build().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert main(["export-hf", "step-1", "other", "--prefix", "ema", "--max-shard-bytes", "40"]) == 0
    assert capsys.readouterr().out.endswith("other: 4 files, complete with model.safetensors.index.json\n")
    load_hf("other", loaded)
    for name, value in build(2).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_import(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_hf("hf", build(), max_shard_bytes=40)
    assert main(["import-hf", "hf", "step-0"]) == 0
    assert "step-0: 4 tensors in 1 file, " in capsys.readouterr().out
    state = {"model": build(3)}
    load("step-0", state)
    for name, value in build().state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], value)
    assert main(["import-hf", "hf", "bare", "--prefix", ""]) == 0
    load("bare", dict(build(3).state_dict()))


def test_there_and_back_from_many_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = torch.randn(1030, 1031)  # more than a block, and uneven shards

    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,))
        for dim in (0, 1):
            save(f"step-{dim}", {"model": {"value": distribute_tensor(value, mesh, [Shard(dim)])}})

    on_every_rank()
    for dim in (0, 1):
        assert main(["export-hf", f"step-{dim}", f"hf-{dim}"]) == 0
        assert torch.equal(load_file(f"hf-{dim}/model.safetensors")["value"], value)
        assert main(["import-hf", f"hf-{dim}", f"back-{dim}"]) == 0
        assert diff(f"step-{dim}", f"back-{dim}") == []
    save("other", {"model": {"value": value + 1}})
    assert len(diff("step-0", "other")) == 1


@pytest.mark.usefixtures("checkpoint")
def test_what_is_refused(capsys):
    for arguments, message in (
        (
            ["export-hf", "step-1", "hf", "--prefix", "net"],
            "expected tensors under 'net/' in the checkpoint, got",
        ),
        (["export-hf", "step-2", "hf"], "step-2: expected a checkpoint, got No such file"),
        (["export-hf", "step-1", "step-1"], "expected a path that does not exist, or an empty folder"),
        (["import-hf", "step-1", "step-2"], "step-1: expected model.safetensors or model.safetensors.index.json"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert main(["export-hf", "step-1", "hf"]) == 0
    assert main(["import-hf", "hf", "step-1"]) == 2
    assert "expected a path that does not exist, got an existing one" in capsys.readouterr().err
    assert main(["export-hf", "step-1", "hf"]) == 2
    assert main(["export-hf", "step-1", "hf", "--overwrite"]) == 0
    assert main(["import-hf", "hf", "step-1", "--overwrite"]) == 0


def test_a_config_is_copied_and_an_unknown_one_says_nothing_of_names(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    save_hf("hf", build())
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "not of the library"}')
    assert main(["import-hf", "hf", "step-0"]) == 0
    assert "config.json: the names of the files are taken as those of the model" in caplog.text
    save("step-1", {"model": build()})
    assert diff("step-0", "step-1") == []
    assert main(["export-hf", "step-0", "back", "--config", "hf"]) == 0
    assert (tmp_path / "back" / "config.json").read_text() == '{"model_type": "not of the library"}'


@pytest.mark.usefixtures("checkpoint")
def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main(["export-hf", "step-1", "hf"])
    main(["import-hf", "hf", "step-0"])
    said = capsys.readouterr().err
    assert "exported 196 B of 196 B, 100%" in said
    assert "imported 196 B of 196 B, 100%" in said
    assert said.endswith("\r")


def test_a_file_whose_values_are_not_aligned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_hf("hf", build())
    file = tmp_path / "hf" / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    assert main(["import-hf", "hf", "step-0"]) == 0
    save("step-1", {"model": build()})
    assert diff("step-0", "step-1") == []
