"""Generators during recording and replay: nothing is drawn while a constructor is recorded.

Problem: the constructor may look at the generator itself. `torch.manual_seed` inside it, or `torch.random.fork_rng`,
which saves a state and restores it later, would see and restore a state that no draw has advanced.

Algorithm. After each recorded draw the real generator is given a **token**: a state that no seed gives, with the
number of the draw in it. Before the next draw, and at the end, the state is compared with the last token::

    program           real generator   recorded
    normal_()         token 0          draw 0
    s = get_state()   token 0
    manual_seed(1)    seeded(1)
    uniform_()        token 3          SetState(seeded(1)), draw 3        no token: a state of the program's own
    set_state(s)      token 0
    normal_()         token 5          SetState(after draw 0), draw 5     a token: that place on the tape

So a replay has every state that the program set. When the constructor has finished, all generators get back the state
they had before.

Guarantee: the states of a replay are those of the eager constructor, and recording leaves every generator as it found
it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .._containers import leaves
from .tape import SetState, Tape

__all__ = ["GeneratorLog", "generator_of"]

TOKEN = 0x7E5CA1E
"""Marks a state as a token. A state counts as one only if all of its bytes are those of a token that was handed out."""

_CPU_WORDS = slice(3, 6)  # in the state of the CPU generator, read as int64: the first words of the Mersenne twister
_CUDA_OFFSET = 1  # in the state of a CUDA generator, read as int64: seed, offset (a multiple of 4)


def generator_of(args: tuple, kwargs: dict, device: torch.device) -> torch.Generator:
    """Return the generator that a call with these arguments consumes on `device`.

    Raises:
        NotImplementedError: the device is neither a CPU nor a CUDA device.
    """
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, torch.Generator):
            return leaf
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    raise NotImplementedError(
        f"deferred_init does not know the random generator of device {device}; construct the model on cpu or cuda and "
        "move it with materialize(..., device=...)"
    )


class GeneratorLog:
    """The generators that one tape draws from, and their states.

    Attributes:
        generators: in the order in which they were seen.
        initial: their states before the constructor, or where they were first used if it made them.
        remembered: the draws whose following state the program comes back to.
        after: the states that followed them, as far as a replay has come.
    """

    def __init__(self, tape: Tape):
        self.tape = tape
        self.generators: list[torch.Generator] = []
        self.initial: list[Tensor] = []
        self.remembered: set[int] = set()
        self.after: dict[int, Tensor] = {}
        self._expected: list[Tensor] = []
        self._tokens: dict[tuple[int, bytes], int] = {}
        self.track(torch.default_generator)
        if torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                self.track(generator)

    def track(self, generator: torch.Generator) -> int:
        """Return the index of a generator, which is known from now on."""
        for index, known in enumerate(self.generators):
            if known is generator:
                return index
        self.generators.append(generator)
        self.initial.append(generator.get_state())
        self._expected.append(self.initial[-1])
        return len(self.generators) - 1

    def note_changes(self) -> None:
        """Record what the program did to the generators itself since the last draw."""
        for index, generator in enumerate(self.generators):
            state = generator.get_state()
            if not torch.equal(state, self._expected[index]):
                place = self._tokens.get((index, _key(state)))
                self.tape.entries.append(SetState(index, state if place is None else place))
                self.remembered |= set() if place is None else {place}
                self._expected[index] = state

    def drawn(self, index: int, call: int) -> None:
        """Leave the token of a draw in its generator; `call` is the draw's place on the tape."""
        self.generators[index].set_state(_token(self._expected[index], call))
        self._expected[index] = self.generators[index].get_state()
        self._tokens[index, _key(self._expected[index])] = call

    def restore(self) -> None:
        """Give every generator the state it had when it was first seen."""
        for generator, state in zip(self.generators, self.initial, strict=True):
            generator.set_state(state)

    @property
    def used(self) -> tuple[int, ...]:
        """The generators whose state the program changes by drawing or setting."""
        touched = {entry.generator for entry in self.tape.entries if isinstance(entry, SetState)}
        touched |= {call.draws for _, call in self.tape.calls() if call.draws is not None}
        return tuple(sorted(touched))

    def states(self) -> list[Tensor]:
        """Return the present states of all generators."""
        return [generator.get_state() for generator in self.generators]

    @contextlib.contextmanager
    def borrowed(self, states: list[Tensor]) -> Iterator[None]:
        """Put the generators into `states` for a replay, and back into their present ones afterwards."""
        present = self.states()
        try:
            # a generator that was seen later than `states` were taken had not been used before
            for generator, state in zip(self.generators, states + self.initial[len(states) :], strict=True):
                generator.set_state(state)
            yield
        finally:
            for generator, state in zip(self.generators, present, strict=True):
                generator.set_state(state)


def _key(state: Tensor) -> bytes:
    """Return a digest of a state: states of the CPU generator have 5 KB, and a large model draws thousands of times."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _token(state: Tensor, call: int) -> Tensor:
    """Return a valid state that keeps the seed of `state` but that only the draw at `call` leaves behind."""
    token = state.clone()
    words = token.view(torch.int64)
    if words.numel() > 2:
        words[_CPU_WORDS] = torch.tensor([TOKEN, TOKEN, call])
    else:
        words[_CUDA_OFFSET] = (TOKEN << 24) + 4 * call
    return token
