"""Run every operator of torch's database on DTensors in many placements and compare with one device.

    python packages/vescale-dtensor/coverage/run.py                      # with vescale.dtensor imported
    python packages/vescale-dtensor/coverage/run.py --stock              # stock torch: vescale is never imported
    python packages/vescale-dtensor/coverage/run.py --ops '^add$' --verbose
    python packages/vescale-dtensor/coverage/run.py --ops '^add$' --case '0:op:S0,R'

Four ranks on a mesh of four and on one of two by two; values, gradients, in-place and ``out=`` variants, changed
arguments, shapes, dtypes; random operators with equal seeds. Without ``--stock`` also what follows from a sample: dims
counted from the end, other data in the same process, results that are used and then read again.

Verdicts: right (sharded, or by gathering), refused,
wrong, diverged (ranks disagree or hang), died. Exit status 1 if anything was wrong, diverged or died (with ``--stock``
always 0).
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from plan import Case, Plan, make_plan
from report import BAD, Tally, describe, other_summary, summary, table, write
from samples import find_operators
from world import sweep

SAVE_S = 30.0  # seconds between two writings of the present results


def main() -> int:
    """Parse the command line, sweep, report."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not options.stock:
        import vescale.dtensor  # noqa: F401 - the package under test
    started = time.monotonic()
    only = Case.parse(options.case) if options.case else None
    operators = find_operators(re.compile(options.ops))
    plans = [
        make_plan(op, limit=options.samples, cap=options.cap, only=only, with_related=not options.stock)
        for op in operators
    ]
    num = sum(len(plan.cases) for plan in plans)
    print(f"{len(plans)} operators, {num} cases, planned in {time.monotonic() - started:.1f} s", flush=True)
    tallies = _run(plans, options)
    if options.out:
        _write(tallies, options)
        print(*table(tallies), sep="\n")
        if not options.stock and (stock := other_summary(options.out)):
            print(f"stock torch: {stock}")
    mode, seconds = "stock torch" if options.stock else "vescale.dtensor", time.monotonic() - started
    print(f"{mode}: {summary(tallies)} in {seconds:.0f} s")
    if options.stock:
        assert not any(name.startswith("vescale") for name in sys.modules), "vescale was imported"
    return int(not options.stock and any(tally.state in BAD for tally in tallies))


def _run(plans: list[Plan], options: argparse.Namespace) -> list[Tally]:
    tallies = {id(plan): Tally(plan) for plan in plans}
    open_cases = {id(plan): len(plan.cases) for plan in plans}
    written = time.monotonic()
    for found in sweep(plans, workers=options.workers, stock=options.stock):
        if options.out and time.monotonic() - written > SAVE_S:
            _write(list(tallies.values()), options)
            written = time.monotonic()
        key = id(found.plan)
        tallies[key].add(found)
        open_cases[key] -= 1
        if options.case:
            print(f"{found.verdict.kind}: {found.verdict}")
        if found.verdict.kind in BAD and (options.verbose or options.case):
            for name, value in describe(found, stock=options.stock).items():
                print(f"    {name}: {value}")
        if options.verbose and not open_cases[key]:
            counts = collections.Counter(tallies[key].counts)
            print(f"{found.plan.name}: {tallies[key].state} {dict(counts)}", flush=True)
            for (kind, moment, text), count in tallies[key].refusals.most_common(3):
                print(f"    {kind} {moment}, {count} times: {text}")
    return list(tallies.values())


def _write(tallies: list[Tally], options: argparse.Namespace) -> None:
    write(tallies, options.out, stock=options.stock, stem=options.stem or ("stock" if options.stock else "vescale"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="stock torch, without vescale.dtensor")
    parser.add_argument("--ops", default="", metavar="REGEX", help="only operators whose full name matches")
    parser.add_argument("--case", default="", metavar="KEY", help="only this case, as a finding names it")
    parser.add_argument(
        "--samples", type=int, default=2, metavar="N", help="samples per operator, and a few odd ones (default: 2)"
    )
    parser.add_argument("--cap", type=int, default=10, metavar="N", help="placements per main sample (default: 10)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="worlds side by side (default: 2)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write json, csv and md there")
    parser.add_argument("--stem", default="", help="name of these files (default: stock or vescale)")
    parser.add_argument("--verbose", action="store_true", help="a line per operator, and every finding")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
