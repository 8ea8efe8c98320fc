"""Collectives of unequal sizes between the holders of a matrix and its owner: bytes in, bytes out.

Values travel as bytes, so that every backend takes every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Axis

__all__ = ["all_to_all", "broadcast_each"]


def all_to_all(
    pieces: Sequence[Sequence[Tensor]], num_received: Sequence[int], like: Tensor, axis: Axis
) -> list[Tensor]:
    """Send ``pieces[coord]`` to each coord and return one flat tensor per coord, of ``num_received[coord]`` elements.

    All tensors have the dtype and device of ``like``; what arrives keeps the order in which it was sent.
    """
    size = like.element_size()
    sent = [sum(piece.numel() for piece in to_one) for to_one in pieces]
    flat = [piece.reshape(-1) for to_one in pieces for piece in to_one]
    outgoing = torch.cat(flat) if flat else like.new_empty(0)
    incoming = like.new_empty(sum(num_received))
    splits = {
        "output_split_sizes": [numel * size for numel in num_received],
        "input_split_sizes": [numel * size for numel in sent],
    }
    buffers = incoming.view(torch.uint8), outgoing.view(torch.uint8)
    axis._start("all-to-all", "matrices", dist.all_to_all_single, *buffers, **splits).wait()
    return list(incoming.split(list(num_received)))


def broadcast_each(mine: Tensor, numels: Sequence[int], axis: Axis) -> list[Tensor]:
    """Return the flat tensor of every coord, of ``numels[coord]`` elements; ``mine`` is this coord's."""
    every = [mine if coord == axis.coord else mine.new_empty(numel) for coord, numel in enumerate(numels)]
    works = [
        axis._start("broadcast", "matrices", dist.broadcast, each.view(torch.uint8), group_src=coord)
        for coord, each in enumerate(every)
        if each.numel()
    ]
    for work in works:
        work.wait()
    return every
