"""Collectives of a few numbers, made of messages between pairs of ranks.

gloo hands a collective to other threads, on every rank. Two of them in each step, an all-gather on the way in and a
broadcast on the way out, took longer than all messages of tiny stages (``benchmarks/bench_pipeline.py``).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Channel(Protocol):
    """Messages between pairs of ranks of a group; those of a pair match by order. ``what`` names them in errors."""

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, to: int, what: str) -> Any:
        """Begin to send a contiguous tensor, and return what to wait for."""

    def receive(self, tensor: torch.Tensor, source: int, what: str) -> Any:
        """Begin to receive into a contiguous tensor, and return what to wait for."""

    def wait(self, work: Any, what: str) -> None:
        """Wait for a message."""


def gather(channel: Channel, mine: torch.Tensor, what: str) -> torch.Tensor:
    """Return the tensors of all ranks, ``[rank, ...]``, in as many rounds as ``size - 1`` has binary digits.

    A rank has those of itself and of the ranks after it, twice as many after each round (Bruck et al., "Efficient
    algorithms for all-to-all communications in multiport message-passing systems", 1997, section 4).
    """
    what = f"the all-gather of {what}"
    rows = mine.new_empty(channel.size, *mine.shape)
    rows[0] = mine
    have = 1
    while have < channel.size:
        count = min(have, channel.size - have)
        arriving = channel.receive(rows[have : have + count], (channel.rank + have) % channel.size, what)
        leaving = channel.send(rows[:count], (channel.rank - have) % channel.size, what)
        channel.wait(arriving, what)
        channel.wait(leaving, what)
        have += count
    return rows.roll(channel.rank, 0)


def broadcast(channel: Channel, tensor: torch.Tensor, source: int, what: str) -> None:
    """Copy the tensor of rank ``source`` into that of every rank, along a binomial tree: each rank passes it on."""
    what = f"the broadcast of {what}"
    size, place = channel.size, (source - channel.rank) % channel.size
    digits = place.bit_length()
    if place:
        sender = (source - place + (1 << (digits - 1))) % size
        channel.wait(channel.receive(tensor, sender, what), what)
    later = (place + (1 << digit) for digit in range(digits, size.bit_length()))
    sent = [channel.send(tensor, (source - other) % size, what) for other in later if other < size]
    for work in sent:
        channel.wait(work, what)
