"""Generators during recording and replay: recording a constructor draws no random numbers.

Problem: the constructor may read or set the generator itself, by `torch.manual_seed` or by `torch.random.fork_rng`,
which saves a state and restores it later. The saved state would be one that no draw has advanced.

Algorithm. Each recorded draw sets the real generator to a **token**: a state that no seed gives and that contains the
index of the draw. Before the next draw, and at the end, the state is compared with the last token::

    program           real generator   recorded
    normal_()         token 0          draw 0
    s = get_state()   token 0
    manual_seed(1)    seeded(1)
    uniform_()        token 3          SetState(seeded(1)), draw 3        no token: a state set by the program
    set_state(s)      token 0
    normal_()         token 5          SetState(after draw 0), draw 5     a token: the state after that draw

So a replay has every state that the program set. At the end of the constructor, all generators are restored to their
states before it.

Guarantee: the generator states of a replay are those of the eager constructor. Recording leaves every generator
unchanged.
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
        f"deferred_init supports the random generators of cpu and cuda, got device {device}; construct the model on "
        "one of these and move it with materialize(..., device=...)"
    )


class GeneratorLog:
    """The generators that one tape draws from, and their states.

    Attributes:
        generators: in the order of their first use.
        initial: their states before the constructor, or at their first use if the constructor made them.
        remembered: the draws after which the program saved a state that it restores later.
        after: the states after those draws, for the part of the tape that has been replayed.
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
        """Return the index of a generator; add it at its first use."""
        for index, known in enumerate(self.generators):
            if known is generator:
                return index
        self.generators.append(generator)
        self.initial.append(generator.get_state())
        self._expected.append(self.initial[-1])
        return len(self.generators) - 1

    def note_changes(self) -> None:
        """Record the states that the program has set since the last draw."""
        for index, generator in enumerate(self.generators):
            state = generator.get_state()
            if not torch.equal(state, self._expected[index]):
                place = self._tokens.get((index, _key(state)))
                self.tape.entries.append(SetState(index, state if place is None else place))
                self.remembered |= set() if place is None else {place}
                self._expected[index] = state

    def drawn(self, index: int, call: int) -> None:
        """Set the generator of a draw to the draw's token; `call` is the index of the draw on the tape."""
        self.generators[index].set_state(_token(self._expected[index], call))
        self._expected[index] = self.generators[index].get_state()
        self._tokens[index, _key(self._expected[index])] = call

    def restore(self) -> None:
        """Set every generator to its initial state."""
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
            # a generator added after `states` were taken had not been used before
            for generator, state in zip(self.generators, states + self.initial[len(states) :], strict=True):
                generator.set_state(state)
            yield
        finally:
            for generator, state in zip(self.generators, present, strict=True):
                generator.set_state(state)


def _key(state: Tensor) -> bytes:
    """Return a digest of a state: a state of the CPU generator has 5 KB, and a large model has thousands of draws."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _token(state: Tensor, call: int) -> Tensor:
    """Return a valid state with the seed of `state` that is unique to the draw at `call`."""
    token = state.clone()
    words = token.view(torch.int64)
    if words.numel() > 2:
        words[_CPU_WORDS] = torch.tensor([TOKEN, TOKEN, call])
    else:
        words[_CUDA_OFFSET] = (TOKEN << 24) + 4 * call
    return token
