"""The README's short example prints the same losses on one process and on four."""

from dataclasses import replace

from projects import ROOT
from run_examples import Program, programs, run

(EXAMPLE,) = programs(ROOT / "README.md")


def losses(program: Program, num_processes: int) -> set[str]:
    """Return the different lines that begin with "step", over all ranks."""
    output = run(replace(program, num_processes=num_processes))
    return {line for line in output.splitlines() if line.startswith("step ")}


def test_four_processes_train_as_one():
    one = losses(EXAMPLE, 1)
    assert len(one) > 1
    assert losses(EXAMPLE, 4) == one


def test_another_seed_trains_otherwise():
    lines = tuple(line.replace("manual_seed(0)", "manual_seed(1)") for line in EXAMPLE.lines)
    assert lines != EXAMPLE.lines
    assert losses(replace(EXAMPLE, lines=lines), 1).isdisjoint(losses(EXAMPLE, 1))
