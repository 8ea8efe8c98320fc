"""The command `vescale-ckpt import-dcp` makes a checkpoint of a folder of torch.distributed.checkpoint."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import load, read_manifest, verify
from vescale.ckpt.__main__ import main
from vescale_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = build()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    extra = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "none": torch.ones(0),
    }
    state = {"model": model_state, "optimizer": optimizer_state, "extra": extra, "step": 3, "tuple": (1, b"2")}
    dcp.save(state, checkpoint_id="dcp")
    return tmp_path


def new_state():
    model, optimizer = build()
    torch.nn.init.zeros_(model[0].weight)
    extra = {"half": torch.zeros(3, dtype=torch.bfloat16), "turned": torch.zeros(3, 2), "none": torch.ones(0)}
    return {"model": model, "optimizer": optimizer, "extra": extra, "step": 0, "tuple": ()}


@pytest.mark.usefixtures("folder")
def test_the_checkpoint_has_all_of_the_folder(capsys):
    assert main(["import-dcp", "dcp", "c", "--allow-pickle"]) == 0
    assert "c: 19 tensors in 1 file" in capsys.readouterr().out
    verify("c")
    state = new_state()
    load("c", state)
    model, optimizer = build()
    assert torch.equal(state["model"][0].weight, model[0].weight)
    assert torch.equal(
        state["optimizer"].state[state["model"][1].bias]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"]
    )
    assert state["extra"]["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (state["step"], state["tuple"]) == (3, (1, b"2"))
    assert state["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.usefixtures("folder")
def test_refused_without_leave_and_onto_another_checkpoint(capsys):
    assert main(["import-dcp", "dcp", "c"]) == 2
    assert "expected allow_pickle=True, got False" in capsys.readouterr().err
    assert main(["import-dcp", "dcp", "c", "--allow-pickle", "--ignore", "optimizer", "--ignore", "extra"]) == 0
    assert sorted(read_manifest("c").leaves) == ["step", "tuple"]
    assert len(read_manifest("c").tensors) == 4
    assert main(["import-dcp", "dcp", "c", "--allow-pickle"]) == 2
    assert "pass overwrite=True to replace a checkpoint" in capsys.readouterr().err
    assert main(["import-dcp", "dcp", "c", "--allow-pickle", "--overwrite"]) == 0
    assert len(read_manifest("c").tensors) == 19
    assert main(["import-dcp", "dcp", "d", "--allow-pickle", *("--ignore " + " --ignore ".join(
        ["model", "optimizer", "extra", "step", "tuple"])).split()]) == 2  # fmt: skip
    assert "expected names to import, got none" in capsys.readouterr().err


def test_chunks_of_several_files_become_one_tensor(tmp_path):
    value = torch.randn(7, 300)

    def save_shards():
        mesh = init_device_mesh("cpu", (3,))
        dcp.save({"w": distribute_tensor(value, mesh, [Shard(0)])}, checkpoint_id=tmp_path / "dcp")

    run_ranks(save_shards, 3)
    assert main(["import-dcp", str(tmp_path / "dcp"), str(tmp_path / "c"), "--allow-pickle"]) == 0
    state = {"w": torch.zeros(7, 300)}
    load(tmp_path / "c", state)
    assert torch.equal(state["w"], value)


def test_memory_is_bounded(tmp_path):
    """The process takes less than half of what the folder has, besides what it begins with."""
    dcp.save({f"w{i}": torch.zeros(16 * 1024**2) for i in range(4)}, checkpoint_id=tmp_path / "dcp")
    program = (
        "import sys, threading, time, pathlib; from vescale.ckpt.__main__ import main\n"
        "def anonymous():\n"
        "    lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "    return int(next(line for line in lines if line.startswith('RssAnon')).split()[1])\n"
        "before, most = anonymous(), [0]\n"
        "def watch():\n"
        "    while True:\n"
        "        most[0] = max(most[0], anonymous()); time.sleep(0.005)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "sys.exit(main(['import-dcp', *sys.argv[1:], '--allow-pickle']) or (most[0] - before > 128_000 and 9))\n"
    )
    arguments = [str(tmp_path / "dcp"), str(tmp_path / "c")]
    assert subprocess.run([sys.executable, "-c", program, *arguments], check=False, timeout=60).returncode == 0
