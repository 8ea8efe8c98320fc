"""Where matrices are orthogonalized: on this rank, or on their owners among the ranks.

Muon updates momentum element by element, wherever the elements are, but its iteration needs full matrices:

    momentum    on pieces, flat parts of tensors (ZeRO 1-3), shards (tensor parallelism), or full tensors
    bring       its parts to the owner of each matrix, one of the ranks that have      all-to-all, unless all have it
                parts or copies of it: data-parallel and tensor-parallel ones
    iterate     Newton-Schulz, in bfloat16
    return      to each of these ranks its part of the result        all-to-all; broadcasts, if all have everything

Values are cast to bfloat16, the dtype of the iteration, before they are sent. Every matrix is iterated once, as a full
matrix, in the memory layout of one process. So the result has the bits of one process. Owners are balanced by cost over
all of these ranks, including tensor-parallel ranks and replicas of shards (`plan.py`). No rank repeats the work of
another, except for a single matrix that all of them hold in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .._state.pieces import Piece
from ..ddp import DDP
from .layout import MatrixLayout, Part, layout_of
from .newton_schulz import NewtonSchulz
from .plan import Job, Sharing, share_matrices
from .step import MatrixStep

__all__ = ["FullMatrices", "Matrices", "PieceMatrices", "Update"]


@dataclass(frozen=True)
class Update:
    """The momentum of a tensor, to be orthogonalized.

    Attributes:
        tensor: The tensor that the optimizer updates.
        value: Its momentum, of the tensor's shape.
        iteration: The iteration with the settings of the tensor's group.
    """

    tensor: Tensor
    value: Tensor
    iteration: NewtonSchulz


@runtime_checkable
class Matrices(Protocol):
    """The shapes of matrices, and their orthogonalization."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the full parameter that ``tensor`` is, or is a part of."""

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return that parameter, the user's object."""

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Plan for all tensors that may be orthogonalized, with or without a gradient in a step."""

    def orthogonalize(self, updates: Iterable[Update]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each update's tensor and result, a bfloat16 tensor of the same shape, in order."""


class FullMatrices:
    """Matrices of tensors that are full matrices (rows, cols), or stacks of them (num_matrices, rows, cols), of this
    process.
    """

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return its own shape."""
        return tuple(tensor.shape)

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing."""

    def orthogonalize(self, updates: Iterable[Update]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield results one by one; the next update is taken after the caller has used the last result."""
        for update in updates:
            yield update.tensor, _each_matrix(update.value, update.iteration)


def _each_matrix(value: Tensor, iteration: NewtonSchulz) -> Tensor:
    if value.ndim == 2:
        return iteration(value)
    return torch.stack([iteration(matrix) for matrix in value]) if len(value) else value.bfloat16()


class PieceMatrices:
    """Matrices of tensors that are the pieces of a model's parameters on this rank.

    Args:
        pieces: All pieces.
        model: The model from which they were cut.
    """

    def __init__(self, pieces: Iterable[Piece], model: object):
        self._by_tensor = {piece.tensor: piece for piece in pieces}
        self._model = model if isinstance(model, DDP) else None
        self._pieces: list[Piece] = []
        self._numbers: dict[Tensor, int] = {}
        self._jobs: list[Job] = []
        self._sharings: list[Sharing] = []
        self._is_agreed = False

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the global shape of the parameter."""
        return tuple(self._by_tensor[tensor].param.shape)

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return the parameter that the piece was cut from."""
        return self._by_tensor[tensor].param

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Choose the owners of all matrices in these pieces.

        Raises:
            NotImplementedError: If a placement cuts matrices in an unsupported way.
        """
        self._pieces = [self._by_tensor[tensor] for tensor in tensors]
        self._numbers = {tensor: number for number, tensor in enumerate(tensors)}
        self._jobs, self._sharings = share_matrices(_layouts(self._pieces, self._model))

    def orthogonalize(self, updates: Iterable[Update]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield results. All ranks that share matrices call it with updates of the same matrices, or none.

        Raises:
            ValueError: In the first call, if ranks have different plans.
        """
        self._agree()
        step = MatrixStep(self._pieces)
        for update in updates:
            step.add(self._numbers[update.tensor], update.value.bfloat16(), update.iteration)
        step.alone(self._jobs)
        for sharing in self._sharings:
            step.share(sharing)
        for number, result in step.results.items():
            yield self._pieces[number].tensor, result

    def _agree(self) -> None:
        for sharing in [] if self._is_agreed else self._sharings:
            sharing.grid.axis.check_same(sharing.describe(), what="the list of matrices that ranks share")
        self._is_agreed = True


def _layouts(pieces: Iterable[Piece], model: DDP | None) -> list[MatrixLayout]:
    if model is None:
        return [layout_of(piece.fqn, piece.param) for piece in pieces]
    copying = [model.data_axes.replicate] if model.data_axes.replicate.size > 1 else []
    shard = model.data_axes.shard
    parts: dict[str, Part] = {}
    if model.zero and shard.size > 1:
        buckets = {slot.bucket.plan.index: slot.bucket.plan for slot in model.slots().values()}
        for bucket in buckets.values():
            parts |= {slot.fqn: Part(shard, slot.start, bucket.shard_numel) for slot in bucket.slots}
    return [layout_of(piece.fqn, piece.param, copying, parts.get(piece.fqn)) for piece in pieces]
