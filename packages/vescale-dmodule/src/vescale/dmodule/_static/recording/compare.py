"""The comparison of two dry runs, value by value.

What differs between the recording on DTensors and the check on local tensors is reported with the module in which it
came about, before the caller's own call begins.

The comparison allows for rounding, because kernels may choose another order of additions for another layout in memory.
A module that is not right on local tensors is wrong by far more.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from ...errors import NotLocalFriendlyError
from ..parts import ways_out
from .dry_run import Run

__all__ = ["check_same", "raise_together"]


def check_same(eager: Run, local: Run) -> None:
    """Compare the two runs.

    Raises:
        NotLocalFriendlyError: naming the first place where they differ, the modules before it, and the ways out.
    """
    last = None
    for expected, actual in zip(eager.observer.seen, local.observer.seen, strict=False):
        where = expected.record.where
        if actual.record.where != where:
            raise _difference(f"{where!r} came next, but {actual.record.where!r}", eager, last, where)
        if expected.value.shape != actual.value.shape:
            what = f"has local shape {tuple(expected.value.shape)}, but {tuple(actual.value.shape)}"
            raise _difference(f"{where!r} {what}", eager, last, where)
        if not _close(actual.value, expected.value):
            raise _difference(f"{where!r} {_by_how_much(actual.value, expected.value)}", eager, last, where)
        last = where
    num_eager, num_local = len(eager.observer.seen), len(local.observer.seen)
    if num_eager != num_local:
        raise _difference(f"{num_eager} values are at boundaries, but {num_local}", eager, last, "")
    for name, expected in eager.buffers.items():
        actual = local.buffers.get(name)
        if actual is None or actual.shape != expected.shape or not _close(actual, expected):
            what = f"buffer {name!r} after the call {_by_how_much(actual, expected)}"
            raise _difference(what, eager, None, name.rpartition(".")[0])
    _check_gradients(eager, local)


def _check_gradients(eager: Run, local: Run) -> None:
    for expected, actual in zip(reversed(eager.observer.seen), reversed(local.observer.seen), strict=True):
        if not _same_gradient(actual.gradient, expected.gradient):
            what = f"the gradient of {expected.record.where!r} {_by_how_much(actual.gradient, expected.gradient)}"
            raise _difference(what, eager, None, expected.record.where)
    for name, (expected, _) in eager.gradients.items():
        actual = local.gradients.get(name, (None, None))[0]
        if not _same_gradient(actual, expected):
            what = f"the gradient of parameter {name!r} {_by_how_much(actual, expected)}"
            raise _difference(what, eager, None, name.rpartition(".")[0])
    extra = [name for name in local.gradients if name not in eager.gradients]
    if extra:
        raise _difference(f"parameter {extra[0]!r} has no gradient, but one", eager, None, extra[0].rpartition(".")[0])


def _same_gradient(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        missing = expected if actual is None else actual
        return missing is None or not missing.any()
    return actual.shape == expected.shape and _close(actual, expected)


def _close(actual: Tensor, expected: Tensor) -> bool:
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return torch.equal(actual, expected)
    if expected.numel() == 0:
        return True
    bound = 32 * torch.finfo(expected.dtype).eps ** 0.75
    scale = torch.nan_to_num(expected, 0, 0, 0).abs().max()
    return torch.allclose(actual, expected, rtol=bound, atol=bound * float(scale), equal_nan=True)


def _by_how_much(actual: Tensor | None, expected: Tensor | None) -> str:
    if actual is None or expected is None:
        return "is there, but missing" if actual is None else "is missing, but there"
    if actual.shape != expected.shape:
        return f"has local shape {tuple(expected.shape)}, but {tuple(actual.shape)}"
    distance = (actual.double() - expected.double()).abs().max() if actual.numel() else torch.zeros(())
    return f"differs by up to {float(distance):.3g} from that"


def _difference(what: str, eager: Run, last: str | None, where: str) -> NotLocalFriendlyError:
    seen = eager.observer.seen
    module = next((s.module for s in seen if s.record.where == where), "")
    since = f" after {last!r}" if last else ""
    return NotLocalFriendlyError(
        f"static and eager mode diverge{since}: on DTensors {what} on local tensors. "
        "Code before it is written for global shapes (a hard-coded number of heads, a size, a mean over a sharded dim) "
        f"or communicates; {ways_out(_owner(where) or module)}"
    )


def _owner(where: str) -> str:
    """Return the module of a boundary: ``a.b`` of ``a.b.input 'x'``."""
    found = re.match(r"(.*?)\.?(?:input|output|enters|returns)\b", where)
    return found.group(1) if found else where


def raise_together(error: Exception | None, mesh: DeviceMesh) -> None:
    """Raise ``error``, or an error that says that another rank has one; a collective over the mesh.

    Raises:
        Exception: ``error`` where there is one; NotLocalFriendlyError on the other ranks.
    """
    found = torch.tensor([0.0 if error is None else 1.0], device=mesh.device_type)
    anywhere = DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    if error is not None:
        raise error
    if anywhere.item():
        raise NotLocalFriendlyError("another rank of the mesh found this model unfit for local tensors; see its error")
