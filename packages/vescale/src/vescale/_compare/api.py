"""`compare`: two records, or two runs that it records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale.dtensor.extension import CheckedInside, FilePath, checked

from .file import open_record
from .find import find_first
from .record import record
from .result import Comparison

Run = Callable[..., object]


@checked
def compare(
    a: CheckedInside[str | os.PathLike[str] | Run],
    b: CheckedInside[str | os.PathLike[str] | Run],
    *,
    bits: bool | None = None,
    folder: FilePath | None = None,
) -> Comparison:
    """Name the first tensor that differs between two runs, in the order of the program.

    The layouts of the runs may differ, and so may the versions of the code. Compared are inputs and outputs of module
    calls, gradients of outputs, gradients of parameters, parameters and buffers. What only one run recorded, or what
    has no values on a rank, is listed and never taken as equal.

    Args:
        a: the folder of a record; or a run: a function of one argument, with which it records its training loop as
            with `vescale.record` without a path. Two runs are made again if a difference is found, for values, so
            they must start from their own seed and build their own model.
        b: the same.
        bits: compare bits; by default where both runs were inside of `vescale.dtensor.exact` with the same number of
            blocks. Otherwise a tensor differs if rounding does not explain the difference.
        folder: for the records of runs, on a file system that all ranks see; by default a temporary folder.

    Returns:
        The comparison; ``print`` shows it as one page. With runs, every rank gets the same.

    Raises:
        TypeError: one of the two is neither a folder nor a function.
        RecordError: a folder has no record that can be read.

    Example:
        >>> def run(record, lr):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(2, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        ...     with record(model, optimizer):
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        >>> import functools, torch
        >>> first = compare(functools.partial(run, lr=0.1), functools.partial(run, lr=0.2)).first
        >>> first.step, first.kind, first.fqn, first.index
        (0, 'parameter', 'weight', (0, 0))
    """
    labels = _label(a, "a"), _label(b, "b")
    with _shared_folder(folder) as shared:
        found = _compared((a, b), shared / "first", labels, bits, {})
        if found.first is None or not (callable(a) and callable(b)):
            return found
        chosen = {"steps": [found.first.step], "values": [found.first.fqn]}
        again = _compared((a, b), shared / "values", labels, bits, chosen).first
    if again is None or again.index is None:
        return found
    return dataclasses.replace(found, first=dataclasses.replace(found.first, index=again.index, values=again.values))


def _label(source: object, name: str) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if not callable(source):
        raise TypeError(
            f"compare: expected the folder of a record, or a function that records a run, for {name}, got "
            f"{type(source).__name__}; pass the path that vescale.record got"
        )
    function = source.func if isinstance(source, functools.partial) else source
    return str(getattr(function, "__name__", type(function).__name__))


def _compared(
    sources: tuple[Any, Any], folder: Path, labels: tuple[str, str], bits: bool | None, chosen: dict[str, Any]
) -> Comparison:
    """Record the runs among the sources, and compare."""
    folders = []
    for name, source in zip(("a", "b"), sources, strict=True):
        if callable(source):
            source(functools.partial(record, folder / name, **chosen))
            folders.append(folder / name)
        else:
            folders.append(Path(source))
    if dist.is_initialized():
        dist.barrier()
    found = find_first(labels, (open_record(folders[0], "a"), open_record(folders[1], "b")), bits=bits)
    if dist.is_initialized():
        dist.barrier()  # before the folder is removed
    return found


@contextlib.contextmanager
def _shared_folder(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Return the folder, or a temporary one that is the same on every rank."""
    if folder is not None:
        yield Path(folder)
        return
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with tempfile.TemporaryDirectory(prefix="vescale-compare-") if is_first else contextlib.nullcontext() as made:
        shared = [made]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, src=0)
        yield Path(str(shared[0]))
