"""Weights that several stages use, such as an embedding and the head that is tied to it.

The rank of a weight's first name in the model owns it: its optimizer holds the state and updates the weight. Each other
rank that uses it has a copy that no optimizer sees, as it requires no gradient outside of a step::

    begin of a step       owner -- values -->   the others
    each micro-batch      every stage adds to its own sum of gradients
    end of a step         owner <-- sums --     the others

So copies never drift apart, whatever the optimizer and its rounding are. The owner adds the sums from the last stage
to the first, in the order of the uses in one backward. In one process the gradients of each micro-batch are added in
that order, and then those of micro-batches: a tied weight's gradient equals that up to the order of additions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._stages.names import name_ties
from .._stages.placement import Placement
from .._stages.split import Tie
from .backward import GradientSum, is_hooked
from .transport import Transport
from .values import PipelineError, TensorMeta, from_local_part, gradient_meta, local_gradient, local_part, meta_of


@dataclass(frozen=True)
class TieState:
    """What all ranks know of a tied weight in one program.

    Attributes:
        meta: of the owner's weight.
        stages: those that compute a gradient of it, the last first; None until the first backward.
        gradient: metadata of the gradient, which may have another dtype; None until then.
    """

    meta: TensorMeta
    stages: tuple[int, ...] | None = None
    gradient: TensorMeta | None = None


class TiedWeights:
    """The tied weights of one engine.

    Args:
        model: with stubs in place of the modules of other ranks.
        ties: the weights that several stages use.
        placement: the rank of every stage.
        transport: this rank's communication.
    """

    def __init__(self, model: nn.Module, ties: Sequence[Tie], placement: Placement, transport: Transport) -> None:
        self._model, self._placement, self._transport = model, placement, transport
        self._ties = tuple(ties)
        name_ties(model, self._ties, placement)
        for tie in self._ties:
            if (weight := self._weight(tie)) is not None and not self._owns(tie):
                weight.requires_grad_(False)

    # --- a program ---

    def agree(self) -> tuple[TieState, ...]:
        """Return the state of all tied weights for a new program. A collective.

        Raises:
            PipelineError: on every rank, if the copies of a weight are not alike.
        """
        if not self._ties:
            return ()
        gathered = self._transport.gather_objects([self._described(tie) for tie in self._ties])
        return tuple(self._agreed(tie, [own[i] for own in gathered]) for i, tie in enumerate(self._ties))

    def _described(self, tie: Tie) -> TensorMeta | str | None:
        """Return the metadata of this rank's copy, or what is wrong with it; None if it has none."""
        if (weight := self._weight(tie)) is None:
            return None
        if is_hooked(weight):
            return "hooks on the tensor, which would see the gradients of one stage; use a post-accumulate hook"
        try:
            local_part(weight)
        except RuntimeError as error:
            return f"one that cannot be read between forwards, as with ZeRO 3 (use zero=2): {error}"
        try:
            return meta_of(weight)
        except PipelineError as error:
            return str(error)

    def _agreed(self, tie: Tie, found: Sequence[TensorMeta | str | None]) -> TieState:
        for rank, each in enumerate(found):
            if isinstance(each, str):
                raise PipelineError(f"{tie}: {self._placement.name_of(rank)}: expected a weight to share, got {each}")
        owner = found[self._placement.ranks[tie.home]]
        assert isinstance(owner, TensorMeta)
        for rank, other in enumerate(found):
            if isinstance(other, TensorMeta) and not owner.same_data(replace(other, requires_grad=owner.requires_grad)):
                raise PipelineError(
                    f"{tie}: expected copies that are alike, got {owner} on "
                    f"{self._placement.name_of(self._placement.ranks[tie.home])} and {other} on "
                    f"{self._placement.name_of(rank)}; give its names the same dtype and the same placements"
                )
        return TieState(owner)

    def uses(self, states: Sequence[TieState], total: GradientSum) -> tuple[TieState, ...]:
        """Return the states with the stages that have given a gradient in the first micro-batch. A collective."""
        if not self._ties:
            return ()
        gathered = self._transport.gather_objects([self._dtypes(tie, total) for tie in self._ties])
        return tuple(self._used(state, [own[i] for own in gathered]) for i, state in enumerate(states))

    def _dtypes(self, tie: Tie, total: GradientSum) -> dict[int, torch.dtype]:
        weight = self._weight(tie)
        return {} if weight is None else {stage: each.dtype for stage, each in total.of(weight).items()}

    def _used(self, state: TieState, found: Sequence[dict[int, torch.dtype]]) -> TieState:
        dtypes = {stage: dtype for own in found for stage, dtype in own.items()}
        if not dtypes:
            return replace(state, stages=())
        dtype = functools.reduce(torch.promote_types, dtypes.values())
        return TieState(
            state.meta, tuple(sorted(dtypes, reverse=True)), replace(gradient_meta(state.meta), dtype=dtype)
        )

    # --- a step ---

    @contextlib.contextmanager
    def active(self, states: Sequence[TieState]) -> Iterator[None]:
        """Let borrowed weights require gradients, as their owners do, in this context."""
        borrowed = [
            weight
            for tie, state in zip(self._ties, states, strict=True)
            if state.meta.requires_grad and not self._owns(tie) and (weight := self._weight(tie)) is not None
        ]
        try:
            for weight in borrowed:
                weight.requires_grad_(True)
            yield
        finally:
            for weight in borrowed:
                weight.requires_grad_(False)

    @torch.no_grad()
    def lend(self, states: Sequence[TieState]) -> None:
        """Bring the values of tied weights to all ranks that use them."""
        for tie, state in zip(self._ties, states, strict=True):
            if (weight := self._weight(tie)) is None:
                continue
            if self._owns(tie):
                for rank in self._borrowers(tie):
                    self._transport.send(local_part(weight).contiguous(), rank)
            else:
                values = self._receive(state.meta, self._placement.ranks[tie.home], weight, f"values of {tie}")
                local_part(weight).copy_(values)

    @torch.no_grad()
    def collect(self, states: Sequence[TieState], total: GradientSum) -> None:
        """Add up the gradients of all stages on the rank that owns a weight."""
        for tie, state in zip(self._ties, states, strict=True):
            weight = self._weight(tie)
            if weight is None or state.stages is None:
                continue
            own = total.of(weight)
            total.replace(weight, None)
            if own.keys() != {stage for stage in state.stages if self._placement.is_here(stage)}:
                raise PipelineError(
                    f"{tie}: expected gradients from stages {sorted(state.stages)}, as in the first micro-batch, got "
                    f"them from stages {sorted(own)} of {self._placement.name_of(self._placement.rank)}; the use of a "
                    "weight for the loss may not depend on the data"
                )
            if (meta := state.gradient) is None:
                continue
            parts = {stage: local_gradient(each, state.meta).to(meta.dtype) for stage, each in own.items()}
            if not self._owns(tie):
                for stage in filter(parts.__contains__, state.stages):
                    self._transport.send(parts[stage], self._placement.ranks[tie.home])
                continue
            for stage in filter(lambda stage: stage not in parts, state.stages):
                what = f"the gradient of {tie} from stage {stage}"
                parts[stage] = self._receive(meta, self._placement.ranks[stage], weight, what)
            first, *others = (parts[stage] for stage in state.stages)
            mesh = weight.device_mesh if isinstance(weight, DTensor) else None
            total.replace(weight, from_local_part(sum(others, first), meta, mesh))

    def _receive(self, meta: TensorMeta, rank: int, weight: torch.Tensor, what: str) -> torch.Tensor:
        shape = meta.local_layout[0]
        stride = gradient_meta(meta).local_layout[1]  # contiguous
        return self._transport.receive(shape, stride, meta.dtype, device=weight.device, source=rank, what=what).wait()

    # --- this rank ---

    def weights(self) -> list[nn.Parameter]:
        """Return the tied weights that this rank has."""
        return [weight for tie in self._ties if (weight := self._weight(tie)) is not None]

    def _weight(self, tie: Tie) -> nn.Parameter | None:
        """Return this rank's copy; modules may have got new parameters since the engine was made."""
        here = [names[0] for stage, names in tie.names.items() if self._placement.is_here(stage)]
        return self._model.get_parameter(here[0]) if here else None

    def _owns(self, tie: Tie) -> bool:
        return self._placement.is_here(tie.home)

    def _borrowers(self, tie: Tie) -> list[int]:
        return sorted({self._placement.ranks[stage] for stage in tie.names} - {self._placement.rank})
