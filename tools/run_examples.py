"""Run the Python examples of Markdown pages, so that no page shows code that does not work.

    python tools/run_examples.py README.md packages/vescale-pipe/README.md

The ` ```python ` blocks of one page are one program: a later block sees the names of the earlier ones, as a reader
does. The word after the language says how a block is run:

    ```python                  in one process, together with the page's other such blocks
    ```python torchrun=4       by itself, on 4 processes under torchrun
    ```python gpu              by itself, and only where there is a CUDA device

Every other language (`console`, `text`, `json`, ...) is for the reader's eyes. Each program is a real file in which
the lines outside of the block are empty: tracebacks show the page's own line numbers. It runs in a fresh process, in
an empty folder, with one thread.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^ {0,3}(?P<ticks>`{3,})\s*(?P<info>[^`]*)$")
OPTION = re.compile(r"torchrun=[1-9][0-9]*|gpu")
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Program:
    """Lines of a page that run together, at the line numbers they have in the page.

    Attributes:
        page: File the lines come from.
        lines: The whole page with every line outside of the program empty.
        num_processes: Processes under torchrun, or 0 for plain python.
        needs_gpu: Whether the program is skipped without a CUDA device.
    """

    page: Path
    lines: tuple[str, ...]
    num_processes: int = 0
    needs_gpu: bool = False

    @property
    def first_line(self) -> int:
        """Line of the page where the program begins, from 1."""
        return next(number for number, line in enumerate(self.lines, 1) if line.strip())


def blocks(text: str) -> list[tuple[str, range]]:
    """Return the info string and the indices of the inner lines of every fenced block."""
    found = []
    opening: tuple[str, str, int] | None = None
    for index, line in enumerate(text.splitlines()):
        match = FENCE.match(line)
        if not match:
            continue
        if opening is None:
            opening = match["ticks"], match["info"].strip(), index
        elif len(match["ticks"]) >= len(opening[0]) and not match["info"].strip():
            found.append((opening[1], range(opening[2] + 1, index)))
            opening = None
    if opening:
        raise ValueError(f"the block opened in line {opening[2] + 1} is never closed; add a line of {opening[0]}")
    return found


def programs(page: Path) -> list[Program]:
    """Return the programs of a page: its plain blocks as one, then each block with an option.

    Raises:
        ValueError: A block is not closed, or has an option other than ``torchrun=N`` and ``gpu``.
    """
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    plain: set[int] = set()
    special = []
    for info, inside in blocks(text):
        language, *options = info.split() or [""]
        if language != "python":
            continue
        for option in options:
            if not OPTION.fullmatch(option):
                raise ValueError(f"{page}:{inside.start}: unknown option {option!r}; use 'torchrun=N' or 'gpu'")
        if not options:
            plain.update(inside)
            continue
        counts = [int(option.partition("=")[2]) for option in options if option != "gpu"]
        kept = tuple(line if index in inside else "" for index, line in enumerate(lines))
        special.append(Program(page, kept, num_processes=sum(counts), needs_gpu="gpu" in options))
    kept = tuple(line if index in plain else "" for index, line in enumerate(lines))
    return ([Program(page, kept)] if any(map(str.strip, kept)) else []) + special


def has_gpu() -> bool:
    """Return whether torch finds a CUDA device."""
    import torch

    return torch.cuda.is_available()


def run_command(command: list[str], folder: Path) -> tuple[int | None, str]:
    """Run a command; return its status (None after the time-out) and what it printed."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: only torchrun itself can end its workers, which are in sessions of their own
        try:
            return None, process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return None, "it did not end after SIGTERM"
    return process.returncode, output


def run(program: Program) -> str:
    """Run one program with the current interpreter; return what it printed.

    Raises:
        RuntimeError: It ended with a non-zero status or ran into the time-out; the message holds its output.
    """
    with tempfile.TemporaryDirectory(prefix="example-") as folder:
        script = Path(folder, program.page.stem + ".py")
        script.write_text("\n".join(program.lines) + "\n", encoding="utf-8")
        command = [sys.executable]
        if program.num_processes:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={program.num_processes}"]
        status, output = run_command([*command, str(script)], Path(folder))
    place = f"{program.page}:{program.first_line}"
    if status is None:
        raise RuntimeError(f"{place}: not finished after {TIMEOUT_SECONDS} s\n{output}")
    if status:
        raise RuntimeError(f"{place}: exit status {status}\n{output}")
    return output


def pages(root: Path) -> list[Path]:
    """Return every Markdown page of the project: the root's, the packages', `docs/`, recipes and benchmarks."""
    places = ("*.md", "packages/*/*.md", "docs/**/*.md", "recipes/**/*.md", "benchmarks/**/*.md", "testing/*.md")
    return sorted(page for place in places for page in root.glob(place))


def main(names: list[str]) -> None:
    """Run every example of the named pages; exit with status 1 at the first that fails."""
    for page in map(Path, names):
        ran = 0
        for program in programs(page):
            if program.needs_gpu and not has_gpu():
                print(f"{page}:{program.first_line}: skipped, torch finds no CUDA device")
                continue
            try:
                run(program)
            except RuntimeError as error:
                sys.exit(str(error))
            ran += 1
        print(f"{page}: {ran} programs ran")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("usage: python tools/run_examples.py PAGE.md ...")
    main(sys.argv[1:])
