"""Run programs of pages on forked ranks: what they import is imported once, not once in every process of every program.

Importing torch, transformers and veScale is nearly all that a short program takes. The README runs under torchrun all
the same (`test_docs_readme.py`), and every package's page in a process of its own in its unit session.
"""

import ast
import contextlib
import io
import os
import runpy
import socket
import sys

import pytest
import torch
import transformers  # noqa: F401 - not again in every rank
from run_examples import TIMEOUT_SECONDS, Program, run

import vescale.ckpt
import vescale.dmodule
import vescale.optim
import vescale.pipe
import vescale.plan  # noqa: F401
from vescale_testing import run_ranks


@pytest.fixture
def run_forked(tmp_path):
    """`run_forked(program)` does as `run_examples.run` and returns what all ranks printed; RankFailure if one fails."""

    def start(program: Program) -> str:
        starts_ranks = any("vescale_testing" in line for line in program.lines)
        if starts_ranks or torch.cuda.device_count():  # ranks have no ranks; CUDA does not survive a fork
            return run(program)
        script = tmp_path / (program.page.stem + ".py")
        script.write_text("\n".join(program.lines) + "\n", encoding="utf-8")
        _import_ahead(program)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            num_processes = max(1, program.num_processes)
            run_ranks(_run, num_processes, script, _free_port(), timeout=TIMEOUT_SECONDS, backend=None)
        return printed.getvalue()

    return start


def _import_ahead(program: Program) -> None:
    """Execute the program's top-level imports; one that fails is left for the program itself to report."""
    for node in ast.parse("\n".join(program.lines)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(ImportError):
                exec(compile(ast.Module([node], type_ignores=[]), str(program.page), "exec"), {})


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _run(script, port: int) -> None:
    """Run the script as `__main__`, in its folder, with the variables that torchrun sets."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
