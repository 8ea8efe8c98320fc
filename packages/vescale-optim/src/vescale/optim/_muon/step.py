"""The matrices of one step: parts are read, sent, iterated, returned and written, as planned.

A rank's part of a matrix is a view of its momentum and of the result: of the stack's local tensor, or with ZeRO of a
flat piece of it. All decisions are in `plan.py`, all communication in `_ranks/axis.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._ranks.grid import Coords
from .._state.pieces import Piece
from .newton_schulz import NewtonSchulz
from .plan import Job, Routes, Sharing, Span

__all__ = ["MatrixStep"]


class MatrixStep:
    """The matrices of one step: momentum in, results out.

    Args:
        pieces: The pieces of all parameters with matrices.

    Attributes:
        results: By number of the parameter, as large as its momentum, in the order in which the momentum was added.
    """

    def __init__(self, pieces: Sequence[Piece]):
        self._pieces = pieces
        self._values: dict[int, Tensor] = {}
        self._iterations: dict[int, NewtonSchulz] = {}
        self.results: dict[int, Tensor] = {}

    def add(self, number: int, value: Tensor, iteration: NewtonSchulz) -> None:
        """Add the bfloat16 momentum of a parameter."""
        self._values[number], self._iterations[number] = value, iteration
        self.results[number] = torch.empty_like(value)

    def alone(self, jobs: Iterable[Job]) -> None:
        """Orthogonalize matrices that are full on this rank, for this rank."""
        for job in jobs:
            if job.tensor in self._values:
                result = self._iterate(job, self._view(job, {}, self._values).view(job.layout.shape))
                target = self._view(job, {}, self.results)
                target.copy_(result.reshape(target.shape))

    def share(self, sharing: Sharing) -> None:
        """Orthogonalize matrices on their owners, with all ranks that share them."""
        routes = sharing.routes(frozenset(self._values))
        parts = self._bring(sharing, routes)
        done = {job: self._iterate(job, _assemble(job, parts.pop(job), self._like())) for job in routes.owned}
        if sharing.is_copied:
            self._broadcast(sharing, routes, done)
        else:
            self._return(sharing, routes, done)

    def _iterate(self, job: Job, matrix: Tensor) -> Tensor:
        """Orthogonalize a matrix on the device that computes, which may differ from that of the momentum."""
        device = _torch.local_tensor(self._pieces[job.tensor].param).device
        return self._iterations[job.tensor](matrix.to(device)).to(matrix.device)

    def _like(self) -> Tensor:
        """Return an empty tensor with the dtype and device of what is sent, also if this rank sends nothing."""
        return torch.empty(0, dtype=torch.bfloat16, device=self._pieces[0].tensor.device)

    def _view(self, job: Job, coords: Coords, tensors: dict[int, Tensor]) -> Tensor:
        """Return the view of the part of a matrix that this rank, at ``coords``, has: flat, or in its local shape."""
        tensor = tensors[job.tensor]
        if tensor.ndim == 3:
            return tensor[job.index]
        if tensor.ndim == 2:
            return tensor
        start, stop = job.layout.position(job.index, coords)
        first = self._pieces[job.tensor].start
        return tensor[start - first : stop - first]

    def _exchange(self, sharing: Sharing, outgoing: list[list[Tensor]], num_received: list[int]) -> list[Tensor]:
        return sharing.grid.axis.exchange_uneven(outgoing, num_received, self._like(), what="matrices")

    def _bring(self, sharing: Sharing, routes: Routes) -> dict[Job, list[tuple[Span, Tensor]]]:
        """Send this rank's parts to their owners; return the parts of the matrices that this rank owns."""
        here = sharing.grid.place
        coords = sharing.grid.coords[here]
        arrived: list[Tensor] = []
        if sharing.brings:
            outgoing = [[self._view(span.job, coords, self._values) for span in spans] for spans in routes.sent]
            arrived = self._exchange(sharing, outgoing, _numels(routes.held, but=here))
        parts: dict[Job, list[tuple[Span, Tensor]]] = {job: [] for job in routes.owned}
        for place, spans in enumerate(routes.held):
            if place == here:
                flats = [self._view(span.job, coords, self._values) for span in spans]
            else:
                flats = _split(arrived[place], spans) if spans else []
            for span, flat in zip(spans, flats, strict=True):
                parts[span.job].append((span, flat))
        return parts

    def _return(self, sharing: Sharing, routes: Routes, done: dict[Job, Tensor]) -> None:
        """Send the results of this rank's matrices to their holders; write the results from other owners."""
        here = sharing.grid.place
        flats: dict[tuple[Job, int], Tensor] = {}  # of each cell, once

        def part(span: Span) -> Tensor:
            key = span.job, id(span.cell)
            if key not in flats:
                flats[key] = span.cell.take(done[span.job])
            return flats[key][span.start : span.stop]

        outgoing = [[part(span) for span in spans] for spans in routes.returned]
        returned = self._exchange(sharing, outgoing, _numels(routes.awaited, but=here))
        for place, spans in enumerate(routes.awaited):
            values = [part(span) for span in spans] if place == here else _split(returned[place], spans)
            self._write(sharing, spans, values)

    def _broadcast(self, sharing: Sharing, routes: Routes, done: dict[Job, Tensor]) -> None:
        """Broadcast the results of this rank's matrices to every rank; write the results of all."""
        mine = torch.cat([self._like(), *(result.reshape(-1) for result in done.values())])
        every = sharing.grid.axis.gather_uneven(mine, _numels(routes.awaited), what="matrices")
        for spans, flat in zip(routes.awaited, every, strict=True):
            self._write(sharing, spans, _split(flat, spans))

    def _write(self, sharing: Sharing, spans: Sequence[Span], values: Sequence[Tensor]) -> None:
        coords = sharing.grid.coords[sharing.grid.place]
        for span, value in zip(spans, values, strict=True):
            target = self._view(span.job, coords, self.results)
            target.copy_(value.view(target.shape))


def _assemble(job: Job, parts: Sequence[tuple[Span, Tensor]], like: Tensor) -> Tensor:
    """Return a matrix from all of its parts; a part that is the full matrix is returned without a copy."""
    if len(parts) == 1 and parts[0][0].is_full:
        return parts[0][1].view(job.layout.shape)
    cells: dict[int, list[tuple[Span, Tensor]]] = {}
    for span, part in sorted(parts, key=lambda each: each[0].start):
        cells.setdefault(id(span.cell), []).append((span, part.reshape(-1)))
    joined = [(those[0][0].cell, torch.cat([flat for _, flat in those])) for those in cells.values()]
    if len(joined) == 1 and joined[0][0].shape == job.layout.shape:
        return joined[0][1].view(job.layout.shape)
    matrix = like.new_empty(job.layout.shape)
    for cell, flat in joined:
        cell.put(matrix, flat)
    return matrix


def _split(flat: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    return flat.split([span.numel for span in spans])


def _numels(spans: Sequence[Sequence[Span]], *, but: int = -1) -> list[int]:
    """Return the elements of each place's spans; 0 at the place ``but``."""
    return [0 if place == but else sum(span.numel for span in each) for place, each in enumerate(spans)]
