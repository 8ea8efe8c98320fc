"""Every Python block of every page runs."""

import pytest
from projects import ROOT
from run_examples import Program, has_gpu, pages, programs, run

PROGRAMS = [program for page in pages(ROOT) for program in programs(page)]


def place(program: Program) -> str:
    return f"{program.page.relative_to(ROOT)}:{program.first_line}"


@pytest.mark.parametrize("program", PROGRAMS, ids=place)
def test_example_runs(program):
    if program.needs_gpu and not has_gpu():
        pytest.skip("torch sees no CUDA device")
    failure = None
    try:
        run(program)
    except RuntimeError as error:
        failure = str(error)
    assert failure is None, failure
