"""Comparisons of what the ranks of a mesh call a parallelized module with.

A plain input is read as equal on all ranks of the mesh, and a random operator draws from one global stream. If ranks
have other rows, other shapes or other generators, results are silently wrong, or collectives wait for each other.

    mode      shapes, dtypes, plain arguments     values of plain inputs, generator if the call draws
    eager     every call (see below)              first call of a signature, then every N-th call
    static    first call of a signature, then every N-th call (`vescale.dtensor.check_ranks`)

In static mode a rank with a new signature first meets the others (`Failures.meet`): a rank that has recorded its call
already waits in a collective of it, and both raise.

On accelerators the host would wait for each comparison, so eager mode compares shapes there as static mode does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import (
    Fact,
    Position,
    Turns,
    check_facts,
    generator_fact,
    input_facts,
    random_position,
    tensors_in,
    waits_over,
)

__all__ = ["RankChecks"]

REAL = (Tensor, nn.Parameter, DTensor)
MANY = 4096  # signatures


class RankChecks:
    """The comparisons of one parallelized module.

    Args:
        mesh: all of its ranks make the same calls.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.turns = mesh, Turns()
        self.always = mesh.device_type == "cpu"
        self._waits = waits_over(mesh)
        for waits in self._waits:
            waits.failures.can_meet()
        self._seen: set[Hashable] = set()
        self._running: list[tuple[bool, Position, Fact] | None] = []  # calls in eager mode

    # --------------------------------------------------------------------------------------------- eager mode

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begin a call in eager mode.

        Raises:
            ValueError: on every rank, if inputs differ.
        """
        self._running.append(None)
        if not self._is_on(args, kwargs):
            return
        facts = input_facts(args, kwargs, checksums=False)
        signature = module.training, torch.is_grad_enabled(), *(fact.value for fact in facts)
        is_new, is_due = signature not in self._seen, self.turns.is_due()
        if len(self._seen) > MANY:
            self._seen.clear()
        self._seen.add(signature)
        if is_new or is_due:
            facts = input_facts(args, kwargs, checksums=True)
        if is_new or is_due or self.always:
            self._check(facts)
        device = self.mesh.device_type
        self._running[-1] = is_new or is_due, random_position(device), generator_fact(device)

    def leave(self, output: object) -> None:
        """End a call in eager mode; ``output`` is None if it raised.

        Raises:
            ValueError: on every rank, if the call drew and generators differed before it.
        """
        begun = self._running.pop() if self._running else None
        if begun is not None and begun[0] and output is not None:
            self.generator(begun[2], draws=random_position(self.mesh.device_type) != begun[1])

    # --------------------------------------------------------------------------------------------- static mode

    def first_call(self, args: tuple, kwargs: dict) -> None:
        """Compare the inputs of a signature that all ranks have not recorded.

        Raises:
            ValueError: on every rank, if they differ.
            RuntimeError: on every rank, if others have recorded the call that they make now.
        """
        self.turns.is_due()  # it counts this call
        if self._is_on(args, kwargs):
            shapes = ", ".join(f"{fact.name}: {fact.value}" for fact in input_facts(args, kwargs, checksums=False))
            for waits in self._waits:
                waits.failures.meet(
                    f"a call with new shapes or arguments, which all ranks must make together: {shapes}"
                )
            self._check(input_facts(args, kwargs, checksums=True))

    def later_call(self, args: tuple, kwargs: dict, *, draws: bool) -> None:
        """Compare the inputs of every N-th call, and the generator if the call ``draws``.

        Raises:
            ValueError: on every rank, if they differ.
        """
        if self.turns.is_due() and self._is_on(args, kwargs):
            facts = input_facts(args, kwargs, checksums=True)
            self._check([*facts, *([generator_fact(self.mesh.device_type)] if draws else [])])

    def generator(self, state: Fact | None = None, *, draws: bool) -> None:
        """Compare the generator of a call that ``draws`` on this rank; all ranks call it.

        Args:
            state: the generator before the call; by default as it is now.
            draws: whether the call draws on this rank.

        Raises:
            ValueError: on every rank, if a rank draws and not all have the same state.
        """
        if self.turns.is_on:
            self._check([state or generator_fact(self.mesh.device_type)] if draws else [])

    def _check(self, facts: Sequence[Fact]) -> None:
        check_facts(facts, self.mesh, maxima=self._maxima)

    def _maxima(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the maxima over the mesh, one axis after the other; an error names lost ranks."""
        largest = torch.tensor(numbers, dtype=torch.int64, device=self.mesh.device_type)
        for waits in self._waits:
            waits.run("comparison of ranks", dist.all_reduce, largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def _is_on(self, args: tuple, kwargs: dict) -> bool:
        """Return whether to compare: not in a compiler, nor with placeholders."""
        if torch.compiler.is_compiling() or not self.turns.is_on:
            return False
        return all(type(t) in REAL and not t.is_meta for t in tensors_in((args, kwargs), dataclasses=True))
