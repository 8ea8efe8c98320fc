"""Run random programs on DTensors and compare each with one device, for a given time.

    python packages/vescale-dtensor/coverage/hunt.py --minutes 60 --seed 3
    python packages/vescale-dtensor/coverage/hunt.py --replay '{"mesh":[2],...}'   # a line that a finding prints

Programs of 5 to 15 lines on meshes of two, three, two by two and two by three ranks: views, writes, reductions,
products, indexing, random operators, gradients. The programs follow from the seed. Each finding is shrunk and printed
as a script and as a line for ``--replay``. Exit status 1 if anything was obscure, wrong, hung or died.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from generate import make_program
from program import Program, is_steady
from referee import BAD, KINDS, Referee, Verdict
from script import script
from shrink import shrink

__all__ = ["Finding", "Tally", "hunt", "programs_for", "replay"]

MESHES = ((2,), (3,), (2, 2), (2, 3))
BATCH = 40  # programs on one mesh before the next one
SHRINK_S = 60.0
NEW = 25  # findings to shrink


@dataclasses.dataclass
class Finding:
    """A program, shrunk, its verdict and how many programs had the like."""

    program: Program
    verdict: Verdict
    name: str
    count: int = 1


@dataclasses.dataclass
class Tally:
    """Counts of verdicts, and findings by what they have in common."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    refusals: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    findings: dict[str, Finding] = dataclasses.field(default_factory=dict)

    def summary(self) -> str:
        """Return the counts in one line."""
        right, refused, obscure, wrong, hangs, died = (self.counts[kind] for kind in KINDS)
        return (
            f"hunt: {self.counts.total()} programs: {right} right, {refused} refused, {obscure} obscure, "
            f"{wrong} wrong, {hangs} hangs, {died} died"
        )


def hunt(
    programs: Iterable[tuple[str, Program]], *, shrink_s: float = SHRINK_S, tell: Callable[[str], object] = len
) -> Tally:
    """Judge programs; shrink what is found.

    Args:
        programs: Name and program; best many on one mesh in a row. Those that have no steady result on one device are
            left out.
        shrink_s: How long to shrink one finding.
        tell: Called with the text of each finding, and with a summary when the mesh changes.
    """
    tally, referee = Tally(), None
    try:
        for name, program in programs:
            expected = is_steady(program)
            if expected is None:
                continue
            if referee is None or referee.mesh != program.mesh:
                if referee is not None:
                    referee.end()
                    tell(tally.summary())
                referee = Referee(program.mesh)
            verdict = referee.judge(program, expected)
            tally.counts[verdict.kind] += 1
            if verdict.kind == "refused":
                tally.refusals[_what(verdict)] += 1
            if verdict.is_bad:
                _add(tally, Finding(program, verdict, name), shrink_s, tell)
    finally:
        if referee is not None:
            referee.end()
    return tally


def replay(program: Program) -> Verdict:
    """Return the verdict on one program, on ranks that have run nothing else."""
    expected = is_steady(program)
    if expected is None:
        return Verdict("refused", "", "it has no result on one device that rounding errors leave alone")
    referee = Referee(program.mesh)
    try:
        return referee.judge(program, expected)
    finally:
        referee.end()


def _add(tally: Tally, finding: Finding, shrink_s: float, tell: Callable[[str], object]) -> None:
    """Shrink a new finding; count one that is known."""
    what = _what(finding.verdict)
    if what not in tally.findings and len(tally.findings) < NEW:
        finding.program, finding.verdict = _shrunk(finding.program, finding.verdict, shrink_s)
        if finding.verdict.kind == "wrong":  # the texts are numbers: what is wrong is known by the lines that are left
            what = f"wrong {sorted(map(_template, finding.program.lines))} {finding.program.order}"
    if what in tally.findings:
        tally.findings[what].count += 1
    else:
        tally.findings[what] = finding
        tell(_told(finding))


def _shrunk(program: Program, verdict: Verdict, seconds: float) -> tuple[Program, Verdict]:
    referees = {program.mesh: Referee(program.mesh)}
    latest = {program: verdict}

    def still_fails(candidate: Program, expected: dict) -> bool:
        referee = referees.setdefault(candidate.mesh, Referee(candidate.mesh))
        found = referee.judge(candidate, expected)
        if found.kind != verdict.kind or (found.kind != "wrong" and _what(found) != _what(verdict)):
            return False
        latest[candidate] = found
        return True

    try:
        if not still_fails(program, is_steady(program) or {}):
            text = f"only after the programs before it: {verdict.text}"
            return program, dataclasses.replace(verdict, text=text)
        small = shrink(program, still_fails, seconds=seconds)
    finally:
        for referee in referees.values():
            referee.end()
    return small, latest[small]


def _what(verdict: Verdict) -> str:
    """Return what findings of one cause have in common: the error without numbers, or the line of a refusal.

    Of a rank that died, the Python functions that were running.
    """
    if verdict.kind == "died" and (functions := re.findall(r"line \d+ in (\w+)", verdict.text)):
        return f"died in {' '.join(functions[:4])}"
    text = re.sub(r"\[[^]]*\]|\([^)]*\)", "", verdict.text)
    return f"{verdict.kind} {re.sub(r'[0-9.]+', '', text)[:120]}"


def _template(line: str) -> str:
    return re.sub(r"\b[xv]?\d+\b|-", "", line.partition(" = ")[2] or line)


def _told(finding: Finding) -> str:
    verdict = finding.verdict
    where = f" at `{verdict.where}`" if verdict.where else ""
    text = script(finding.program) + f"# --replay '{finding.program.replay_line()}'"
    return f"--- {verdict.kind.upper()}{where} ({finding.name}): {verdict.text}\n{text}\n"


def programs_for(
    seconds: float, seed: str, meshes: Sequence[tuple[int, ...]] = MESHES
) -> Iterator[tuple[str, Program]]:
    """Yield the programs of a seed for this long, a batch on each mesh in turn."""
    end, numbers = time.monotonic() + seconds, itertools.count()
    while True:
        for mesh in meshes:
            for number in itertools.islice(numbers, BATCH):
                if time.monotonic() > end:
                    return
                if (program := make_program(f"{seed}.{number}", mesh)) is not None:
                    yield f"seed {seed}.{number} on {mesh}", program


def main() -> int:
    """Parse the command line, hunt, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--mesh", default="", help="only this mesh, for example 2x2")
    parser.add_argument("--shrink", type=float, default=SHRINK_S, metavar="SECONDS", help="for each finding")
    parser.add_argument("--replay", default="", metavar="LINE", help="only this program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import vescale.dtensor  # noqa: F401 - the package under test

    if options.replay:
        program = Program.parse_line(options.replay)
        verdict = replay(program)
        print(script(program), f"{verdict.kind} {verdict.where}: {verdict.text}", sep="\n")
        return int(verdict.is_bad)
    meshes = (tuple(map(int, options.mesh.split("x"))),) if options.mesh else MESHES
    told = functools.partial(print, flush=True)
    tally = hunt(programs_for(60 * options.minutes, options.seed, meshes), shrink_s=options.shrink, tell=told)
    for what, count in tally.refusals.most_common():
        print(f"{count:5} {what}")
    for finding in tally.findings.values():
        lines = " ; ".join(finding.program.lines)
        print(f"{finding.count:5} {finding.verdict.kind}: {lines} {finding.verdict.text[:200]}")
    print(tally.summary())
    return int(any(tally.counts[kind] for kind in BAD))


if __name__ == "__main__":
    sys.exit(main())
