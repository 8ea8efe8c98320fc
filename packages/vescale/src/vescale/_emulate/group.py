"""Process groups of emulated ranks: collectives that happen when the last rank has come.

Ranks of a group meet in calls of the same number. Who comes brings its tensors; the last one carries the collective
out, for all of them. `wait` of the work lets other ranks run until then. Ranks that meet in different collectives are
an error on the spot, which names both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .additions import ring
from .turns import current_rank

__all__ = ["EmulatedGroup", "Meetings"]

# Any: signatures of their methods differ between versions of torch
_WORK: Any = dist.Work
_GROUP: Any = dist.ProcessGroup

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass
class _Meeting:
    """One collective: what the ranks of the group have brought, by rank in the group."""

    kind: str
    first: int
    brought: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False


class Meetings:
    """What ranks of all groups of a world share: collectives by group and number, messages by sender and receiver."""

    def __init__(self) -> None:
        self.meetings: dict[tuple[object, int], _Meeting] = {}
        self.channels: dict[tuple[object, int, int, int], _Channel] = {}


@dataclass
class _Channel:
    """The messages from one rank to another, by number; a receive takes that of its own number."""

    messages: dict[int, Tensor] = field(default_factory=dict)
    num_sent: int = 0
    num_received: int = 0


class _Work(_WORK):
    """Work that is done when ``is_done``; then ``at_end`` runs once."""

    def __init__(
        self, is_done: Callable[[], bool], what: Callable[[], str], at_end: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._is_done, self._what, self._at_end = is_done, what, at_end

    def wait(self, *_: object) -> bool:
        current_rank().wait(self._is_done, self._what)
        if self._at_end is not None:
            at_end, self._at_end = self._at_end, None
            at_end()
        return True

    def is_completed(self) -> bool:
        if not self._is_done():
            return False
        return self.wait()

    def is_success(self) -> bool:
        return self._is_done()

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class _Options:
    """Where torch writes what it knows of a group."""

    global_ranks_in_group: Sequence[int] = ()
    group_name = ""


class EmulatedGroup(_GROUP):
    """A process group of ranks of one process, in place of one of gloo: its results and its order of additions.

    Its methods are named as torch calls them, in any supported version.
    """

    meetings: Meetings

    def __init__(self, store: object, rank: int, size: int, timeout: object = None) -> None:  # noqa: ARG002
        super().__init__(rank, size)
        self.options = _Options()
        self._own_rank, self._own_size = rank, size
        self._number = 0

    # --- what torch asks ---

    def size(self) -> int:
        return self._own_size

    def rank(self) -> int:
        return self._own_rank

    def getBackendName(self) -> str:  # noqa: N802
        return "gloo"

    def _set_sequence_number_for_group(self) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self.options.group_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ranks})"

    @property
    def _ranks(self) -> list[int]:
        return list(self.options.global_ranks_in_group) or list(range(self._own_size))

    # --- collectives ---

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self.allreduce_coalesced(tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        name, combine = _operation(options)
        detail = f"all-reduce ({name}) of {_sizes(tensors)}"

        def reduce(brought: list[list[Tensor]]) -> None:
            result = ring([_flat(each) for each in brought], combine)
            for each in brought:
                _fill(each, result)

        return self._meet(detail, tensors, reduce)

    def reduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        name, combine = _operation(options)
        root = options.rootRank

        def reduce(brought: list[list[Tensor]]) -> None:
            _fill(brought[root], ring([_flat(each) for each in brought], combine, to_one=True))

        return self._meet(f"reduce ({name}) of {_sizes(tensors)} to rank {self._ranks[root]}", tensors, reduce)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        root = options.rootRank

        def copy(brought: list[list[Tensor]]) -> None:
            for each in brought:
                for out, source in zip(each, brought[root], strict=True):
                    if out is not source:
                        out.copy_(source)

        return self._meet(f"broadcast of {_sizes(tensors)} from rank {self._ranks[root]}", tensors, copy)

    def allgather(self, outs: list[list[Tensor]], parts: list[Tensor], options: object = None) -> dist.Work:
        del options

        def copy(brought: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for outs_of_one, _ in brought:
                for number, row in enumerate(outs_of_one):
                    for out, (_, parts_of_one) in zip(row, brought, strict=True):
                        out.copy_(parts_of_one[number])

        return self._meet(f"all-gather of {_sizes(parts)}", (outs, parts), copy)

    def allgather_into_tensor_coalesced(
        self, outs: list[Tensor], parts: list[Tensor], options: object = None
    ) -> dist.Work:
        del options

        def copy(brought: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            parts_of_all = [[part.clone() for part in parts_of_one] for _, parts_of_one in brought]
            for outs_of_one, _ in brought:
                for number, out in enumerate(outs_of_one):
                    out.view(-1).copy_(torch.cat([parts_of_one[number].reshape(-1) for parts_of_one in parts_of_all]))

        return self._meet(f"all-gather of {_sizes(parts)}", (outs, parts), copy)

    def _allgather_base(self, out: Tensor, part: Tensor, options: object = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([out], [part], options)

    def gather(self, outs: list[list[Tensor]], parts: list[Tensor], options: Any) -> dist.Work:
        root = options.rootRank

        def copy(brought: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for out, (_, (part,)) in zip(brought[root][0][0], brought, strict=True):
                out.copy_(part)

        return self._meet(f"gather of {_sizes(parts)} to rank {self._ranks[root]}", (outs, parts), copy)

    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], options: Any) -> dist.Work:
        root = options.rootRank

        def copy(brought: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            for ((out,), _), part in zip(brought, brought[root][1][0], strict=True):
                out.copy_(part)

        return self._meet(f"scatter of {_sizes(outs)} from rank {self._ranks[root]}", (outs, parts), copy)

    def reduce_scatter_tensor_coalesced(self, outs: list[Tensor], parts: list[Tensor], options: Any) -> dist.Work:
        name, combine = _operation(options)

        def reduce(brought: list[tuple[list[Tensor], list[Tensor]]]) -> None:  # gloo's own is an all-reduce, too
            for number in range(len(outs)):
                result = ring([parts_of_one[number].reshape(-1) for _, parts_of_one in brought], combine)
                for (outs_of_one, _), own in zip(brought, result.chunk(self._own_size), strict=True):
                    outs_of_one[number].view(-1).copy_(own)

        return self._meet(f"reduce-scatter ({name}) of {_sizes(parts)}", (outs, parts), reduce)

    def _reduce_scatter_base(self, out: Tensor, parts: Tensor, options: Any) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([out], [parts], options)

    def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], options: Any) -> dist.Work:
        name, combine = _operation(options)

        def reduce(brought: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:  # gloo: an all-reduce of each part
            for rank, (outs_of_one, _) in enumerate(brought):
                values = [_flat([parts_of_one[0][rank]]) for _, parts_of_one in brought]
                _fill(outs_of_one, ring(values, combine))

        return self._meet(f"reduce-scatter ({name}) of lists of {_sizes(parts[0])}", (outs, parts), reduce)

    def alltoall_base(
        self, out: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], options: object = None
    ) -> dist.Work:
        del options
        rows = [list(received) or [len(out) // self._own_size] * self._own_size]
        rows += [list(sent) or [len(parts) // self._own_size] * self._own_size]

        def copy(brought: list[tuple[Tensor, list[Tensor], list[int]]]) -> None:
            sent_by_all = [[part.clone() for part in parts_of_one] for _, parts_of_one, _ in brought]
            for rank, (out_of_one, _, expected) in enumerate(brought):
                pieces = [parts_of_one[rank] for parts_of_one in sent_by_all]
                if [len(piece) for piece in pieces] != expected:
                    raise RuntimeError(
                        f"expected an all-to-all in which ranks {self._ranks} send what is received, got "
                        f"{[len(piece) for piece in pieces]} rows for rank {self._ranks[rank]}, which wants {expected}"
                    )
                out_of_one.copy_(torch.cat(pieces))

        return self._meet("all-to-all", (out, list(parts.split(rows[1])), rows[0]), copy)

    def alltoall(self, outs: list[Tensor], parts: list[Tensor], options: object = None) -> dist.Work:
        del options

        def copy(brought: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for rank, (outs_of_one, _) in enumerate(brought):
                for out, (_, parts_of_one) in zip(outs_of_one, brought, strict=True):
                    out.copy_(parts_of_one[rank])

        return self._meet("all-to-all of lists", (outs, parts), copy)

    def barrier(self, opts: object = None) -> dist.Work:
        del opts
        return self._meet("barrier", None, lambda _: None)

    # --- messages ---

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        channel = self._channel(self._own_rank, to, tag)
        channel.messages[channel.num_sent] = (
            tensors[0].detach().clone()
        )  # gloo's own may end before it is received, too
        channel.num_sent += 1
        return _Work(lambda: True, str)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        channel = self._channel(source, self._own_rank, tag)
        number, channel.num_received = channel.num_received, channel.num_received + 1
        what = f"a message of {_sizes(tensors)} from rank {self._ranks[source]}, number {number + 1}"

        def take() -> None:
            message = channel.messages.pop(number)
            if (message.numel(), message.dtype) != (tensors[0].numel(), tensors[0].dtype):
                raise RuntimeError(f"expected {what}, got one of {_sizes([message])}")
            tensors[0].copy_(message.view(tensors[0].shape))

        return _Work(lambda: number in channel.messages, lambda: what, take)

    def _channel(self, source: int, to: int, tag: int) -> _Channel:
        return self.meetings.channels.setdefault((self._key, source, to, tag), _Channel())

    # --- meeting ---

    @property
    def _key(self) -> object:
        return self.group_name, tuple(self._ranks)

    def _meet(self, kind: str, brought: Any, carry_out: Callable[[list[Any]], None]) -> dist.Work:
        """Bring something to the next collective; the last rank carries it out, given what all of them brought."""
        number, self._number = self._number, self._number + 1
        key = self._key, number
        meeting = self.meetings.meetings.setdefault(key, _Meeting(kind, self._own_rank))
        if meeting.kind != kind:
            first, here = self._ranks[meeting.first], self._ranks[self._own_rank]
            raise RuntimeError(
                f"expected one collective number {number + 1} of all ranks {self._ranks}, got two: rank {first} calls "
                f"{meeting.kind}, rank {here} calls {kind}; let all ranks of a group make the same calls in one order"
            )
        meeting.brought[self._own_rank] = brought
        if len(meeting.brought) == self._own_size:
            del self.meetings.meetings[key]
            with torch.no_grad():
                carry_out([meeting.brought[rank] for rank in range(self._own_size)])
            meeting.is_done = True

        def what() -> str:
            missing = [self._ranks[rank] for rank in range(self._own_size) if rank not in meeting.brought]
            return f"{kind}, number {number + 1} of ranks {self._ranks}, without ranks {missing}"

        return _Work(lambda: meeting.is_done, what)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _operation(options: Any) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the name of a reduction and how it combines two tensors."""
    operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
    name = str(getattr(operation, "op", operation)).rpartition(".")[2]
    if name not in _COMBINE:
        raise ValueError(f"expected a reduction that gloo has, one of {', '.join(_COMBINE)}, got {name}")
    return name, _COMBINE[name]


def _sizes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
