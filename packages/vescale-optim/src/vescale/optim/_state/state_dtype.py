"""Optimizer state in fewer bits than the optimizer computes with.

Moments and momentum are averages over many steps, for which a training rarely needs all bits of float32. So between
steps they are kept rounded, and the torch optimizer, unchanged, works on wide temporary copies:

    kept (bfloat16) --widen--> state (float32) --torch optimizer--> state --round to nearest--> kept, in place

Wide copies of all state at once would need the memory that rounding saves. A torch optimizer steps each parameter
independently. So it gets the parameters of a group in parts of `PART_BYTES`; the state of each part is widened just
before its step and rounded just after. Other classes may count steps or read all parameters in a step, so they step
once, with all state widened. Either way the hooks of the optimizer run once.

Guarantee: the bits are those of a program that, around every step, rounds and widens the state of a torch optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .entries import is_elementwise
from .pieces import Piece

__all__ = ["KeptState", "check_state_dtype"]

#: Bytes of parameters whose state is wide at a time, unless a single parameter is larger.
PART_BYTES = 32 * 2**20


class KeptState:
    """The state of an optimizer of pieces, kept in fewer bits between its steps.

    State of parameters of a single element is unchanged: it cannot be distinguished from a step count.

    Args:
        optimizer: The optimizer.
        pieces: The pieces that it updates.
        dtypes: The dtype of all state as large as its piece, or dtypes by name of the state; others are unchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pieces: Iterable[Piece],
        dtypes: torch.dtype | Mapping[str, torch.dtype],
    ):
        self._optimizer = optimizer
        self._dtypes = dtypes
        self._tensors = {piece.tensor for piece in pieces if piece.param.numel() > 1}
        self._wide: dict[tuple[Tensor, str], torch.dtype] = {}

    def step(self) -> None:
        """Step the optimizer, computing with wide state."""
        optimizer = self._optimizer
        if steps_parts_alike(type(optimizer)):
            torch.optim.Optimizer.profile_hook_step(self._step_in_parts)(optimizer)
            return
        with self._widened(self._tensors):
            optimizer.step()

    def _step_in_parts(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        step, groups = _torch.step_without_hooks(optimizer), optimizer.param_groups
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    optimizer.param_groups = [{**group, "params": part}]
                    with self._widened(part):
                        step(optimizer, *args, **kwargs)
        finally:
            optimizer.param_groups = groups

    @contextlib.contextmanager
    def _widened(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Keep the state of ``tensors`` in the dtypes in which the optimizer made it, inside the context."""
        chosen = {t: self._optimizer.state.get(t, {}) for t in tensors if t in self._tensors}
        kept = {t: dict(entries) for t, entries in chosen.items()}
        self._widen(chosen)
        try:
            yield
        finally:  # also after an error, so that all state has the narrow dtype
            self._round({t: self._optimizer.state[t] for t in chosen if t in self._optimizer.state}, kept)

    @torch.no_grad()
    def _widen(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        narrow, wide = [], []
        for tensor, entries in state.items():
            for name, value in entries.items():
                dtype = self._wide.get((tensor, name))
                if dtype is not None and is_elementwise(name, value, tensor) and value.dtype != dtype:
                    narrow.append(value)
                    wide.append(torch.empty_like(value, dtype=dtype))
                    entries[name] = wide[-1]
        _copy(wide, narrow)

    def round_new(self, tensor: Tensor, entries: dict[str, Any]) -> None:
        """Round the entries that a piece's tensor has before its first step, and record their dtypes."""
        if tensor in self._tensors:
            self._round({tensor: entries}, {})

    @torch.no_grad()
    def _round(self, state: Mapping[Tensor, dict[str, Any]], kept: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Replace wide entries by rounded ones, in their kept memory, if any."""
        narrow, wide = [], []
        for tensor, entries in state.items():
            for name, value in entries.items():
                dtype = self._dtypes.get(name) if isinstance(self._dtypes, Mapping) else self._dtypes
                if dtype is None or not is_elementwise(name, value, tensor) or not _is_wider(value.dtype, dtype):
                    continue
                self._wide[tensor, name] = value.dtype
                memory = kept.get(tensor, {}).get(name)
                if not (isinstance(memory, Tensor) and memory.shape == value.shape and memory.dtype == dtype):
                    memory = torch.empty_like(value, dtype=dtype, requires_grad=False)
                narrow.append(memory)
                wide.append(value)
                entries[name] = memory
        _copy(narrow, wide)


def steps_parts_alike(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether steps of parts of the parameters equal one step of all: true for the classes of torch."""
    return getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class


def _parts(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if part and num_bytes + tensor.nbytes > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(tensor)
        num_bytes += tensor.nbytes
    if part:
        yield part


def _is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > than.itemsize


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        _torch.foreach_copy_(targets, sources)


def check_state_dtype(state_dtype: Any, pieces: Iterable[Piece], names: set[str]) -> None:
    """Raise ValueError if state cannot be kept in ``state_dtype``, a dtype or dtypes by name of the state.

    Args:
        state_dtype: The user's value.
        pieces: The pieces that the optimizer updates.
        names: Names of all state that it keeps as large as a piece; needed for dtypes by name only.
    """
    by_name = isinstance(state_dtype, Mapping)
    dtypes = list(state_dtype.values()) if by_name else [state_dtype]
    for dtype in dtypes:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2):
            raise ValueError(
                "state_dtype must be a floating-point dtype of 16 bits or more such as torch.bfloat16, or a mapping "
                f"from names of state to such, got {dtype!r}" + (f" in {dict(state_dtype)}" if by_name else "")
            )
        for piece in pieces:
            computed = piece.tensor.dtype
            if computed.is_floating_point and dtype != computed and not _is_wider(computed, dtype):
                raise ValueError(
                    f"state_dtype {dtype} has no fewer bits than {computed}, in which {piece.fqn!r} is updated and its "
                    f"state computed; pass master_dtype=torch.float32 to update it in more bits, or another state_dtype"
                )
    unknown = sorted(set(state_dtype) - names) if by_name else []
    if unknown:
        raise ValueError(
            f"expected names of state as keys of state_dtype, got others: state_dtype names {unknown}, which is no "
            f"state of this optimizer with these hyperparameters; it keeps {sorted(names)}"
        )
