"""Exchange tokens between the ranks that hold them and the ranks that hold their experts.

Pure functions over integers plan the exchange; a replaceable :class:`TokenDispatcher` carries it out::

    index  (T, k)         experts of each token, in ascending order: the order in which their outputs are added
      | route             lanes, sorted by (rank, local expert, token): pairs for one expert lie together
      | dispatch          one all-to-all of hidden states, one of weights
    rows   (R, hidden)    by (source rank, local expert, token); the module's own forward, one expert per row
      | combine           the all-to-all back
    output (T, hidden)    each token's rows added in the order of its experts: the same whatever the layout

The tokens of an expert, and their order, do not depend on the number of ranks either (if ranks hold consecutive parts
of the batch, it is the order in the batch). So gradients of weights add up in the same order too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from vescale.dtensor.extension import waits_of

from .operators import Group, add_rows, all_to_all, take_rows

__all__ = [
    "AllToAll",
    "Exchange",
    "Route",
    "TokenDispatcher",
    "exchange_counts",
    "plan_exchange",
    "route",
    "send_to_experts",
]


# ------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class Route:
    """The destinations of the pairs of this rank's tokens.

    Attributes:
        order: (T * k * copies,) int64: pairs, sorted by lane and within a lane by token; pairs of no expert come last.
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
    """The numbers of rows that ranks exchange, on the host.

    Attributes:
        send: rows for each rank of the group.
        receive: rows from each rank of the group.
        experts: rows from each rank for each local expert: the received rows lie in this order.
        group: ranks of the exchange; None for this rank alone.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    experts: tuple[tuple[int, ...], ...]
    group: Group = None

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends, to itself included."""
        return sum(self.send)

    @property
    def num_received(self) -> int:
        """Rows that this rank computes."""
        return sum(self.receive)


def plan_exchange(send: Sequence[Sequence[int]], receive: Sequence[Sequence[int]], group: Group = None) -> Exchange:
    """Return an exchange from the counts of sent and of received rows, by (rank, local expert).

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
    """Send the row counts to the other ranks, and return the exchange.

    The only point where the host waits for the device: it needs the split sizes of the all-to-all.

    Args:
        counts: (group size, num_local) int64, of :class:`Route`.
        group: ranks of the exchange, None for this rank alone.
    """
    received = counts
    if group is not None:
        received = torch.empty_like(counts)
        waits_of(group).run("all-to-all", dist.all_to_all_single, received, counts.contiguous())
    return plan_exchange(*torch.stack([counts, received]).tolist(), group)


# ------------------------------------------------------------------------------------------------- transport


@runtime_checkable
class TokenDispatcher(Protocol):
    """A way to exchange rows. Both methods are differentiable; all ranks of ``exchange.group`` call them alike."""

    def dispatch(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """Send rows to their experts.

        Args:
            rows: (num_sent, ...), hidden states or weights, consecutive ``exchange.send`` for each rank.
            exchange: the numbers of rows.

        Returns:
            (num_received, ...), consecutive ``exchange.receive`` from each rank.
        """

    def combine(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """Send the experts' outputs back: (num_received, hidden) to (num_sent, hidden), in ``dispatch``'s order."""


@dataclass(frozen=True)
class AllToAll:
    """Exchange rows by one all-to-all with uneven splits, without padding."""

    def dispatch(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """See :class:`TokenDispatcher`."""
        return all_to_all(rows, send=exchange.send, receive=exchange.receive, group=exchange.group)

    def combine(self, rows: Tensor, exchange: Exchange) -> Tensor:
        """See :class:`TokenDispatcher`."""
        return all_to_all(rows, send=exchange.receive, receive=exchange.send, group=exchange.group)


# ------------------------------------------------------------------------------------------------- there and back


def send_to_experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    table: Tensor,
    dispatcher: TokenDispatcher,
    *,
    group: Group,
    num_local: int,
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Send tokens to the ranks of their experts.

    Args:
        hidden: (..., hidden), tokens of this rank.
        index: (..., k) int64, experts of each token.
        weights: (..., k), of these experts.
        table: (num_experts + 1, copies) int64, of :func:`lane_table`.
        dispatcher: exchanges the rows.
        group: ranks of the exchange, None for this rank alone.
        num_local: experts per rank.

    Returns:
        rows (R, hidden), their local experts (R, 1), their weights (R, 1), and the function that sends the experts'
        output (R, hidden) back and adds it up to (..., hidden).
    """
    shape, top_k, copies = hidden.shape, index.shape[-1], table.shape[1]
    index, by_expert = index.reshape(-1, top_k).sort(dim=-1, stable=True)
    weights = weights.reshape(-1, top_k).gather(-1, by_expert).reshape(-1)
    num_group = group.size() if group is not None else 1
    way = route(index, table, group_size=num_group, num_local=num_local)
    exchange = exchange_counts(way.counts, group)
    order = way.order[: exchange.num_sent]
    rows = take_rows(hidden.reshape(-1, shape[-1]), order, top_k * copies)
    rows = dispatcher.dispatch(rows, exchange)
    row_weights = dispatcher.dispatch(take_rows(weights, order, copies), exchange)

    def back(out: Tensor) -> Tensor:
        out = add_rows(dispatcher.combine(out, exchange), order, len(index), top_k * copies)
        return out.reshape(*shape[:-1], out.shape[-1])

    return rows, _experts_of_rows(exchange, index.device)[:, None], row_weights[:, None], back


def _experts_of_rows(exchange: Exchange, device: torch.device) -> Tensor:
    """Return the local expert of each received row, (num_received,) int64."""
    counts = torch.tensor(exchange.experts, dtype=torch.int64, device=device)
    experts = torch.arange(counts.shape[1], device=device).repeat(len(counts))
    return experts.repeat_interleave(counts.reshape(-1), output_size=exchange.num_received)
