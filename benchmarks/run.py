"""Run the benchmarks: `python benchmarks/run.py [NAME ...] [--rounds N] [--save]`.

A benchmark is a file `bench_NAME.py` beside this one with a function `run(num_rounds) -> measure.Result`. Results are
printed; `--save` also writes each to `results/DATE-NAME.md` with hardware, versions, commit and command.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from measure import Result

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main(arguments: list[str]) -> None:
    """Run the benchmarks that `arguments` name, or all."""
    parser = argparse.ArgumentParser(prog="run.py", description="Run benchmarks and print ratios of medians.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds of each case (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write each result to benchmarks/results/")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2 to give a median and its spread, got {options.rounds}")
    torch.set_num_threads(1)
    for name in options.names or NAMES:
        result = importlib.import_module(f"bench_{name}").run(options.rounds)
        print(f"\n{result.title}\n\n{result.table()}", flush=True)
        if options.save:
            print(f"\nsaved in {_save(name, result, options.rounds)}")


def _save(name: str, result: Result, num_rounds: int) -> Path:
    today = datetime.date.today().isoformat()
    path = HERE / "results" / f"{today}-{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"# {result.title}\n\n"
        f"- date: {today}\n"
        f"- hardware: {_hardware()}\n"
        f"- software: torch {torch.__version__}, Python {platform.python_version()}\n"
        f"- commit: {_commit()}\n"
        f"- command: `python benchmarks/run.py {name} --rounds {num_rounds} --save`\n\n"
        f"{result.table()}\n"
    )
    return path.relative_to(HERE.parent)


def _hardware() -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([f"{model}, {os.cpu_count()} cores, one thread per process", *gpus])


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=HERE, text=True, capture_output=True, check=False)
        return done.stdout.strip()

    changes = " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changes


if __name__ == "__main__":
    main(sys.argv[1:])
