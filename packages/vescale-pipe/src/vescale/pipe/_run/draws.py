"""What random operators draw in a pipeline: what one process draws.

Micro-batches are parts of a batch. One process draws for the whole batch, layer by layer, so every micro-batch starts
at the same position of the generators, and draws its rows of what the whole batch would draw there:

    one process         | unit 0: rows 0-3     | unit 1: rows 0-3     |     the generators afterwards: here
    micro-batch 0       | unit 0: rows 0-1     | unit 1: rows 0-1     |     and here
    micro-batch 1       | unit 0:     rows 2-3 | unit 1:     rows 2-3 |     and here

The package that knows how to draw rows of a batch is found by its entry point (``docs/protocols.md``). With
``per_microbatch=True`` every micro-batch is a batch of its own and starts where the one before ended, as in a loop of
gradient accumulation; no other package is needed.

A stage runs its own units. The first micro-batch records how far each call moves the generators (`Chain`). Later ones
skip what other stages draw, in whatever order the schedule has them, and each call is compared with its record.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .._torch import OperatorMode, has_own_generator, is_random
from .generators import NOWHERE, Distance, Generators, Position, UnknownDistanceError
from .microbatch import Share
from .values import PipelineError

GROUP, NAME = "vescale.pipe", "draws"  # of the entry point
OUTSIDE = "code outside of stage modules"
_NOTHING = contextlib.nullcontext()


class RandomOperatorError(PipelineError, NotImplementedError):
    """Raised for a random operator that would not draw what one process draws."""


@dataclass
class Chain:
    """What the forward of one micro-batch draws, in the order of one process.

    Attributes:
        calls: for each event that draws, or after code that does, how far that code and the event move the generators.
        rest: how far the code after the last of them does.
    """

    calls: dict[int, tuple[Distance, Distance]] = field(default_factory=dict)
    rest: Distance = NOWHERE

    def __bool__(self) -> bool:
        return bool(self.calls or self.rest)


class Drawing(Protocol):
    """The program of a micro-batch; ``draws`` is None until it is recorded."""

    draws: Chain | None


@dataclass(frozen=True)
class Walk:
    """The positions of one micro-batch: before and after each call that draws, and at the end."""

    calls: dict[int, tuple[Position, Position]]
    end: Position


class DrawRules:
    """How the steps of an engine draw.

    Args:
        device: of the pipeline.
        num_stages: of the pipeline.
        are_parts: whether micro-batches are parts of one batch.
    """

    def __init__(self, device: torch.device, num_stages: int, *, are_parts: bool) -> None:
        self.package = _package()
        self.generators = Generators(device, self.package)
        self.num_stages, self.are_parts = num_stages, are_parts

    def cuts(self, num_microbatches: int) -> bool:
        """Return whether micro-batches draw rows of what the batch draws."""
        return self.are_parts and num_microbatches > 1 and self.package is not None

    def check_parts(self, num_microbatches: int) -> None:
        """Let the package refuse parts of a batch, before anything runs."""
        if self.cuts(num_microbatches):
            self.package.part(0, num_microbatches)

    def refuses(self, num_microbatches: int) -> bool:
        """Return whether micro-batches are parts of a batch whose rows no package knows to draw."""
        return self.are_parts and num_microbatches > 1 and self.package is None


class Course:
    """What the forward of one micro-batch draws, call by call.

    Args:
        generators: those of this process.
        start: where they are at the beginning.
        walk: the recorded positions; None while they are recorded.
        refuses: whether random operators are refused.
    """

    def __init__(self, generators: Generators, start: Position, walk: Walk | None, *, refuses: bool) -> None:
        self.start = start
        self.chain = Chain()
        self._generators, self._walk, self._refuses = generators, walk, refuses
        self._here, self._gap = start, NOWHERE

    def begin(self, index: int) -> None:
        """Begin a call, on all stages: code outside of stage modules has run until now."""
        if self._walk is None:
            now = self._generators.read()
            self._gap, self._here = self._distance(self._here, now, OUTSIDE), now
        elif (known := self._walk.calls.get(index)) is not None and self._generators.read() != known[0]:
            raise otherwise(OUTSIDE)

    def finish(self, index: int, name: str) -> Distance:
        """Finish a call on its own stage, and return how far it has moved the generators; that is recorded."""
        now = self._generators.read()
        if self._walk is not None:
            if (known := self._walk.calls.get(index)) is not None and now != known[1]:
                raise otherwise(f"`{name}`")
            return NOWHERE
        moved = self._distance(self._here, now, f"`{name}`")
        self._keep(index, moved, now)
        return moved

    def skip(self, index: int, moved: Distance) -> None:
        """Finish a call of another stage: move the generators by what it draws."""
        if self._walk is None:
            there = self._generators.moved(self._here, moved)
            if moved:
                self._generators.write(there)
            self._keep(index, moved, there)
        elif (known := self._walk.calls.get(index)) is not None:
            self._generators.write(known[1])

    def end(self) -> None:
        """Finish the forward."""
        now = self._generators.read()
        if self._walk is None:
            self.chain.rest = self._distance(self._here, now, OUTSIDE)
        elif now != self._walk.end:
            raise otherwise("its forward")

    def _keep(self, index: int, moved: Distance, there: Position) -> None:
        if self._gap or moved:
            self.chain.calls[index] = self._gap, moved
        self._here = there

    def _distance(self, before: Position, after: Position, where: str) -> Distance:
        try:
            moved = self._generators.distance(before, after)
        except UnknownDistanceError:
            raise RandomOperatorError(
                f"expected random operators that always draw equally many numbers, got others in {where}: a seed that "
                "is set in forward, or an odd number of normal values below 16; seed between steps, or draw 16 values "
                "or more"
            ) from None
        if moved and self._refuses:
            raise RandomOperatorError(
                f"expected no random operators in micro-batches that are parts of one batch, got one in {where}: they "
                "would not draw what the batch draws; install vescale-dtensor, which knows their part, or, if every "
                "micro-batch may be a batch of its own, pass per_microbatch=True to PipelineEngine"
            )
        return moved


class StepDraws:
    """Where the generators are in the micro-batches of one step.

    Args:
        rules: those of the engine.
        programs: those of the micro-batches, with what they draw, which is recorded if it is not known.
        shares: those of the micro-batches.
    """

    def __init__(self, rules: DrawRules, programs: Sequence[Drawing], shares: Sequence[Share]) -> None:
        self._programs, self._shares = programs, shares
        self._first: dict[int, int] = {}  # of each program, its first micro-batch
        for microbatch, program in enumerate(programs):
            self._first.setdefault(id(program), microbatch)
        self._rules, self._generators = rules, rules.generators
        self._cuts = rules.cuts(len(programs))
        # a loop over micro-batches in one process draws by itself as it should
        self._is_on = rules.num_stages > 1 or self._cuts
        self._start = self._generators.read() if self._is_on else None
        self._walks: dict[int, Walk] = {}
        self._end: Position | None = None

    def draw(self, program: Drawing) -> bool:
        """Return whether micro-batches of a program draw something, as far as is known."""
        return self._is_on and (program.draws is None or bool(program.draws))

    def forward(self, microbatch: int) -> contextlib.AbstractContextManager[Course | None]:
        """Return a context for the forward of a micro-batch, or that of one of its stages."""
        if self.draw(self._programs[microbatch]):
            return self._drawing(microbatch)
        return self._unmoved() if self._is_on and len(self._first) > 1 else _NOTHING

    @contextlib.contextmanager
    def _unmoved(self) -> Iterator[None]:
        """Run the forward of a micro-batch that draws nothing, in a step in which others may."""
        before = self._generators.read()
        yield
        if self._generators.read() != before:
            raise otherwise("a micro-batch")

    @contextlib.contextmanager
    def _drawing(self, microbatch: int) -> Iterator[Course | None]:
        program = self._programs[microbatch]
        with self._part(microbatch):
            if self._rules.num_stages == 1:
                yield from self._alone(program)
                return
            walk = None if program.draws is None else self._walk(microbatch)
            start = self._start_of(microbatch)
            self._generators.write(start)
            refuses = self._rules.refuses(len(self._programs))
            course = Course(self._generators, start, walk, refuses=refuses)
            yield course
            course.end()
        if program.draws is None:
            program.draws = course.chain

    def _alone(self, program: Drawing) -> Iterator[None]:
        """Run a micro-batch of a pipeline of one stage: no record is needed to skip what others draw."""
        assert self._start is not None
        self._generators.write(self._start)
        yield None
        end = self._generators.read()
        if self._end is not None and end != self._end:
            raise otherwise("its forward")
        self._end = end
        if program.draws is None:
            program.draws = Chain() if end == self._start else Chain(rest=Distance(numbers=1))

    def backward(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of a micro-batch, which may repeat parts of the forward."""
        return self._repeating(microbatch) if self.draw(self._programs[microbatch]) else _NOTHING

    @contextlib.contextmanager
    def _repeating(self, microbatch: int) -> Iterator[None]:
        with self._part(microbatch):
            before = self._generators.read()
            yield
            if self._generators.read() != before:
                raise RandomOperatorError(
                    "expected no random operators in the backward, got an advanced generator: one process draws them "
                    "after the forward of the whole batch; draw in the forward"
                )

    def guard(self, microbatch: int, where: Callable[[], str]) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the user's code that refuses generators of its own where draws are recorded."""
        is_recorded = self._is_on and self._programs[microbatch].draws is None
        return RandomGuard(where) if is_recorded else contextlib.nullcontext()

    def finish(self) -> None:
        """Leave the generators where one process leaves them."""
        if not self._is_on:
            return
        draw = [self.draw(self._programs[microbatch]) for microbatch in self._first.values()]
        if not any(draw):
            if self._generators.read() != self._start:
                raise otherwise("the step")
            return
        if self._rules.num_stages == 1:
            end, is_same = self._end, all(draw)
        else:
            end = self._walk(len(self._programs) - 1).end
            is_same = all(self._walk(microbatch).end == end for microbatch in self._first.values())
        if self._rules.are_parts and not is_same:
            raise otherwise("micro-batches of other sizes")
        assert end is not None
        self._generators.write(end)

    def _part(self, microbatch: int) -> contextlib.AbstractContextManager[Any]:
        if not self._cuts:
            return contextlib.nullcontext()
        share = self._shares[microbatch]
        # a share of one part is what packages without shares of several know
        parts = (share.index, share.count, share.size)[: 2 if share.size == 1 else 3]
        context: contextlib.AbstractContextManager[Any] = self._rules.package.part(*parts)
        return context

    def _start_of(self, microbatch: int) -> Position:
        assert self._start is not None
        if microbatch == 0 or self._rules.are_parts:
            return self._start
        return self._walk(microbatch - 1).end

    def _walk(self, microbatch: int) -> Walk:
        first = 0
        if self._rules.are_parts:  # those of one program walk alike
            first = microbatch = self._first[id(self._programs[microbatch])]
        for each in range(first, microbatch + 1):  # each starts where the one before ends
            if each not in self._walks:
                self._walks[each] = self._new_walk(each)
        return self._walks[microbatch]

    def _new_walk(self, microbatch: int) -> Walk:
        chain = self._programs[microbatch].draws
        assert chain is not None
        here, moved, calls = self._start_of(microbatch), self._generators.moved, {}
        for index, (gap, own) in chain.calls.items():
            before = moved(here, gap)
            here = moved(before, own)
            calls[index] = before, here
        return Walk(calls, moved(here, chain.rest))


def otherwise(where: str) -> PipelineError:
    """Return the error about draws that differ from the recorded ones."""
    return PipelineError(
        f"expected the random numbers to be drawn as in the first micro-batch with such inputs, got more, fewer or "
        f"others in {where}; keep what decides about draws, such as rates of dropout, or make a new engine after a "
        "change"
    )


def unequal_generators() -> PipelineError:
    """Return the error about stages whose generators are not at the same position."""
    return PipelineError(
        "expected the same state of the random generators on every stage, got different ones where random operators "
        "run; call torch.manual_seed with the same seed on all ranks of the pipeline, and draw alike on them"
    )


class RandomGuard(OperatorMode):
    """Refuse random operators with generators of their own. ``where()`` returns the current module for the message."""

    _vescale_passes_on = True  # for modes around it that see every operator

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if is_random(func, args, kwargs) and has_own_generator(args, kwargs):
            raise RandomOperatorError(
                f"expected random operators of torch's default generators, got {func} in {self._where()} with a "
                "generator of its own, which micro-batches and stages would move in another order than one process; "
                "leave out generator="
            )
        return func(*args, **kwargs)


@functools.cache
def _package() -> Any:
    """Return what knows streams of random numbers and parts of a batch; None if no installed package does."""
    found = importlib.metadata.entry_points(group=GROUP, name=NAME)
    return next(iter(found)).load() if found else None
