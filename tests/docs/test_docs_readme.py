"""The README's short example prints the same losses on one process and on four."""

import re
from dataclasses import replace

import pytest
from projects import ROOT
from run_examples import Program, programs, run

(EXAMPLE,) = programs(ROOT / "README.md")
# All digits: two losses that differ by rounding may lie on both sides of a printed one.
ALL_DIGITS = replace(EXAMPLE, lines=tuple(line.replace(":.3f}", ":.9f}") for line in EXAMPLE.lines))


def losses(program: Program, *, num_processes: int) -> dict[str, float]:
    """Return the loss of every step, asserting that all ranks print the same."""
    # not line by line: ranks share one output, and the end of a line is written after its text
    printed = set(re.findall(r"step (\d+) loss (\d+\.\d{9})", run(replace(program, num_processes=num_processes))))
    found = {step: float(loss) for step, loss in printed}
    assert 1 < len(found) == len(printed)
    return found


@pytest.fixture(scope="module")
def one_process():
    return losses(ALL_DIGITS, num_processes=1)


def test_four_processes_train_as_one(one_process):
    assert losses(ALL_DIGITS, num_processes=4) == pytest.approx(one_process, rel=1e-5)  # float32


def test_another_seed_trains_otherwise(one_process):
    lines = tuple(line.replace("manual_seed(0)", "manual_seed(1)") for line in ALL_DIGITS.lines)
    assert lines != ALL_DIGITS.lines
    assert losses(replace(ALL_DIGITS, lines=lines), num_processes=1) != pytest.approx(one_process, rel=1e-5)
