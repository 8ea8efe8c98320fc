"""Record the first micro-batch in lockstep: ranks exchange the outcome of each call, and errors reach all of them.

Every call that involves values is a synchronization point. Before a call with a transfer, and after every call, all
ranks exchange the key of the call; the home stage adds the outcome. So is the backward of each stage. A failed rank
sends its error at the next synchronization point, so all ranks raise and none blocks. Two ranks at different calls have
diverged, which is an error on both.

Recording also detects programs that a pipeline does not support:

- tensors that leave a unit other than by its output or a hook, because they exist on one stage only;
- tensors written in place after the send, and stale views of a tensor written on a later stage.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._stages.placement import Placement
from .._torch import has_saved_tensor_hooks, is_transformed, version_of
from .draws import RandomOperatorError
from .program import CallKey, Outcome
from .transport import Transport
from .tree import flatten
from .values import PipelineError, Placeholder, Value, ValueId, local_part

_HOOKING = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))
_KNOWN_ERRORS = {error.__name__: error for error in (PipelineError, RandomOperatorError)}


class Recorder:
    """Synchronization between stages, and checks, during the first micro-batch."""

    def __init__(self, transport: Transport, placement: Placement) -> None:
        self._transport, self._placement = transport, placement
        self.hooked: set[str] = set()  # units whose tensors have hooks
        self._over = False
        self._made_inside: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._moved: dict[int, tuple[ValueId, str, Any]] = {}
        self._sent: list[tuple[torch.Tensor, int, str]] = []

    # --- synchronization points ---

    def synchronize(self, moment: str, key: CallKey | None, item: Any = None) -> list[Any]:
        """Exchange ``item`` with all ranks and return the items in their order.

        Raises:
            PipelineError: another stage failed, or reached another call.
        """
        arrivals = self._transport.gather_objects((moment, key, item))
        for rank, arrival in enumerate(arrivals):
            if arrival[0] == "error":
                self._over = True
                raise _error_of(self._placement.name_of(rank), *arrival[2])
        if any(arrival[:2] != (moment, key) for arrival in arrivals):
            self._over = True
            name_of = self._placement.name_of
            calls = "; ".join(f"{name_of(r)} {w} {k or 'the end'}" for r, (w, k, _) in enumerate(arrivals))
            raise PipelineError(
                f"expected the same program on every stage, got {calls}; pass the same inputs to every stage, and let "
                "control flow outside of stage modules depend on shapes, not on values or on the rank"
            )
        return [arrival[2] for arrival in arrivals]

    def announce(self, key: CallKey, outcome: Outcome | None) -> Outcome:
        """Broadcast the outcome of a call from its home stage; the other stages pass None."""
        if outcome is not None:
            try:
                pickle.dumps(outcome)
            except Exception as error:
                raise PipelineError(
                    f"output of `{key.name}`: expected tensors and picklable plain values, got {error}; return plain "
                    "Python values, in tuples, lists, dicts or dataclasses"
                ) from error
        shared: Outcome = self.synchronize("after", key, outcome)[self._placement.ranks[key.home]]
        return shared

    def fail(self, error: Exception) -> None:
        """Send this stage's error to the other stages, unless the error came from them."""
        if self._over:
            return
        self._over = True
        text = "".join(traceback.format_exception(error))
        self._transport.gather_objects(("error", None, (type(error).__name__, str(error), text)))

    # --- checks ---

    def check_arguments(self, leaves: Sequence[Any], values: Sequence[Value | None], name: str) -> None:
        """Check the tensor arguments of an operator outside of units, or of a unit."""
        for leaf, value in zip(leaves, values, strict=True):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Placeholder) or is_transformed(leaf):
                continue
            if value is None and leaf in self._made_inside:
                raise PipelineError(
                    f"`{name}`: expected outputs of stage modules, got an internal tensor of "
                    f"`{self._made_inside[leaf]}`, kept by its forward or computed by a hook, which exists on one "
                    "stage only; return it from the module, or let a forward hook store an input or output of a module "
                    "as it is: such hooks run on every stage"
                )
            moved = self._moved.get(_storage_key(leaf)) if self._moved else None
            if moved is not None and (value is None or value.id != moved[0]):
                raise PipelineError(
                    f"`{name}`: expected current values, got a stale view of a tensor that `{moved[1]}` wrote in place "
                    "on another stage; use the written tensor itself, or an out-of-place operator"
                )

    def note_inside(self, unit: str, function: Any, args: Any, result: Any) -> None:
        """Record the tensors created by an operator inside a unit, and whether hooks will run in its backward."""
        if function in _HOOKING or has_saved_tensor_hooks():
            self.hooked.add(unit)
        given = {id(leaf) for leaf in flatten(args)[0]}
        for leaf in flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                self._made_inside[leaf] = unit

    def is_made_inside(self, tensor: torch.Tensor) -> bool:
        """Return whether an operator inside of a unit has made a tensor."""
        return tensor in self._made_inside

    def note_moved(self, tensor: torch.Tensor, value: Value, name: str) -> None:
        """Record an in-place write on another stage: this stage's memory of the tensor, and views of it, are stale."""
        storage = local_part(tensor).untyped_storage()
        if storage.nbytes():
            self._moved[storage.data_ptr()] = (value.id, name, storage)

    def note_sent(self, tensor: torch.Tensor, origin: str) -> None:
        """Record a sent tensor, which must not be written afterwards."""
        self._sent.append((tensor, version_of(tensor), origin))

    def check_end(self) -> None:
        """Check sent tensors after the forward."""
        for tensor, version, origin in self._sent:
            if version_of(tensor) != version:
                raise PipelineError(
                    f"{origin}: expected no write after the send to a later stage, got an in-place write; use an "
                    "out-of-place operator"
                )


def _storage_key(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _error_of(where: str, kind: str, message: str, text: str) -> PipelineError:
    if kind in _KNOWN_ERRORS:
        return _KNOWN_ERRORS[kind](message)
    return PipelineError(f"{where} failed in the first micro-batch:\n{text}")
