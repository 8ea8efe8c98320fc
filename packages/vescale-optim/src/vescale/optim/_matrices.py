"""Where matrices are orthogonalized: here, or on their owners among the ranks.

Muon updates momentum element by element, wherever the elements are, but its iteration needs whole matrices:

    momentum    on pieces, flat parts of tensors (ZeRO 1-3), shards (tensor parallelism), or whole tensors
    bring       the pieces of a matrix to its owner over the data-parallel axis                all-to-all   (ZeRO 1-3)
    gather      the shards of a matrix over the axes that cut it, on the ranks of the owner    all-gather   (if cut)
    iterate     Newton-Schulz, in bfloat16
    return      to the pieces                                 all-to-all (ZeRO 1-3), or broadcasts (ZeRO 0)

Values are cast to bfloat16, with which the iteration begins, before they travel. Every matrix is iterated once, as a
whole, in the memory layout of one process: so the result has the bits of one process. Owners are balanced by cost, over
the data-parallel axis; the ranks that hold shards of one matrix repeat its iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch
from ._axis import Axis
from ._exchange import all_to_all, broadcast_each
from ._newton_schulz import NewtonSchulz
from ._owners import Holding, Matrix, Span, assign_owners, cut_spans, holdings, matrix_cost
from ._pieces import Piece
from .ddp import DDP

__all__ = ["Matrices", "PieceMatrices", "Update", "WholeMatrices"]

#: Plans that are kept, one for each set of parameters that had gradients in a step.
_MAX_PLANS = 16


@dataclass(frozen=True)
class Update:
    """What is to be orthogonalized: the momentum of a tensor.

    Attributes:
        tensor: The tensor that the optimizer updates.
        value: Its momentum, of the tensor's shape.
        iteration: The iteration with the settings of the tensor's group.
    """

    tensor: Tensor
    value: Tensor
    iteration: NewtonSchulz


class Matrices(Protocol):
    """Knows the shapes of matrices and orthogonalizes them."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter that ``tensor`` is, or is a part of."""

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return that parameter, the user's object."""

    def orthogonalize(self, updates: Iterable[Update]) -> Iterator[tuple[Update, Tensor]]:
        """Yield each update with its result, a bfloat16 tensor of the same shape, in order."""


class WholeMatrices:
    """Tensors are whole matrices (rows, cols), or stacks of them (num_matrices, rows, cols), of this process alone."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return its own shape."""
        return tuple(tensor.shape)

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def orthogonalize(self, updates: Iterable[Update]) -> Iterator[tuple[Update, Tensor]]:
        """Yield results one by one; the next update is taken when the last has been used."""
        for update in updates:
            yield update, _each_matrix(update.value, update.iteration)


def _each_matrix(value: Tensor, iteration: NewtonSchulz) -> Tensor:
    if value.ndim == 2:
        return iteration(value)
    return torch.stack([iteration(matrix) for matrix in value]) if len(value) else value.bfloat16()


class PieceMatrices:
    """Tensors are the pieces of a model's parameters on this rank.

    Args:
        pieces: All pieces.
        model: The model they were cut from.
    """

    def __init__(self, pieces: Iterable[Piece], model: object):
        self._by_tensor = {piece.tensor: piece for piece in pieces}
        ddp = model if isinstance(model, DDP) and _owners_axis(model).size > 1 else None
        self._axis = _owners_axis(ddp) if ddp else None
        self._holdings = _holdings(ddp) if ddp and ddp.zero else None
        self._plans: dict[tuple[Tensor, ...], _Plan] = {}

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the global shape of the parameter."""
        return tuple(self._by_tensor[tensor].param.shape)

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return the parameter that the piece was cut from."""
        return self._by_tensor[tensor].param

    def orthogonalize(self, updates: Iterable[Update]) -> Iterator[tuple[Update, Tensor]]:
        """Yield results; every rank of the axes involved calls it with updates of the same parameters, in order."""
        updates = [Update(u.tensor, u.value.bfloat16(), u.iteration) for u in updates]
        if not updates:
            return
        plan = self._plan(tuple(update.tensor for update in updates))
        if self._axis is None:
            results = _here(updates, plan)
        elif self._holdings is None:
            results = _shared(updates, plan, self._axis)
        else:
            results = _exchanged(updates, plan, self._axis)
        yield from zip(updates, results, strict=True)

    def _plan(self, tensors: tuple[Tensor, ...]) -> _Plan:
        if tensors not in self._plans:
            if len(self._plans) >= _MAX_PLANS:  # a model that uses other parameters in every step
                self._plans.clear()
            pieces = [self._by_tensor[tensor] for tensor in tensors]
            size = self._axis.size if self._axis else 1
            matrices = _number_matrices(pieces, size)
            spans = []
            if self._holdings is not None:
                spans = cut_spans(matrices, [self._holdings[piece.fqn] for piece in pieces])
            self._plans[tensors] = _Plan(pieces, matrices, spans, size)
        return self._plans[tensors]


def _owners_axis(model: DDP) -> Axis:
    """Return the axis of the owners: with ZeRO that of the shards, whose replicas all do the same."""
    return model._axes.shard if model.zero else model._axes.all


def _holdings(model: DDP) -> dict[str, list[Holding]]:
    """Return for each parameter of a ``DDP`` with ZeRO 1 to 3 which coord holds which part of it."""
    buckets = {slot.bucket.plan.index: slot.bucket.plan for slot in model.slots().values()}
    places = [(bucket.shard_numel, slot) for bucket in buckets.values() for slot in bucket.slots]
    return {slot.fqn: holdings(slot.start, slot.numel, shard_numel) for shard_numel, slot in places}


class _Plan:
    """Who owns which matrix of a list of pieces, and what travels.

    Attributes:
        pieces: The pieces.
        matrices: Their matrices of which this rank holds a shard.
        by_owner: Numbers of the matrices of each coord, in increasing order.
        spans: See `cut_spans`; none unless pieces are parts of tensors.
    """

    def __init__(self, pieces: list[Piece], matrices: list[Matrix], spans: list[Span], size: int):
        self.pieces = pieces
        self.matrices = matrices
        self.spans = spans
        self._routes: tuple[list[list[Span]], list[list[Span]]] | None = None
        self.by_owner: list[list[int]] = [[] for _ in range(size)]
        for number, matrix in enumerate(matrices):
            self.by_owner[matrix.owner].append(number)

    def local_shape(self, number: int) -> torch.Size:
        """Return the shape of this rank's shard of a matrix."""
        return _torch.local_tensor(self.pieces[self.matrices[number].tensor].param).shape[-2:]

    def matrix(self, number: int, values: Sequence[Tensor]) -> Tensor:
        """Return the view of this rank's shard of a matrix in the values of all tensors, flat or not."""
        matrix = self.matrices[number]
        shape = _torch.local_tensor(self.pieces[matrix.tensor].param).shape
        value = values[matrix.tensor]
        value = value if value.shape == shape else value.view(shape)
        return value if len(shape) == 2 else value[matrix.index]

    def routes(self, axis: Axis) -> tuple[list[list[Span]], list[list[Span]]]:
        """Return the spans that this coord sends to each coord, and those that it gets from each as an owner."""
        if self._routes is None:
            sent: list[list[Span]] = [[] for _ in range(axis.size)]
            held: list[list[Span]] = [[] for _ in range(axis.size)]
            for span in self.spans:
                owner = self.matrices[span.matrix].owner
                if span.holder == axis.coord:
                    sent[owner].append(span)
                if owner == axis.coord:
                    held[span.holder].append(span)
            self._routes = sent, held
        return self._routes

    def place(self, span: Span, flats: Sequence[Tensor]) -> Tensor:
        """Return the view of a span that is here in the flat pieces of all tensors."""
        tensor = self.matrices[span.matrix].tensor
        first = self.pieces[tensor].start
        return flats[tensor][span.start - first : span.stop - first]

    def iterate(self, number: int, local: Tensor, iteration: NewtonSchulz) -> Tensor:
        """Return this rank's shard of the orthogonalized matrix, from its shard of the matrix."""
        param = self.pieces[self.matrices[number].tensor].param
        if not isinstance(param, DTensor):
            return iteration(local)
        return _torch.on_whole_matrix(local, param, iteration)


def _number_matrices(pieces: Sequence[Piece], num_owners: int) -> list[Matrix]:
    """Number the matrices that are here, and give each an owner: the same on all ranks that hold shards of them.

    Where a stack is distributed over ranks, these hold different matrices, and perhaps not equally many. Owners are
    assigned for the largest number, so that all ranks of other matrices, which may be the same ranks, agree.
    """
    slots = [
        (tensor, index) for tensor, piece in enumerate(pieces) for index in range(_largest_local_stack(piece.param))
    ]
    costs = [matrix_cost(*pieces[tensor].param.shape[-2:]) for tensor, _ in slots]
    matrices = []
    for (tensor, index), owner in zip(slots, assign_owners(costs, num_owners), strict=True):
        local = _torch.local_tensor(pieces[tensor].param).shape
        numel = local[-2] * local[-1]
        if len(local) == 2 or index < local[0]:
            matrices.append(Matrix(tensor, index, index * numel, (index + 1) * numel, owner))
    return matrices


def _largest_local_stack(param: Tensor) -> int:
    """Return the largest number of matrices that a rank holds of a parameter."""
    if param.ndim == 2:
        return 1
    count = param.shape[0]
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            if placement.is_shard(0):
                count = -(-count // param.device_mesh.size(dim))
    return count


def _here(updates: Sequence[Update], plan: _Plan) -> Iterator[Tensor]:
    """Orthogonalize all matrices on this rank."""
    values = [update.value for update in updates]
    results = [torch.empty_like(value) for value in values]
    for number, matrix in enumerate(plan.matrices):
        shard = plan.iterate(number, plan.matrix(number, values), updates[matrix.tensor].iteration)
        plan.matrix(number, results).copy_(shard)
    yield from results


def _shared(updates: Sequence[Update], plan: _Plan, axis: Axis) -> Iterator[Tensor]:
    """Every coord has everything: orthogonalize one's own and tell the others."""
    values = [update.value for update in updates]
    results = [torch.empty_like(value) for value in values]
    mine = [values[0].new_empty(0)]
    for number in plan.by_owner[axis.coord]:
        iteration = updates[plan.matrices[number].tensor].iteration
        mine.append(plan.iterate(number, plan.matrix(number, values), iteration).reshape(-1))
    numels = [[plan.local_shape(n).numel() for n in owned] for owned in plan.by_owner]
    every = broadcast_each(torch.cat(mine), [sum(each) for each in numels], axis)
    for flat, owned, sizes in zip(every, plan.by_owner, numels, strict=True):
        for number, shard in zip(owned, flat.split(sizes), strict=True):
            plan.matrix(number, results).copy_(shard.view(plan.local_shape(number)))
    yield from results


def _exchanged(updates: Sequence[Update], plan: _Plan, axis: Axis) -> Iterator[Tensor]:
    """Every coord has parts of everything: bring matrices to their owners and the results back."""
    like = updates[0].value
    flats = [update.value.view(-1) for update in updates]
    results = [torch.empty_like(flat) for flat in flats]
    sent, held = plan.routes(axis)
    outgoing = [[plan.place(span, flats) for span in to_one] for to_one in sent]
    arrived = all_to_all(outgoing, [_numel(spans) for spans in held], like, axis)
    parts: dict[int, list[Tensor]] = {number: [] for number in plan.by_owner[axis.coord]}
    for spans, flat in zip(held, arrived, strict=True):
        for span, values in zip(spans, flat.split([span.numel for span in spans]), strict=True):
            parts[span.matrix].append(values)
    done = {}
    for number, values in parts.items():
        matrix = plan.matrices[number]
        local = torch.cat(values) if values else like.new_empty(0)
        shard = plan.iterate(number, local.view(plan.local_shape(number)), updates[matrix.tensor].iteration)
        done[number] = shard.reshape(-1)
    starts = [matrix.start for matrix in plan.matrices]
    outgoing = [[done[s.matrix][s.start - starts[s.matrix] : s.stop - starts[s.matrix]] for s in to] for to in held]
    returned = all_to_all(outgoing, [_numel(spans) for spans in sent], like, axis)
    for spans, flat in zip(sent, returned, strict=True):
        for span, values in zip(spans, flat.split([span.numel for span in spans]), strict=True):
            plan.place(span, results).copy_(values)
    return (result.view(update.value.shape) for result, update in zip(results, updates, strict=True))


def _numel(spans: Iterable[Span]) -> int:
    return sum(span.numel for span in spans)
