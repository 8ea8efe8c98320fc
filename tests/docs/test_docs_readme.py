"""The README's short example: the loss falls, one rank prints, and four processes give the losses of one."""

import re
from dataclasses import replace

import pytest
from projects import ROOT
from run_examples import programs, run

(EXAMPLE,) = programs(ROOT / "README.md")
STEP = "    metrics.step(tokens=tokens.numel(), loss=output.loss)"


def changed(old: str, new: str):
    """Return the example with another text in one place."""
    assert sum(old in line for line in EXAMPLE.lines) == 1
    return replace(EXAMPLE, lines=tuple(line.replace(old, new) for line in EXAMPLE.lines))


# All digits: two losses that differ by rounding may lie on both sides of a printed one.
PRINT = "; print(f\"\\n{row['step']}:{row['loss']:.9f};\")"
ALL_DIGITS = changed(STEP, STEP.replace("metrics", "row = metrics") + PRINT)


def losses(output: str) -> dict[str, float]:
    """Return the loss of every step, asserting that all ranks print the same."""
    printed = set(re.findall(r"(\d+):(\d+\.\d{9});", output))
    found = {step: float(loss) for step, loss in printed}
    assert 1 < len(found) == len(printed)
    return found


def test_four_processes_under_torchrun_train_as_one(run_forked):
    one_process = losses(run_forked(ALL_DIGITS))
    output = run(replace(ALL_DIGITS, num_processes=4))
    assert losses(output) == pytest.approx(one_process, rel=1e-5)  # float32
    assert len(re.findall(r"step \d+  loss", output)) == len(one_process)  # one rank prints
    lines = tuple(line.replace("manual_seed(0)", "manual_seed(1)") for line in ALL_DIGITS.lines)
    assert lines != ALL_DIGITS.lines  # with another seed it trains otherwise
    assert losses(run_forked(replace(ALL_DIGITS, lines=lines))) != pytest.approx(one_process, rel=1e-5)


def test_the_loss_falls(run_forked):
    found = re.findall(r"step (\d+)  loss (\d+\.\d+)", run_forked(EXAMPLE))
    assert [int(step) for step, _ in found] == list(range(1, 21))
    assert float(found[-1][1]) < 0.5 * float(found[0][1])


def test_a_loss_that_does_not_fall_is_found(run_forked):
    found = re.findall(r"step \d+  loss (\d+\.\d+)", run_forked(changed("lr=3e-3", "lr=0.0")))
    assert float(found[-1]) > 0.9 * float(found[0])
