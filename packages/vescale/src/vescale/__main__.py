"""The command ``vescale``: look at a plan, and write the file that starts a run.

    vescale explain plan.json
    vescale explain plan.json --html plan.html --devices-per-host 8
    vescale compare runs/one runs/other
    vescale launch plan.json train.py --hosts 4 --to slurm > train.sbatch
    vescale launch plan.json train.py --hosts 4 --to kubernetes --image registry/train:1 -- --lr 3e-4 > train.yaml

Also as ``python -m vescale``. Exit status: 0; 1 if compared runs differ; 2 if the plan, a record or the arguments
cannot be used.
"""

import argparse
import sys
from collections.abc import Sequence

from vescale.plan import Plan

from ._compare import compare
from ._launch import TARGETS, launch_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process, and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:end])
    options.arguments = given[end + 1 :]
    try:
        status: int = options.run(options)
    except (OSError, TypeError, ValueError) as error:
        print(f"vescale: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vescale", description="Look at a plan, and start a run under it.")
    commands = parser.add_subparsers(title="commands", required=True)
    compared = commands.add_parser("compare", help="the first tensor that differs between two recorded runs")
    compared.add_argument("a", help="folder of vescale.record")
    compared.add_argument("b", help="folder of vescale.record")
    compared.add_argument("--bits", action="store_true", help="compare bits, whatever mode the runs were in")
    compared.set_defaults(run=_compare)
    explain = commands.add_parser("explain", help="memory per rank, ranks on the mesh, layouts of the search")
    explain.add_argument("plan", help="file of Plan.save")
    explain.add_argument("--html", metavar="FILE", help="write one page of HTML")
    explain.add_argument("--max-rows", type=int, default=40, metavar="N", help="rows of the table (default: 40)")
    explain.add_argument("--devices-per-host", type=int, metavar="N", help="show the hosts of ranks")
    explain.set_defaults(run=_explain)
    launch = commands.add_parser(
        "launch", help="print the file that starts a training script", epilog="Arguments of the script come after --."
    )
    launch.add_argument("plan", help="file of Plan.save")
    launch.add_argument("script", help="the training script")
    launch.add_argument("--to", choices=TARGETS, required=True, help="what starts the processes")
    launch.add_argument("--hosts", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    launch.add_argument("--name", default="train", help="of the job (default: train)")
    launch.add_argument("--port", type=int, default=29500, help="of the rendezvous (default: 29500)")
    launch.add_argument("--image", help="container image, for Kubernetes")
    launch.set_defaults(run=_launch)
    return parser


def _compare(options: argparse.Namespace) -> int:
    found = compare(options.a, options.b, bits=True if options.bits else None)
    print(found)
    return 0 if found.is_same else 1


def _explain(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    if options.html is not None:
        plan.explain_html(options.html, devices_per_host=options.devices_per_host)
    else:
        print(plan.explain(max_rows=options.max_rows, devices_per_host=options.devices_per_host))
    return 0


def _launch(options: argparse.Namespace) -> int:
    text = launch_file(
        Plan.load(options.plan),
        options.script,
        to=options.to,
        hosts=options.hosts,
        arguments=options.arguments,
        name=options.name,
        port=options.port,
        image=options.image,
    )
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
