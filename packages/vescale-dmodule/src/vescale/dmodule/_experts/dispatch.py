"""The exchange of tokens between the ranks that hold them and the ranks that hold their experts.

Planned by pure functions over integers, carried out by a :class:`TokenDispatcher`, which is replaceable::

    index  (T, k)         experts of each token, in ascending order: the order in which their outputs are added
      | route             lanes, sorted by (rank, local expert, token): pairs for one expert lie together
      | dispatch          one all-to-all of hidden states, one of weights
    rows   (R, hidden)    by (source rank, local expert, token); the module's own forward, one expert per row
      | combine           the all-to-all back
    output (T, hidden)    each token's rows added in the order of its experts: the same whatever the layout

Which tokens an expert sees, and in which order, does not depend on the number of ranks either (their order in the
batch, if ranks hold consecutive parts of it), so gradients of weights add up in the same order too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, all_to_all

__all__ = ["AllToAll", "Exchange", "Route", "TokenDispatcher", "exchange_counts", "plan_exchange", "route"]


# ------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class Route:
    """Where the pairs of this rank's tokens go.

    Attributes:
        order: (T * k * copies,) int64: pairs, sorted by lane, in each lane by token; those that go nowhere come last.
        counts: (group size, num_local) int64: pairs for each lane.
    """

    order: Tensor
    counts: Tensor


def route(index: Tensor, table: Tensor, *, group_size: int, num_local: int) -> Route:
    """Sort the pairs of ``index`` by lane.

    Args:
        index: (T, k) int64, experts of each token; the number of experts and what lies above it mean "no expert".
        table: (num_experts + 1, copies) int64, of :func:`lane_table`.
        group_size: ranks in the exchange.
        num_local: experts per rank.

    Example:
        >>> table = torch.tensor([[0], [1], [2]])                        # two experts, one per rank; nowhere
        >>> route(torch.tensor([[0], [1], [0]]), table, group_size=2, num_local=1).order
        tensor([0, 2, 1])
    """
    # index_select, as an embedding does, refuses negative indices
    lanes = table.index_select(0, index.clamp(max=len(table) - 1).reshape(-1)).reshape(-1)
    counts = lanes.new_zeros(group_size * num_local + 1).scatter_add_(0, lanes, torch.ones_like(lanes))
    return Route(torch.argsort(lanes, stable=True), counts[:-1].reshape(group_size, num_local))


@dataclass(frozen=True)
class Exchange:
    """Numbers of rows that travel, known on the host.

    Attributes:
        send: rows for each rank of the group.
        receive: rows from each rank of the group.
        experts: rows from each rank for each local expert: the received rows lie in this order.
        group: None if there is nobody else.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    experts: tuple[tuple[int, ...], ...]
    group: Group = None

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank, those for itself included."""
        return sum(self.send)

    @property
    def num_received(self) -> int:
        """Rows that this rank computes."""
        return sum(self.receive)


def plan_exchange(send: Sequence[Sequence[int]], receive: Sequence[Sequence[int]], group: Group = None) -> Exchange:
    """Return what travels, from counts by (rank, local expert) of what this rank sends and of what it receives.

    Example:
        >>> plan_exchange([[2, 0], [1, 1]], [[2, 0], [0, 3]]).receive
        (2, 3)
    """
    return Exchange(
        send=tuple(sum(counts) for counts in send),
        receive=tuple(sum(counts) for counts in receive),
        experts=tuple(tuple(counts) for counts in receive),
        group=group,
    )


def exchange_counts(counts: Tensor, group: Group) -> Exchange:
    """Tell the other ranks how many rows will come, and return what travels.

    The one point where the host waits for the device: the split sizes of the all-to-all are needed there.

    Args:
        counts: (group size, num_local) int64, of :class:`Route`.
        group: ranks of the exchange, None for this rank alone.
    """
    received = counts
    if group is not None:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=group)
    return plan_exchange(*torch.stack([counts, received]).tolist(), group)


# ------------------------------------------------------------------------------------------------- transport


class TokenDispatcher(Protocol):
    """How rows travel. Both methods are differentiable and called by all ranks of ``exchange.group`` alike."""

    def dispatch(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """Send rows to their experts.

        Args:
            rows: (num_sent, ...), hidden states or weights, consecutive ``exchange.send`` for each rank.
            exchange: what travels.

        Returns:
            (num_received, ...), consecutive ``exchange.receive`` from each rank.
        """

    def combine(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """Send the experts' outputs back: (num_received, hidden) to (num_sent, hidden), in ``dispatch``'s order."""


@dataclass(frozen=True)
class AllToAll:
    """Rows travel by one all-to-all with uneven splits, of exactly the rows that are needed."""

    def dispatch(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """See :class:`TokenDispatcher`."""
        return all_to_all(rows, send=exchange.send, receive=exchange.receive, group=exchange.group)

    def combine(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """See :class:`TokenDispatcher`."""
        return all_to_all(rows, send=exchange.receive, receive=exchange.send, group=exchange.group)
