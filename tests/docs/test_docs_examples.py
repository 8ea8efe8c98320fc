"""Every Python block of every page runs.

Every package's own page is run by its unit session, with only what the package declares, and the repository's by
`test_docs_readme.py`, also under torchrun: here, with everything installed, they run in `nox -s docs` alone.
"""

import pytest
from projects import ROOT
from run_examples import Program, has_gpu, pages, programs, run


def place(program: Program) -> str:
    return f"{program.page.relative_to(ROOT)}:{program.first_line}"


def runs_elsewhere(program: Program) -> bool:
    folder, name = program.page.relative_to(ROOT).parent, program.page.name
    return name == "README.md" and folder.parts[:1] in [(), ("packages",), ("testing",)]


PROGRAMS = [
    pytest.param(program, id=place(program), marks=[pytest.mark.thorough] if runs_elsewhere(program) else [])
    for page in pages(ROOT)
    for program in programs(page)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_runs(program):
    if program.needs_gpu and not has_gpu():
        pytest.skip("torch sees no CUDA device")
    failure = None
    try:
        run(program)
    except RuntimeError as error:
        failure = str(error)
    assert failure is None, failure
