"""Facts that must be equal on all ranks, compared before anything depends on them.

A fact is a name, a value and a fix: the learning rate, the shape of an input, the state of the generator.

    every rank    facts --> one number d, made of all of them
    all ranks     maximum of (d, -d)            equal if and only if max(d) == -max(-d): 16 bytes per rank
    otherwise     all-gather of the facts       the same error on every rank: names, values, ranks and the fix

The maximum makes it cheap: code that reduces a maximum anyway adds the pair to it (`pair_of`, `is_equal`). Where
nothing is reduced, `check_facts` reduces the pair in the first call and then in every N-th (`Turns`, `check_ranks`).
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._checked import Size, checked
from ._containers import leaves
from ._layout.agreement import gather_texts
from ._random.philox import state as philox_state
from ._random.state import PHILOX, current
from ._torch.debugging import without_modes
from ._torch.waits import waits_over

__all__ = [
    "Fact",
    "Turns",
    "check_facts",
    "check_ranks",
    "checksum",
    "generator_fact",
    "input_facts",
    "is_equal",
    "module_facts",
    "pair_of",
    "raise_difference",
]

_EVERY = [100]
_SAME_INPUTS = "give all ranks of these axes the same inputs: the same rows, in the same order"
_SAME_MODULE = "build the same module on all ranks of these axes"
_SAME_SEED = "call torch.manual_seed with one seed on all ranks; for what must differ by rank, use a torch.Generator"


@checked
def check_ranks(*, every: Size = 100) -> None:
    """Set how often the ranks compare what must be equal on all of them. All ranks call it alike.

    They compare at construction, in the first call, and in every ``every``-th call after that: hyperparameters, norms
    of clipping, rows per rank, inputs that ranks share, and the state of the random generator where random numbers are
    drawn. A difference is a ``ValueError`` on every rank; it names values and ranks. What can be added to a collective
    that runs anyway is compared in every step.

    Args:
        every: Number of calls from one comparison to the next; 0 switches the comparisons off, except those of plans
            and shapes, without which collectives would not fit together.

    Raises:
        TypeError: If ``every`` is no integer.
        ValueError: If it is negative.

    Example:
        >>> check_ranks(every=10)
        >>> check_ranks(every=100)  # the default
    """
    _EVERY[0] = every


class Turns:
    """Counts calls: the first, and every N-th after it, is one in which to compare."""

    def __init__(self) -> None:
        self._num_calls = 0

    def is_due(self) -> bool:
        """Count a call; return whether to compare in it."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return self.is_on and number % _EVERY[0] == 0

    @property
    def is_on(self) -> bool:
        """Whether anything is compared at all."""
        return _EVERY[0] > 0


@dataclass(frozen=True)
class Fact:
    """Something that must be equal on all ranks.

    Attributes:
        name: What it is, the subject of the error.
        value: Its value on this rank, in words.
        fix: What to do if ranks differ.
    """

    name: str
    value: str
    fix: str


def pair_of(facts: Iterable[Fact], *, bits: int = 63) -> tuple[int, int]:
    """Return (d, -d) for a number ``d`` of ``bits - 1`` bits that stands for the names and values."""
    text = "\n".join(f"{fact.name}: {fact.value}" for fact in facts).encode()
    number = zlib.crc32(text) | zlib.adler32(text) << 32
    number = (number ^ number >> 30) & ((1 << (bits - 1)) - 1)
    return number, -number


def is_equal(maxima: Sequence[int]) -> bool:
    """Return whether the pairs, of which these are the maxima, were equal on all ranks."""
    return maxima[0] == -maxima[1]


def check_facts(
    facts: Iterable[Fact],
    over: dist.ProcessGroup | DeviceMesh,
    *,
    maxima: Callable[[tuple[int, int]], Sequence[int]] | None = None,
) -> None:
    """Compare facts over the ranks of a process group or mesh. All of them must call this; the host waits.

    Logs and reports of communication do not list it: they are about the program.

    Args:
        facts: What must be equal; the number of facts may differ, which is a difference, too.
        over: The ranks. A group of the backend "fake" carries no data: its ranks count as equal.
        maxima: Returns the maxima of two integers over these ranks; by default an all-reduce for each axis.

    Raises:
        ValueError: On every rank, if a fact differs.

    Example:
        >>> check_facts([Fact("lr", "0.1", "pass the same lr on all ranks")], mesh)               # doctest: +SKIP
        ValueError: lr must be equal on all ranks: expected 0.1 as on ranks 0, 1, 2, got 0.2 on rank 3; pass the same lr
        on all ranks
    """
    facts = list(facts)
    pair = pair_of(facts)
    with without_modes():
        is_same = is_equal(_maxima(pair, over) if maxima is None else maxima(pair))
    if not is_same:
        raise_difference(facts, over)


def _maxima(pair: tuple[int, int], over: dist.ProcessGroup | DeviceMesh) -> Sequence[int]:
    device = over.device_type if isinstance(over, DeviceMesh) else "cpu"
    numbers = torch.tensor(pair, dtype=torch.int64, device=device)
    for waits in waits_over(over):
        waits.run("comparison of ranks", dist.all_reduce, numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def raise_difference(facts: Iterable[Fact], over: dist.ProcessGroup | DeviceMesh) -> None:
    """Gather the facts of all ranks and raise; every rank calls it.

    Raises:
        ValueError: The same on every rank: the first fact that differs, the names of the others.
    """
    texts = gather_texts(json.dumps([(fact.name, fact.value, fact.fix) for fact in facts]), over)
    raise ValueError(_difference({rank: json.loads(text) for rank, text in texts.items()}))


def _difference(every: Mapping[int, Sequence[tuple[str, str, str]]]) -> str:
    fixes = {name: fix for facts in every.values() for name, _, fix in facts}
    values = {rank: {name: value for name, value, _ in facts} for rank, facts in every.items()}
    found = []
    for name in fixes:
        of_ranks = {rank: known.get(name, "nothing") for rank, known in values.items()}
        usual = Counter(of_ranks.values()).most_common(1)[0][0]  # on a tie, the first one
        others = [value for value in dict.fromkeys(of_ranks.values()) if value != usual]
        if others:
            got = ", ".join(f"{other} on {_ranks(of_ranks, other)}" for other in others)
            found.append((name, f"expected {usual} as on {_ranks(of_ranks, usual)}, got {got}"))
    if not found:
        return "ranks compare the same facts in another order or number; run the same program on all ranks"
    (name, text), *more = found
    also = f" (also different: {', '.join(other for other, _ in more[:8])})" if more else ""
    return f"{name} must be equal on all ranks: {text}{also}; {fixes[name]}"


def _ranks(of_ranks: Mapping[int, str], value: str) -> str:
    ranks = [rank for rank, other in of_ranks.items() if other == value]
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


# ------------------------------------------------------------------------------------------------- what is compared


def generator_fact(device_type: str = "cpu") -> Fact:
    """Return the state of torch's default generators, of the CPU and of a kind of device, as a fact.

    Batch windows are no part of it. It takes a few microseconds.
    """
    state = torch.get_rng_state()
    if current() == PHILOX:
        position = philox_state.read(state)
        value = f"seed {position.seed}, draw {position.counter}"
    else:
        value = f"seed {torch.initial_seed()}, state {_crc(state):08x}"
        if device_type != "cpu":
            device = torch.get_device_module(device_type)
            if not getattr(device, "is_current_stream_capturing", bool)():  # it cannot be read during capture
                value += f", {device_type} {_crc(device.get_rng_state()):08x}"
    return Fact("the state of the random generator", value, _SAME_SEED)


def _crc(state: Tensor) -> int:
    return zlib.crc32(ctypes.string_at(state.data_ptr(), state.nbytes))  # `numpy` refuses in transforms of torch.func


def input_facts(args: Sequence[Any], kwargs: Mapping[str, Any], *, checksums: bool) -> list[Fact]:
    """Return what must be equal of the inputs of a module on ranks that share them.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        checksums: Whether to read the values of plain tensors. Of DTensors, whose values are distributed, only the
            global shape, the dtype and the placements count.
    """
    facts, plain = [], []
    for key, value in [*enumerate(args), *sorted(kwargs.items())]:
        for number, leaf in enumerate(leaves(value)):
            name = f"input {key!r}" + (f", item {number}," if leaf is not value else "")
            facts.append(Fact(name, _describe(leaf), _SAME_INPUTS))
            if type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta:
                plain.append((name, leaf))
    if checksums and plain:
        sums = torch.stack([checksum(leaf).to(plain[0][1].device) for _, leaf in plain]).tolist()
        for (name, _), number in zip(plain, sums, strict=True):
            facts.append(Fact(f"the values of {name}", f"values with checksum {number & 2**64 - 1:016x}", _SAME_INPUTS))
    return facts


def module_facts(module: nn.Module) -> list[Fact]:
    """Return what must be equal of the parameters and buffers of a module on ranks that build the same one.

    Their values do not count: what distributes them takes those of one rank.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [Fact(name, f"{_describe(t)}, requires_grad={t.requires_grad}", _SAME_MODULE) for name, t in tensors]


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        placements = f" placed {tuple(leaf.placements)}" if isinstance(leaf, DTensor) else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}{placements}"
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | torch.dtype):
        return repr(leaf)
    return type(leaf).__name__


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of a tensor's bits, in which rows and columns have weights: a 0-dim int64 tensor on its device.

    Two tensors that differ in one element, or in the order of their rows, have different sums. It reads the tensor
    twice and takes no memory of its size.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = tensor.resolve_neg().contiguous().view(_BITS[tensor.element_size()])
    rows = bits.reshape(bits.shape[0], -1) if bits.ndim else bits.reshape(1, 1)
    along, across = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    return (along * _weights(along)).sum() + (across * _weights(across)).sum() * 31


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _weights(like: Tensor) -> Tensor:
    """Return different odd numbers, which wrap around."""
    return torch.arange(1, len(like) + 1, device=like.device) * 0x5851F42D4C957F2E + 0x14057B7EF767814F
