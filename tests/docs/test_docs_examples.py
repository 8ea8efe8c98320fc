"""Every Python block of every page runs.

Every package's own page is run by its unit session, with only what the package declares, and the repository's by
`test_docs_readme.py`, also under torchrun: here, with everything installed, they run in `nox -s docs` alone.
"""

import pytest
from projects import ROOT
from run_examples import Program, has_gpu, pages, programs

from vescale_testing import RankFailure


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
def test_example_runs(program, run_forked):
    if program.needs_gpu and not has_gpu():
        pytest.skip("torch sees no CUDA device")
    run_forked(program)


@pytest.mark.parametrize("num_processes", [0, 2])
def test_an_example_that_fails_is_seen(run_forked, num_processes):
    lines = (
        "",
        "import os",
        "",
        "assert os.environ['RANK'] != os.environ['LOCAL_WORLD_SIZE'], 'first'",
        "raise OSError",
    )
    with pytest.raises(RankFailure, match=r'(?s)OSError.*page\.py", line 5'):
        run_forked(Program(ROOT / "page.md", lines, num_processes=num_processes))
