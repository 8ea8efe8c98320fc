"""The parallel programs whose lines are counted train as on one device, and are as short as they should be."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BESIDE = ("bench_lines", "count_lines", "measure")  # what it imports from folders beside it


@pytest.fixture
def bench_lines(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    for name in BESIDE:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("bench_lines")
    for name in BESIDE:
        sys.modules.pop(name, None)


def test_the_programs_train_as_on_one_device_and_are_short(bench_lines):
    table = bench_lines.run(2).table()
    assert table.count(": met") == 5
    assert "| this version, derived plan | - | - | 6 |" in table
    assert "MISSED" not in table


def test_a_program_that_trains_something_else_has_no_length(bench_lines, monkeypatch):
    tiny = bench_lines._tiny
    monkeypatch.setattr(bench_lines, "PROGRAMS", {"LLaMA-3": "llama3"})
    monkeypatch.setattr(bench_lines, "VARIANTS", {"ready": "ready plan"})

    def other(name):
        config = tiny(name)
        config.rms_norm_eps = 0.5 if name.endswith("ready") else config.rms_norm_eps
        return config

    monkeypatch.setattr(bench_lines, "_tiny", other)
    with pytest.raises(RuntimeError, match=r"llama3_ready on rank 0 gives losses .*, one device"):
        bench_lines.run(2)


def test_too_many_lines_miss_the_target(bench_lines):
    counts = {"LLaMA-3": {"plan written out": 28}, "Mixtral": {"plan written out": 34}}
    result = bench_lines.LineCounts("", "", {}, counts)
    assert [line for model in counts for line in result._targets(model) if line.endswith("MISSED")] != []
    assert result._targets("LLaMA-3")[0].endswith("28 against 29 lines of veScale's paper: MISSED")  # 77.8 % fewer
    assert result._targets("Mixtral")[0].endswith("34 against 38 lines of veScale's paper: met")  # 79.0 % fewer
