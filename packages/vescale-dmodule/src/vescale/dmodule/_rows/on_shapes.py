"""What mixes rows in a call, found before there is a process group: a rehearsal on shapes.

A copy of the module runs on fake tensors whose rows are ``Shard(0)`` on an axis of two ranks that do not exist. An
operator that communicates over that axis mixes rows. Values are unknown: what only they could tell, a `Rehearsal` finds
at the first call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from vescale.dtensor import debug

from .. import _torch
from .._execution.eager import EagerScope, hook_scope
from .._gradients.sync import GradientSync
from .._static.recording.names import Names
from ..plans._derive.experts import find_experts, install_stand_ins
from ..plans._derive.trace import shadow
from ..plans._derive.trial import Values, without_values
from .known import known_row_wise
from .mixing import MixingNotes
from .planned import OnAxis
from .rehearsal import AXIS, WholeCall, row_wise_parts
from .values import has_rows, num_rows

__all__ = ["mixing_on_shapes"]


def mixing_on_shapes(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    row_wise: Iterable[str] = (),
    call: Callable[[nn.Module, dict[str, Any]], Any] = lambda module, inputs: module(**inputs),
) -> tuple[str, ...]:
    """Return texts about the functions that mix rows in a call; none also where the call needs values.

    Args:
        module: real, on the meta device, or deferred, without DTensors; it stays as it is.
        inputs: arguments by name; tensors have the rows in dim 0.
        row_wise: names of modules that treat every row alone, whatever their operators do.
        call: makes the call.

    Example:
        >>> mixing_on_shapes(nn.Linear(2, 2), {"input": torch.ones(4, 2)})
        ()
        >>> mixing_on_shapes(nn.BatchNorm1d(2), {"input": torch.ones(4, 2)})
        ('batch_norm in the root module',)
    """
    found: tuple[str, ...] = ()
    for splits_constants in (False, True):
        try:
            found = _tried(module, inputs, {*row_wise, *known_row_wise(module)}, call, splits_constants)
        except Exception:  # of any kind: of code on values that are unknown
            return ()
        if not found:
            return ()
    return found


def _tried(
    module: nn.Module,
    inputs: Mapping[str, Any],
    row_wise: set[str],
    call: Callable[[nn.Module, dict[str, Any]], Any],
    splits_constants: bool,
) -> tuple[str, ...]:
    mode = _torch.fake_tensors()
    copied, names = shadow(module, mode), Names()
    install_stand_ins(copied, find_experts(copied, AXIS, 1).whole & row_wise)
    copied.train(module.training)
    with contextlib.ExitStack() as stack:
        for context in (_torch.ghost_world(2), _torch.quiet_fakes(), Values(), torch.no_grad()):
            stack.enter_context(context)
        mesh = _torch.ghost_mesh("cpu", AXIS)
        stack.enter_context(row_wise_parts(copied, row_wise, None))
        stack.enter_context(names.watching(dict(copied.named_modules())))
        log = OnAxis(stack.enter_context(debug.comm_log(mesh=mesh)), AXIS)
        rows = num_rows((), dict(inputs))

        def distribute(value: object) -> object:
            is_of_rows = isinstance(value, Tensor) and has_rows(value, rows)
            return DTensor.from_local(value, mesh, [Shard(0)], run_check=False) if is_of_rows else value

        kwargs = _torch.tree_map(distribute, without_values(inputs, mode))
        notes = MixingNotes(names, log, mesh, num_rows=2 * (rows or 0), splits_constants=splits_constants)
        whole = WholeCall(lambda _args, kwargs: call(copied, kwargs), notes)
        hook_scope(whole, "", EagerScope(True, GradientSync(), attaches=False))
        try:
            whole((), kwargs)
        except Exception:
            if not notes.mixing:
                raise
    return tuple(notes.mixing)
