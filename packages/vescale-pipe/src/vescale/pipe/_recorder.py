"""The first micro-batch, run in lockstep: stages announce results to one another, and errors reach all of them.

Every call that involves values is a meeting point. Before a call that needs a transfer, and after every call, all
stages exchange what they are about to do; the home stage adds the outcome. A stage that fails joins the next meeting
with its error, so that all stages raise and none waits for ever. Two stages that arrive with different calls have
diverged, which is an error too.

What a pipeline cannot carry is found here, on the stage that sees it:

- random operators (the random stream is not handed from stage to stage yet);
- tensors that leave a unit by another way than its output (hooks, attributes): they would exist on one stage only;
- tensors written in place after they were sent, and other views of a tensor that moved to a later stage that way.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._program import CallKey, Outcome
from ._torch import OperatorMode, is_random, version_of
from ._transport import Transport
from ._tree import flatten
from ._values import PipelineError, Placeholder, Value, ValueId, local_part


class RandomOperatorError(PipelineError, NotImplementedError):
    """A random operator in a pipeline of several stages."""


_KNOWN_ERRORS = {error.__name__: error for error in (PipelineError, RandomOperatorError)}


class Recorder:
    """Agreement between stages, and checks, during the first micro-batch."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._over = False
        self._made_inside: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._moved: dict[int, tuple[ValueId, str, Any]] = {}
        self._sent: list[tuple[torch.Tensor, int, str]] = []
        self._generators = _generator_states(transport)

    # --- meetings ---

    def meet(self, what: str, key: CallKey | None, item: Any = None) -> list[Any]:
        """Exchange ``item`` with all stages; return all of them in stage order.

        Raises:
            PipelineError: another stage failed, or is at another call.
        """
        arrivals = self._transport.gather_objects((what, key, item))
        for stage, arrival in enumerate(arrivals):
            if arrival[0] == "error":
                self._over = True
                raise _error_of_stage(stage, *arrival[2])
        if any(arrival[:2] != (what, key) for arrival in arrivals):
            self._over = True
            places = "; ".join(f"stage {s} at {w}: {k or 'the end'}" for s, (w, k, _) in enumerate(arrivals))
            raise PipelineError(
                f"the stages run different programs ({places}). Every stage must be given the same inputs, and control "
                "flow outside of the stages' modules may depend on shapes, not on values or on the rank"
            )
        return [arrival[2] for arrival in arrivals]

    def announce(self, key: CallKey, outcome: Outcome | None) -> Outcome:
        """Exchange the outcome of a call: the home stage gives it, the others pass None and receive it."""
        if outcome is not None:
            try:
                pickle.dumps(outcome)
            except Exception as error:
                raise PipelineError(
                    f"the output of `{key.name}` cannot be described to the other stages ({error}); return tensors and "
                    "plain Python values, in tuples, lists, dicts or dataclasses"
                ) from error
        return self.meet("after", key, outcome)[key.home]

    def fail(self, error: Exception) -> None:
        """Tell the other stages that this one failed, unless the failure came from them."""
        if self._over:
            return
        self._over = True
        text = "".join(traceback.format_exception(error))
        self._transport.gather_objects(("error", None, (type(error).__name__, str(error), text)))

    # --- checks ---

    def check_arguments(self, leaves: Sequence[Any], values: Sequence[Value | None], name: str) -> None:
        """Check the tensors that code outside of units passes to an operator, or to a unit."""
        for leaf, value in zip(leaves, values, strict=True):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Placeholder):
                continue
            if value is None and leaf in self._made_inside:
                raise PipelineError(
                    f"`{name}` uses a tensor made inside `{self._made_inside[leaf]}` that is not an output of it: a "
                    "hook or an attribute took it (captured router logits, hidden states), and it exists on one stage "
                    "only. Return it from the module, or switch its capture off"
                )
            moved = self._moved.get(_storage_key(leaf))
            if moved is not None and (value is None or value.id != moved[0]):
                raise PipelineError(
                    f"`{name}` uses a tensor that shares memory with one that `{moved[1]}` wrote in place with values "
                    "of another stage; use the written tensor itself, or an out-of-place operator"
                )

    def note_inside(self, unit: str, args: Any, result: Any) -> None:
        """Remember the tensors that an operator inside a unit made."""
        given = {id(leaf) for leaf in flatten(args)[0]}
        for leaf in flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                self._made_inside[leaf] = unit

    def note_moved(self, tensor: torch.Tensor, value: Value, name: str) -> None:
        """Remember that a call on another stage wrote to this tensor: its memory here, and views of it, are stale."""
        storage = local_part(tensor).untyped_storage()
        if storage.nbytes():
            self._moved[storage.data_ptr()] = (value.id, name, storage)

    def note_sent(self, tensor: torch.Tensor, origin: str) -> None:
        """Remember a sent tensor, which must keep its elements."""
        self._sent.append((tensor, version_of(tensor), origin))

    def check_end(self) -> None:
        """Check what can only be known after the forward."""
        for tensor, version, origin in self._sent:
            if version_of(tensor) != version:
                raise PipelineError(
                    f"{origin} was written in place after it was sent to a later stage, which keeps the old elements; "
                    "use an out-of-place operator"
                )
        for (device, before), (_, after) in zip(self._generators, _generator_states(self._transport), strict=True):
            if not torch.equal(before, after):
                raise RandomOperatorError(_random_text(f"the random generator of {device} advanced in the forward"))


class RandomGuard(OperatorMode):
    """Refuses random operators while it is active. ``where`` is called for the place that the message names."""

    def __init__(self, where: Any) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if is_random(func, args, kwargs or {}):
            raise RandomOperatorError(_random_text(f"random operator {func} ran in {self._where()}"))
        return func(*args, **(kwargs or {}))


def _random_text(what: str) -> str:
    return f"{what}: the random stream is not carried through pipeline stages yet; set dropout to 0, or use pp=1"


def _generator_states(transport: Transport) -> list[tuple[str, torch.Tensor]]:
    states = [("cpu", torch.get_rng_state())]
    device = transport.device
    if device.type != "cpu":
        states.append((str(device), torch.get_device_module(device.type).get_rng_state(device)))
    return states


def _storage_key(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _error_of_stage(stage: int, kind: str, message: str, text: str) -> PipelineError:
    if kind in _KNOWN_ERRORS:
        return _KNOWN_ERRORS[kind](message)
    return PipelineError(f"stage {stage} failed during the first micro-batch, in its own forward:\n{text}")
