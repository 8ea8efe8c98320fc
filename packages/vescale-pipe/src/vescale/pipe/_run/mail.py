"""The messages of a step: values and gradients that cross stages, between ranks and within one.

Messages have no headers. Those of a pair of ranks match by the order of the sends, which follows from the schedule and
from the recorded transfers. So the receiver knows it: before it waits for a message it begins to receive all that come
before. A message between two stages of one rank is handed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from .._schedule.actions import FORWARD, WEIGHT_GRAD, Action, Schedule
from .._stages.placement import Placement
from .program import Program
from .transport import Arrival, Transport, new_tensor
from .values import gradient_meta

Letter = tuple[int, int, bool]  # the index of the transfer, the micro-batch, whether it is the gradient


class Mail:
    """Send and receive the messages of one step.

    Args:
        transport: this rank's communication.
        placement: the rank of every stage.
        programs: those of the micro-batches, with the recorded transfers; while one is recorded, all ranks send and
            receive each message at once.
        schedule: the actions that are left of the step; None while a program is recorded.
        backward: whether the schedule's backward actions run.
    """

    def __init__(
        self,
        transport: Transport,
        placement: Placement,
        programs: Sequence[Program],
        schedule: Schedule | None = None,
        *,
        backward: bool = False,
    ) -> None:
        self._transport, self._placement, self._programs = transport, placement, programs
        self._backward = backward
        self._here: dict[Letter, torch.Tensor] = {}
        self._sent: dict[Letter, int] = {}
        self._arriving: dict[Letter, Arrival] = {}
        self._expected: dict[int, Iterator[Letter]] | None = None
        if schedule is not None:
            self._expected = {rank: self._letters_from(schedule.actions(rank)) for rank in range(placement.num_ranks)}

    def send(self, tensor: torch.Tensor, letter: Letter, *, stride: Sequence[int] | None = None) -> None:
        """Begin to send a plain tensor; ``stride`` has the strides on the receiver."""
        _, receiver = self._stages(letter)
        to = self._placement.ranks[receiver]
        if to != self._placement.rank:
            self._sent[letter] = self._transport.send(tensor, to, stride=stride)
        elif letter[2]:
            self._here[letter] = tensor
        else:  # a value may be written by the stage that gets it
            copy = new_tensor(tensor.shape, stride or tensor.stride(), tensor.dtype, tensor.device)
            self._here[letter] = copy.copy_(tensor)

    def receive(self, letter: Letter) -> torch.Tensor:
        """Return a new plain tensor."""
        if letter in self._here:
            return self._here.pop(letter)
        self._begin_until(letter)
        tensor = self._arriving.pop(letter).wait()
        index, microbatch, is_gradient = letter
        if is_gradient and (number := self._sent.pop((index, microbatch, False), None)) is not None:
            self._transport.wait_send(number)  # the value has arrived, since its gradient has
        return tensor

    def expect(self, action: Action) -> None:
        """Begin to receive the messages that an action needs."""
        if action.kind == WEIGHT_GRAD or (action.kind != FORWARD and not self._backward):
            return
        for letter in self._needed(action):
            sender, _ = self._stages(letter)
            if not self._placement.is_here(sender):
                self._begin_until(letter)

    # --- orders ---

    def _stages(self, letter: Letter) -> tuple[int, int]:
        """Return the stages of sender and receiver."""
        index, microbatch, is_gradient = letter
        program = self._programs[microbatch]
        transfer = program.transfers[index]
        if is_gradient:
            return transfer.destination, program.gradient_to(index)
        return transfer.source, transfer.destination

    def _begin_until(self, letter: Letter) -> None:
        sender, _ = self._stages(letter)
        source = self._placement.ranks[sender]
        while letter not in self._arriving:
            following = letter if self._expected is None else next(self._expected[source])
            index, microbatch, is_gradient = following
            meta = self._programs[microbatch].transfers[index].meta
            meta = gradient_meta(meta) if is_gradient else meta
            self._arriving[following] = self._transport.receive(
                *meta.local_layout,
                meta.dtype,
                device=self._transport.device_of(meta.device_type),
                source=source,
                what=f"{'gradients' if is_gradient else 'values'} from stage {self._stages(following)[0]}",
            )

    def _needed(self, action: Action) -> Iterator[Letter]:
        program = self._programs[action.microbatch]
        if action.kind == FORWARD:
            return ((index, action.microbatch, False) for index in program.to_stage(action.stage))
        return ((index, action.microbatch, True) for index in program.gradients_to_stage(action.stage))

    def _letters_from(self, actions: Iterable[Action]) -> Iterator[Letter]:
        """Yield the messages to this rank of a rank's actions, in the order in which that rank sends them."""
        for action in actions:
            program = self._programs[action.microbatch]
            indices: Sequence[int] = ()
            if action.kind == FORWARD:
                indices = program.from_stage(action.stage)
            elif self._backward and action.kind != WEIGHT_GRAD:
                indices = program.gradients_from_stage(action.stage)
            for index in indices:
                letter = (index, action.microbatch, action.kind != FORWARD)
                if self._placement.is_here(self._stages(letter)[1]):
                    yield letter
