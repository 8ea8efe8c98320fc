"""Recordings that data-parallel ranks make together, and their errors."""

from __future__ import annotations

import contextlib
import random as python_random
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import Fact, Turns, check_facts

from .._static.recording.compare import highest, raise_together
from .values import WAY_OUT, argument_facts

__all__ = ["JointRecorder", "OwnError", "RanksDifferError", "no_draws_outside_torch"]

R = TypeVar("R")


class RanksDifferError(Exception):
    """The ranks make different calls; the cause is the error about it."""


class OwnError(Exception):
    """The module fails on the rows of some rank alone, as it would without data parallelism.

    Args:
        error: to raise on ranks on whose rows it does not fail.
    """

    def __init__(self, error: RuntimeError):
        super().__init__(str(error))
        self.error = error


class JointRecorder(ABC, Generic[R]):
    """Records calls of a module. All ranks record the same calls together.

    Args:
        module: the module.
        mesh: the ranks.

    Attributes:
        is_running: whether a dry run is in progress.
        own_errors: types of errors that name a way out already.
        known_hooks: the code of the gradient hooks that the last recording has tried.
    """

    own_errors: tuple[type[Exception], ...] = ()
    known_hooks: Container[object] = ()

    def __init__(self, module: nn.Module, mesh: DeviceMesh):
        self.module, self.mesh = module, mesh
        self.is_running = False
        self._turns = Turns()

    @abstractmethod
    def _find(self, args: tuple, kwargs: dict) -> R | None:
        """Record a call; return None if it mixes no rows."""

    @abstractmethod
    def _works_alone(self, args: tuple, kwargs: dict) -> bool:
        """Return whether the module runs on this rank's rows."""

    def _end(self) -> None:
        """End the dry runs."""
        self.is_running = False

    def record(self, args: tuple, kwargs: dict) -> R | None:
        """Record a call; return None if it mixes no rows. Collective over the ranks.

        Raises:
            RuntimeError: on every rank, if the call cannot be recorded.
            ValueError: on every rank, if the ranks call the module with different shapes or arguments.
            OwnError: on every rank, if the module fails on the rows of any rank.
        """
        found, error = None, None
        self.is_running = True
        try:
            with torch.no_grad():
                found = self._try(args, kwargs)
        except OwnError:
            raise
        except RanksDifferError as raised:
            error = raised.__cause__
        except self.own_errors as raised:
            error = raised
        except Exception as raised:
            error = _cannot(type(self.module).__name__, raised)
        finally:
            self._end()
        raise_together(error, self.mesh)
        return found

    def _try(self, args: tuple, kwargs: dict) -> R | None:
        """Record a call.

        Raises:
            OwnError: on every rank, if the module fails on the rows of any rank.
            Exception: it cannot be recorded.
        """
        found = error = None
        for facts in argument_facts(args, kwargs):
            self._compare(facts)
        try:
            found = self._find(args, kwargs)
        except RanksDifferError:
            raise
        except Exception as raised:
            error = raised
        if highest(float(error is not None), self.mesh):
            if highest(float(not self._works_alone(args, kwargs)), self.mesh):
                elsewhere = RuntimeError("it fails on the rows of another rank; see the error there")
                raise OwnError(_cannot(type(self.module).__name__, error or elsewhere))
            raise error or RuntimeError("it fails on another rank; see the error there")
        return found

    def _compare(self, facts: Sequence[Fact]) -> None:
        """Compare facts over the ranks, if they are to be compared at all.

        Raises:
            RanksDifferError: on every rank.
        """
        if not self._turns.is_on:
            return
        try:
            check_facts(facts, self.mesh)
        except ValueError as error:
            raise RanksDifferError from error


def _cannot(name: str, reason: Exception) -> RuntimeError:
    what = f"{type(reason).__name__}: {reason}" if str(reason) else f"a bare {type(reason).__name__}"
    error = RuntimeError(
        f"expected that {name} can run on the rows of all ranks, as one device does, but it cannot: {what}; {WAY_OUT}"
    )
    error.__cause__ = reason
    return error


@contextlib.contextmanager
def no_draws_outside_torch() -> Iterator[None]:
    """Restore the generators of Python and numpy, and refuse that they were used.

    Raises:
        RuntimeError: naming what was used.
    """
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = python_random.getstate(), numpy and numpy.random.get_state()
    yield
    used = []
    if python_random.getstate() != python_state:
        python_random.setstate(python_state)
        used.append("random")
    if numpy is not None and repr(numpy.random.get_state()) != repr(numpy_state):
        numpy.random.set_state(numpy_state)
        used.append("numpy.random")
    if used:
        raise RuntimeError(
            f"its forward draws from {' and '.join(used)}, so every rank uses numbers of its own for its rows; draw "
            "with torch"
        )
