"""The README's short example prints the same losses on one process and on four."""

import re
from dataclasses import replace

import pytest
from projects import ROOT
from run_examples import programs, run

(EXAMPLE,) = programs(ROOT / "README.md")
# All digits: two losses that differ by rounding may lie on both sides of a printed one.
ALL_DIGITS = replace(EXAMPLE, lines=tuple(line.replace(":.3f}", ":.9f}") for line in EXAMPLE.lines))


def losses(output: str) -> dict[str, float]:
    """Return the loss of every step, asserting that all ranks print the same."""
    # not line by line: ranks share one output, and the end of a line is written after its text
    printed = set(re.findall(r"step (\d+) loss (\d+\.\d{9})", output))
    found = {step: float(loss) for step, loss in printed}
    assert 1 < len(found) == len(printed)
    return found


def test_four_processes_under_torchrun_train_as_one(run_forked):
    one_process = losses(run_forked(ALL_DIGITS))
    assert losses(run(replace(ALL_DIGITS, num_processes=4))) == pytest.approx(one_process, rel=1e-5)  # float32
    lines = tuple(line.replace("manual_seed(0)", "manual_seed(1)") for line in ALL_DIGITS.lines)
    assert lines != ALL_DIGITS.lines  # with another seed it trains otherwise
    assert losses(run_forked(replace(ALL_DIGITS, lines=lines))) != pytest.approx(one_process, rel=1e-5)
