"""The command ``vescale-ckpt``: look at checkpoints, verify, compare and convert them.

    vescale-ckpt inspect runs/step-100 --match "model/*.weight"
    vescale-ckpt verify runs/step-100
    vescale-ckpt diff runs/step-100 runs/step-200
    vescale-ckpt reshard runs/step-100 model-only --match "model/*" --dtype bfloat16
    vescale-ckpt import-dcp runs/dcp-100 runs/step-100 --allow-pickle
    vescale-ckpt export-hf runs/step-100 weights --config original
    vescale-ckpt import-hf original runs/step-0

Also as ``python -m vescale.ckpt``. Exit status: 0; 1 if checkpoints differ; 2 if one cannot be read or is damaged.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ._errors import CheckpointError
from ._exchange.dcp_import import import_dcp
from ._exchange.hf_convert import export_hf, import_hf
from ._exchange.rewrite import FLOATING, rewrite
from ._format.dtypes import ITEM_BYTES
from ._format.inspect import manifest_at, verify_files
from ._format.manifest import Manifest, StoredTensor
from ._format.storage import place_of
from ._load.difference import differences
from ._progress import Progress, size_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process, and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except CheckpointError as error:
        sys.stdout.flush()
        print(f"vescale-ckpt: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vescale-ckpt", description="Look at checkpoints, verify, compare and convert them."
    )
    commands = parser.add_subparsers(title="commands", required=True)
    inspect = commands.add_parser("inspect", help="list what a checkpoint holds, without reading tensors")
    inspect.add_argument("path", type=_path)
    inspect.add_argument("--match", metavar="PATTERN", default="*", help="only names like 'model/*.weight'")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser("verify", help="read every byte and compare the checksums")
    verify.add_argument("path", type=_path)
    verify.set_defaults(run=_verify)
    diff = commands.add_parser("diff", help="compare two checkpoints bit for bit, whatever their layouts")
    diff.add_argument("path", type=_path)
    diff.add_argument("other", type=_path)
    diff.set_defaults(run=_diff)
    reshard = commands.add_parser("reshard", help="write a checkpoint anew: a part of it, other names, another dtype")
    reshard.add_argument("path", type=_path, metavar="CHECKPOINT")
    reshard.add_argument("new", type=_path, metavar="NEW")
    reshard.add_argument("--match", metavar="PATTERN", action="append", default=[], help="keep names like 'model/*'")
    reshard.add_argument(
        "--rename", metavar="OLD=NEW", type=_renaming, action="append", default=[], help="replace beginnings of names"
    )
    reshard.add_argument("--dtype", choices=FLOATING, help="of floating-point tensors")
    reshard.add_argument("--overwrite", action="store_true", help="replace a checkpoint")
    reshard.set_defaults(run=_reshard)
    dcp = commands.add_parser("import-dcp", help="make a checkpoint of a folder of torch.distributed.checkpoint")
    dcp.add_argument("folder", type=_path)
    dcp.add_argument("path", type=_path)
    dcp.add_argument(
        "--allow-pickle", action="store_true", help="read the folder's pickle, if it names DCP's classes only"
    )
    dcp.add_argument("--ignore", metavar="NAME", action="append", default=[], help="leave out 'optimizer', for example")
    dcp.add_argument("--overwrite", action="store_true", help="replace a checkpoint")
    dcp.set_defaults(run=_import_dcp)
    export = commands.add_parser("export-hf", help="write the model of a checkpoint as a folder of Hugging Face")
    export.add_argument("path", type=_path, metavar="CHECKPOINT")
    export.add_argument("folder", type=_path, metavar="FOLDER")
    export.add_argument("--prefix", default="model", help="path of the model in the state (default: model)")
    export.add_argument("--config", type=_path, metavar="FOLDER", help="where the config.json of the model is")
    export.add_argument("--max-shard-bytes", type=int, default=5 * 10**9, metavar="N", help="of a file (default: 5e9)")
    export.add_argument("--overwrite", action="store_true", help="replace the weights in the folder")
    export.set_defaults(run=_export)
    imported = commands.add_parser("import-hf", help="write a folder of Hugging Face as a checkpoint")
    imported.add_argument("folder", type=_path, metavar="FOLDER")
    imported.add_argument("path", type=_path, metavar="CHECKPOINT")
    imported.add_argument("--prefix", default="model", help="path of the model in the state (default: model)")
    imported.add_argument("--overwrite", action="store_true", help="replace the checkpoint")
    imported.set_defaults(run=_import)
    return parser


def _path(text: str) -> Path:
    try:
        return place_of(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _renaming(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not (old and sign):
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return old, new


# --- commands ---


def _inspect(options: argparse.Namespace) -> int:
    manifest = manifest_at(options.path)
    tensors = {name: each for name, each in manifest.tensors.items() if fnmatch.fnmatchcase(name, options.match)}
    leaves = {name: each for name, each in manifest.leaves.items() if fnmatch.fnmatchcase(name, options.match)}
    if options.json:
        described = {
            name: {"dtype": each.meta.dtype, "shape": each.meta.shape, "pieces": each.layout.num_pieces}
            for name, each in tensors.items()
        }
        found = {
            "path": str(options.path),
            "world_size": manifest.world_size,
            "saved_at": manifest.saved_at,
            "metadata": manifest.metadata,
            "optimizers": manifest.optimizers,
            "values": leaves,
            "tensors": described,
        }
        print(json.dumps(found, indent=1))
        return 0
    saved_at = datetime.fromtimestamp(manifest.saved_at, UTC)
    print(f"{options.path}: {_summary(manifest)}, saved {saved_at:%Y-%m-%d %H:%M:%S} UTC")
    if manifest.metadata:
        print(f"metadata: {json.dumps(manifest.metadata)}")
    for path, kind in manifest.optimizers.items():
        print(f"optimizer {path}: {kind}")
    for name, value in leaves.items():
        text = json.dumps(value)
        print(f"{name} = {text if len(text) <= 80 else text[:77] + '...'}")
    rows = [_row(name, each) for name, each in tensors.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _verify(options: argparse.Namespace) -> int:
    manifest = manifest_at(options.path)
    with Progress("verified", sum(file.num_bytes for file in manifest.files.values())) as progress:
        verify_files(options.path, manifest, progress)
    print(f"{options.path}: {_summary(manifest)}: every byte is as it was saved")
    return 0


def _diff(options: argparse.Namespace) -> int:
    tensors = manifest_at(options.path).tensors.values()
    count = 0
    with Progress("compared", sum(map(_num_bytes, tensors))) as progress:
        for difference in differences(options.path, options.other, progress):
            progress.end()
            print(difference)
            count += 1
    return 1 if count else 0


def _reshard(options: argparse.Namespace) -> int:
    with Progress("written", 0) as progress:
        manifest = rewrite(
            options.path,
            options.new,
            match=options.match,
            rename=dict(options.rename),
            dtype=options.dtype,
            overwrite=options.overwrite,
            progress=progress.of,
        )
    print(f"{options.new}: {_summary(manifest)}")
    return 0


def _import_dcp(options: argparse.Namespace) -> int:
    import_dcp(
        options.folder,
        options.path,
        allow_pickle=options.allow_pickle,
        ignore=options.ignore,
        overwrite=options.overwrite,
    )
    print(f"{options.path}: {_summary(manifest_at(options.path))}")
    return 0


def _export(options: argparse.Namespace) -> int:
    with Progress("exported", 0) as progress:
        names = export_hf(
            options.path,
            options.folder,
            prefix=options.prefix,
            config=options.config,
            max_shard_bytes=options.max_shard_bytes,
            overwrite=options.overwrite,
            progress=progress.of,
        )
    print(f"{options.folder}: {_count(len(names), 'file')}, complete with {names[-1]}")
    return 0


def _import(options: argparse.Namespace) -> int:
    with Progress("imported", 0) as progress:
        manifest = import_hf(
            options.folder, options.path, prefix=options.prefix, overwrite=options.overwrite, progress=progress.of
        )
    print(f"{options.path}: {_summary(manifest)}")
    return 0


# --- texts ---


def _summary(manifest: Manifest) -> str:
    size = sum(file.num_bytes for file in manifest.files.values())
    tensors, files = _count(len(manifest.tensors), "tensor"), _count(len(manifest.files), "file")
    return f"{tensors} in {files}, {size_text(size)}, from {_count(manifest.world_size, 'rank')}"


def _row(name: str, tensor: StoredTensor) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor.meta.shape)) or "scalar"
    return name, tensor.meta.dtype, shape, size_text(_num_bytes(tensor)), _count(tensor.layout.num_pieces, "piece")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.meta.shape) * ITEM_BYTES[tensor.meta.dtype]


if __name__ == "__main__":
    sys.exit(main())
