"""The comparison of the two dry runs, value by value.

A difference between the recording on DTensors and the check on local tensors is an error before the caller's own call
begins. The error names the module that caused it.

The comparison allows for rounding errors (see ``rounding``), because kernels may choose another order of additions for
another memory layout. Modules that are incorrect on local tensors differ by much more.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ... import _torch
from ...errors import NotLocalFriendlyError
from ..parts import Parts, likely_cause
from .dry_run import Run
from .observe import Seen, replicated
from .rounding import allowed, bound_of

__all__ = ["add_rows", "difference", "highest", "is_close", "maxima", "raise_together"]


def add_rows(run: Run, like: Run, mesh: DeviceMesh) -> None:
    """Add up, over data-parallel ranks, the gradients of values that all of them have. Collective over the mesh.

    Args:
        run: receives the sums.
        like: the recording, which decides on every rank what is added.
        mesh: the ranks, along its first axis.
    """
    pairs = list(itertools.zip_longest(like.observer.seen, run.observer.seen[: len(like.observer.seen)]))
    pairs = [(theirs.gradient, mine) for theirs, mine in pairs if theirs.is_summand and theirs.gradient is not None]
    expected = [*(gradient for gradient, _ in pairs), *(gradient for gradient, _ in like.gradients.values())]
    mine = [*(seen and seen.gradient for _, seen in pairs), *(run.gradients.get(n, (None,))[0] for n in like.gradients)]
    if not expected:
        return
    fitting = [
        m if m is not None and m.shape == e.shape else torch.zeros_like(e) for m, e in zip(mine, expected, strict=True)
    ]
    flat = torch.cat([value.reshape(-1).to(torch.promote_types(value.dtype, torch.float64)) for value in fitting])
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    placements = [Partial(), *[Replicate()] * (mesh.ndim - 1)]
    total = DTensor.from_local(flat, mesh, placements, run_check=False).redistribute(placements=replicated(mesh))
    flat = _torch.local_of(total)
    flat = torch.view_as_complex(flat) if flat.ndim > 1 else flat
    split = zip(flat.split([e.numel() for e in expected]), expected, strict=True)
    sums = [part.view(e.shape).to(e.dtype) for part, e in split]
    for (_, seen), value in zip(pairs, sums, strict=False):
        if seen is not None and (seen.gradient is None or seen.gradient.shape == value.shape):
            seen.gradient = value
    for name, value in zip(like.gradients, sums[len(pairs) :], strict=True):
        gradient, layout = run.gradients.get(name, (None, None))
        if gradient is None or gradient.shape == value.shape:
            run.gradients[name] = value, layout


def difference(eager: Run, local: Run, parts: Parts, nudged: Run | None = None) -> NotLocalFriendlyError | None:
    """Compare the two runs of a program; return an error about the first value that differs, None if there is none.

    Args:
        eager: the recording.
        local: the check.
        parts: the module.
        nudged: a recording that shows how far rounding errors reach.
    """
    try:
        _check_same(eager, local, parts, nudged)
    except NotLocalFriendlyError as error:
        return error
    return None


def _check_same(eager: Run, local: Run, parts: Parts, nudged: Run | None) -> None:
    difference = functools.partial(_difference, eager, parts)
    last = None
    for expected, actual, moved in _zipped(eager, local, nudged):
        where = expected.record.where
        if actual.record.where != where:
            raise difference(f"expected a value at {where!r}, but got one at {actual.record.where!r}", last, where)
        value = actual.of(expected.value)
        if value.shape != actual.value.shape:
            shapes = f"{tuple(value.shape)} at {where!r}, but got {tuple(actual.value.shape)}"
            raise difference(f"expected local shape {shapes}", last, where)
        if not is_close(actual.value, value, moved and actual.of(moved.value)):
            raise difference(f"{where!r} {_by_how_much(actual.value, value)}", last, where)
        last = where
    num_eager, num_local = len(eager.observer.seen), len(local.observer.seen)
    if num_eager != num_local:
        raise difference(f"expected {num_eager} values at boundaries, but got {num_local}", last, "")
    for name, expected in eager.buffers.items():
        actual, moved = local.buffers.get(name), nudged and nudged.buffers.get(name)
        if actual is None or actual.shape != expected.shape or not is_close(actual, expected, moved):
            what = f"buffer {name!r} after the call {_by_how_much(actual, expected)}"
            raise difference(what, None, name.rpartition(".")[0])
    _check_gradients(eager, local, nudged, difference)


def _check_gradients(
    eager: Run, local: Run, nudged: Run | None, difference: Callable[..., NotLocalFriendlyError]
) -> None:
    for expected, actual, moved in reversed(list(_zipped(eager, local, nudged))):
        is_alike = moved is not None and moved.gradient_layout == expected.gradient_layout
        if not _same_gradient(actual.gradient, expected.gradient, moved.gradient if is_alike else None):
            what = f"the gradient of {expected.record.where!r} {_by_how_much(actual.gradient, expected.gradient)}"
            raise difference(what, None, expected.record.where)
    for name, (expected, layout) in eager.gradients.items():
        actual = local.gradients.get(name, (None, None))[0]
        moved, its_layout = nudged.gradients.get(name, (None, None)) if nudged else (None, None)
        if not _same_gradient(actual, expected, moved if its_layout == layout else None):
            what = f"the gradient of parameter {name!r} {_by_how_much(actual, expected)}"
            raise difference(what, None, name.rpartition(".")[0])
    extra = [name for name in local.gradients if name not in eager.gradients]
    if extra:
        what = f"expected no gradient of parameter {extra[0]!r}, but got one"
        raise difference(what, None, extra[0].rpartition(".")[0])


def _zipped(eager: Run, local: Run, nudged: Run | None) -> Iterator[tuple[Seen, Seen, Seen | None]]:
    moved = nudged.observer.seen if nudged is not None else itertools.repeat(None)
    return zip(eager.observer.seen, local.observer.seen, moved, strict=False)


def _same_gradient(actual: Tensor | None, expected: Tensor | None, nudged: Tensor | None) -> bool:
    if actual is None or expected is None:
        missing = expected if actual is None else actual
        return missing is None or not missing.any()
    return actual.shape == expected.shape and is_close(actual, expected, nudged)


def is_close(actual: Tensor, expected: Tensor, nudged: Tensor | None = None) -> bool:
    """Return whether two values are equal up to rounding errors, which ``nudged`` may show."""
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return torch.equal(actual, expected)
    if expected.numel() == 0:
        return True
    bound = bound_of(expected.dtype)
    scale = float(torch.nan_to_num(expected, 0, 0, 0).abs().max())
    tolerance = bound * scale + allowed(expected, nudged)
    return torch.allclose(actual, expected, rtol=bound, atol=tolerance, equal_nan=True)


def _by_how_much(actual: Tensor | None, expected: Tensor | None) -> str:
    if actual is None or expected is None:
        return "exists in eager mode only" if actual is None else "exists in static mode only"
    if actual.shape != expected.shape:
        return f"has local shape {tuple(actual.shape)}, but {tuple(expected.shape)} in eager mode"
    distance = (actual.double() - expected.double()).abs().max() if actual.numel() else torch.zeros(())
    return f"differs by up to {float(distance):.3g}"


def _difference(eager: Run, parts: Parts, what: str, last: str | None, where: str) -> NotLocalFriendlyError:
    """Return the error about a difference at the boundary ``where``; ``last`` is the last boundary that agrees."""
    module = next((seen.module for seen in eager.observer.seen if seen.record.where == where), "")
    since = f" after {last!r}" if last else ""
    return NotLocalFriendlyError(
        f"static and eager mode diverge{since}: {what}. {likely_cause(parts, _owner(where) or module)}"
    )


def _owner(where: str) -> str:
    """Return the module of a boundary: ``a.b`` of ``a.b.input 'x'``."""
    found = re.match(r"(.*?)\.?(?:input|output|enters|returns)\b", where)
    return found.group(1) if found else where


def highest(level: float, mesh: DeviceMesh) -> float:
    """Return the maximum of a number over the ranks of a mesh. Collective over the mesh."""
    return maxima([level], mesh)[0]


def maxima(numbers: list[float], mesh: DeviceMesh) -> list[float]:
    """Return the maximum of each number over the ranks of a mesh. Collective over the mesh."""
    found = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
    return DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor().tolist()


def raise_together(error: Exception | None, mesh: DeviceMesh) -> None:
    """Raise ``error``, or, if only another rank has an error, one that points to it. Collective over the mesh.

    Raises:
        Exception: ``error`` on the ranks that have one; NotLocalFriendlyError on the others.
    """
    is_anywhere = highest(float(error is not None), mesh)
    if error is not None:
        raise error
    if is_anywhere:
        raise NotLocalFriendlyError("another rank of the mesh found this model unfit for local tensors; see its error")
