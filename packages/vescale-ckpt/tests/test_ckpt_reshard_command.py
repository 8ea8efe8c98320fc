"""`vescale-ckpt reshard` writes a checkpoint anew: all of it, a part, under other names, in another dtype."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import diff, load, read_manifest, save, verify
from vescale.ckpt.__main__ import main
from vescale.ckpt._exchange import rewrite
from vescale.ckpt._save import one_process
from vescale_testing import run_ranks


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A checkpoint of three ranks; parts and files of the new one are small."""
    monkeypatch.setattr(rewrite, "_PART_BYTES", 1000)
    monkeypatch.setattr(one_process, "_MAX_FILE_BYTES", 5000)
    path = tmp_path / "source"

    def body():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (3,))
        model = torch.nn.Linear(40, 50)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
        sharded = distribute_tensor(torch.arange(700.0).view(7, 100), mesh, [Shard(1)])
        state = {"model": model, "optimizer": optimizer, "sharded": sharded, "none": torch.empty(0, 2), "step": 7}
        save(path, state, metadata={"note": "a"})

    run_ranks(body, 3)
    return path


def test_all_of_it(source, tmp_path, capsys):
    assert main(["reshard", str(source), str(tmp_path / "new")]) == 0
    assert "from 1 rank" in capsys.readouterr().out
    assert diff(source, tmp_path / "new") == []
    manifest = verify(tmp_path / "new")
    assert manifest.metadata == {"note": "a"}
    assert manifest.optimizers == {"optimizer": "AdamW"}
    assert len(manifest.files) > 3


def test_a_part_under_another_name_and_dtype(source, tmp_path):
    new = tmp_path / "new"
    arguments = ["--match", "model/*", "--match", "step", "--rename", "model/=net/", "--dtype", "bfloat16"]
    assert main(["reshard", str(source), str(new), *arguments]) == 0
    manifest = read_manifest(new)
    assert set(manifest.tensors) == {"net/weight", "net/bias"}
    assert manifest.leaves == {"step": 7}
    assert manifest.optimizers == {}
    model, half = torch.nn.Linear(40, 50), torch.nn.Linear(40, 50, dtype=torch.bfloat16)
    load(source, {"model": model}, ignore=["optimizer", "sharded", "none", "step"])
    load(new, {"net": half}, ignore=["step"])
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_it_replaces_a_checkpoint_on_demand(source, tmp_path, capsys):
    new = tmp_path / "new"
    save(new, {"old": 1})
    assert main(["reshard", str(source), str(new)]) == 2
    assert "got an existing one" in capsys.readouterr().err
    assert main(["reshard", str(source), str(new), "--overwrite"]) == 0
    assert diff(source, new) == []


def test_nothing_matches(source, tmp_path, capsys):
    assert main(["reshard", str(source), str(tmp_path / "new"), "--match", "mode/*"]) == 2
    assert "expected names that match ['mode/*'], got none" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_damage_is_found(source, tmp_path, capsys):
    file = max(source.glob("save-*/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    assert main(["reshard", str(source), str(tmp_path / "new")]) == 2
    assert "bytes were changed or lost" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_renaming_without_a_sign(source, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["reshard", str(source), str(tmp_path / "new"), "--rename", "model"])
    assert "expected OLD=NEW, got 'model'" in capsys.readouterr().err
