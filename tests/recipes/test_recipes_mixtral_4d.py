"""The recipe trains to PASS, and what cannot run ends in one clear message before anything is started."""

import importlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "mixtral_4d"
ONE = ["--dp", "1", "--tp", "1", "--pp", "1"]


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.delenv("RANK", raising=False)
    default = torch.get_default_dtype()
    yield importlib.import_module("train")
    torch.set_default_dtype(default)


def start(*arguments):
    command = [sys.executable, str(RECIPE / "train.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp", "3"], "--tp: expected a divisor of num_attention_heads = 8, got 3"),
        (["--tp", "8"], "--tp: expected a divisor of num_key_value_heads = 4, got 8"),
        (["--pp", "5"], "--pp: expected at most one stage per layer, of which there are 4, got 5"),
        (["--dp", "3"], "--batch: expected a multiple of --dp 3, got 16"),
        (["--dp", "0"], "--dp: expected at least 1, got 0"),
        (["--microbatches", "3"], "--microbatches: expected a divisor of the 8 sequences of a rank, got 3"),
        (["--dropout", "1.5"], "--dropout: expected at least 0 and below 1, got 1.5"),
        (["--data", "missing.txt"], "--data: expected a text file, got missing.txt"),
        (["--tokenizer", "missing"], "--tokenizer: expected the folder of a Hugging Face tokenizer, got missing"),
        (["--resume", "missing"], "--resume: expected a folder such as runs/mixtral_4d/checkpoint, got missing"),
        (
            ["--resume-layout", "dp=2,tp=2,pp=1"],
            "expected degrees with the product dp * tp * pp = 2 * 2 * 2 = 8, got dp=2,tp=2,pp=1 with 4",
        ),
        (["--resume-layout", "dp2"], "expected degrees such as dp=4,tp=2,pp=1, got 'dp2'"),
        (["--steps", "1"], "--steps: expected at least 2, because the run stops in the middle, got 1"),
        (["--out", "/proc/nothing"], "--out: expected a writable folder, got /proc/nothing ("),
    ],
)
def test_bad_input_is_one_message(train, capsys, tmp_path, arguments, message):
    assert train.main(["--out", str(tmp_path), *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("mixtral_4d: error: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_an_empty_text_is_refused(train, capsys, tmp_path):
    text = tmp_path / "empty.txt"
    text.touch()
    assert train.main(["--out", str(tmp_path), "--data", str(text)]) == 2
    assert f"--data: expected a file with text, got the empty {text}; choose another" in capsys.readouterr().err
    text.write_text("too short")
    assert train.main(["--out", str(tmp_path), "--data", str(text)]) == 2
    assert "expected a text with more tokens than --seq 128, got 9" in capsys.readouterr().err


def test_a_port_in_use_is_refused(train, capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert train.main(["--out", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port: expected a free port, got {port}" in capsys.readouterr().err


def test_another_number_of_processes_is_refused(train, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert train.main(["--out", str(tmp_path)]) == 2
    assert "expected dp * tp * pp = 2 * 2 * 2 = 8 processes, got 6; start 8, or change" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "3")
    assert train.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == ""  # rank 0 speaks


def test_the_dry_run_shows_the_whole_layout(train, capsys):
    assert train.main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "pp1  dp0: tp [4, 5]  dp1: tp [6, 7]" in shown
    assert "0  model.layers.0.mlp.experts.down_proj  [4, 64, 128] S(0) -> [2, 64, 128]" in shown
    assert "1  lm_head.weight  [256, 64] S(0) -> [128, 64]" in shown
    assert re.search(r"rank 1 \| \. +\|F0", shown)
    assert "bytes per rank" in shown


def test_two_processes_train_resume_and_pass(tmp_path):
    small = ["--steps", 4, "--seq", 32, "--batch", 4, "--float64", "--out", tmp_path]
    done = start("--dp", 1, "--tp", 1, "--pp", 2, "--dropout", 0.1, "--resume-layout", "dp=1,tp=2,pp=1", *small)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("mixtral_4d: PASS max |loss difference| ")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["reference"] * 4 + ["4d"] * 4 + ["resumed"] * 2
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path):
    from vescale.ckpt import read_manifest, save

    other, out = tmp_path / "other", tmp_path / "out"
    save(str(other), {"model": torch.nn.Linear(3, 4), "step": 1})
    before = read_manifest(str(other))
    done = start(*ONE, "--no-reference", "--steps", 2, "--resume", other, "--out", out)
    assert done.returncode != 0
    assert done.stderr.startswith("mixtral_4d: error: ")
    assert "model/weight" in done.stderr
    assert read_manifest(str(other)) == before
    assert not (out / "checkpoint").exists()


@pytest.mark.parametrize("difference, verdict", [(1e-7, "PASS"), (1e-3, "FAIL"), (float("nan"), "FAIL")])
@pytest.mark.usefixtures("train")
def test_the_verdict_follows_the_bound(capsys, tmp_path, difference, verdict):
    report_module, config_module = sys.modules["report"], sys.modules["config"]
    report = report_module.Report(config_module.Config(steps=2, out=str(tmp_path)), 256, printing=True)
    report.reference([{"step": step, "loss": 5.0, "grad_norm": 1.0, "seconds": 1.0} for step in range(2)])
    for name in ("4d", "resumed"):
        report.start(name, config_module.Layout(2, 2, 2, 1))
        report.step(report_module.Step(1, 5.0 * (1 + difference), 1.0, 1.0, 100.0))
        report.parameters(name, 0.0, "model.norm.weight")
    assert report.finish() == (verdict == "FAIL")
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"mixtral_4d: {verdict} max |loss difference| ")
