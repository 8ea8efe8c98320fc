"""The command `vescale-ckpt`: what it prints, and its exit status."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vescale.ckpt import save
from vescale.ckpt.__main__ import main


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        state = {"model": {"a.weight": torch.full((2, 3), number), "b": torch.tensor(1.0)}, "step": number}
        save(f"step-{number}", state, metadata={"note": "x"})
    return tmp_path


@pytest.mark.usefixtures("checkpoints")
def test_inspect(capsys):
    assert main(["inspect", "step-1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "step-1: 2 tensors in 1 file, " in head
    assert "from 1 rank, saved 20" in head
    assert lines == [
        'metadata: {"note": "x"}',
        "step = 1",
        "model/a.weight  int64    2 x 3   48 B  1 piece",
        "model/b         float32  scalar  4 B   1 piece",
    ]


@pytest.mark.usefixtures("checkpoints")
def test_inspect_for_programs(capsys):
    assert main(["inspect", "step-2", "--json", "--match", "model/*.weight"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"] == {"model/a.weight": {"dtype": "int64", "shape": [2, 3], "pieces": 1}}
    assert found["values"] == {}
    assert found["world_size"] == 1


def test_verify(checkpoints, capsys):
    assert main(["verify", "step-1"]) == 0
    assert capsys.readouterr().out.endswith("from 1 rank: every byte is as it was saved\n")
    (file,) = (checkpoints / "step-1").glob("*/data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["verify", "step-1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("vescale-ckpt: ")
    assert "got faults in 1; use another checkpoint" in said.err


@pytest.mark.usefixtures("checkpoints")
def test_diff(capsys):
    assert main(["diff", "step-1", "step-1"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["diff", "step-1", "step-2"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step: 1 and 2",
        "model/a.weight: 6 of 6 elements differ, by at most 1",
    ]
    assert main(["diff", "step-1", "step-3"]) == 2
    assert "step-3: expected a checkpoint, got No such file" in capsys.readouterr().err


def test_the_output_in_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    shown = re.search(r"```console\n[$] vescale-ckpt inspect.*?\n(.*?)[$] vescale-ckpt diff", page, re.DOTALL)[1]
    exec(compile(example, "README.md", "exec"), {})
    capsys.readouterr()
    main(["inspect", "runs/step-3", "--match", "model/*"])
    main(["verify", "runs/step-3"])
    lines = [line for line in shown.splitlines() if not line.startswith("$")]
    path_or_time = r"\S+/runs|20\d\d-\S+ \S+ UTC"
    assert re.sub(path_or_time, "", capsys.readouterr().out) == re.sub(path_or_time, "", "\n".join(lines) + "\n")


@pytest.mark.usefixtures("checkpoints")
def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main(["verify", "step-1"])
    said = capsys.readouterr().err
    assert "100%" in said
    assert said.endswith("\r")  # it removes itself


@pytest.mark.usefixtures("checkpoints")
def test_as_a_program():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="vescale-ckpt")
    assert entry.load() is main
    done = subprocess.run([sys.executable, "-m", "vescale.ckpt", "diff", "step-1", "step-2"], capture_output=True)
    assert done.returncode == 1
    done = subprocess.run([sys.executable, "-m", "vescale.ckpt", "mend", "step-1"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 'mend'" in done.stderr
