"""Test draws: compare the replay with the native operator on this device, at first use.

The map of random words follows from the source of the kernels; a release or a device may differ. Before an operator is
first replayed for a dtype, a few megabytes are drawn twice, natively and by replay, at sizes where the map could break:
just above one element per thread, one round, two rounds. Before the first draw of a tensor that stock splits (2 GiB),
one such tensor is drawn, too. The result holds for the process. If the draws differ, full tensors are drawn and cut,
which is right everywhere and costs memory, with one warning. If memory does not suffice for the test, the full tensor
is drawn this time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .backend import Backend, PhiloxGenerator
from .geometry import WIDE, dropout_rounds, nullary_rounds, split_tree, trial_args, vector_size
from .replay import Fill, bernoulli_part, dropout_part, fill_part

__all__ = ["bernoulli_is_exact", "distrust", "dropout_is_logical", "dropout_vector", "fill_is_exact", "forget"]

logger = logging.getLogger("vescale.dtensor")

TRIAL_P = 0.5
NUM_TRIAL_PROBABILITIES = 300_003


class _Results:
    """The results of the test draws, and the warnings given."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.decisions: dict[tuple, object] = {}
        self.warned: set[tuple] = set()


# Process-wide: they describe the devices and the release of torch, and a test draw takes memory and time.
_results = _Results()


def forget() -> None:
    """Drop all results, so that the test draws are repeated."""
    with _results.lock:
        _results.decisions.clear()
        _results.warned.clear()


def distrust(backend: Backend, device: torch.device, op: object, key: tuple, reason: str) -> None:
    """Record that an operator is not replayed any more, and warn once."""
    with _results.lock:
        _results.decisions[(device, op, *key)] = None
        if (device, op) in _results.warned:
            return
        _results.warned.add((device, op))
    message = (
        f"{op} on {backend.name(device)} with torch {torch.__version__} does not draw as expected ({reason}). "
        "Its results stay those of one device, but every rank draws the full tensor and keeps its shard, which takes "
        "more memory and time."
    )
    logger.warning(message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _decide(backend: Backend, device: torch.device, op: object, key: tuple, ask: Callable[[], object]) -> object:
    """Return the cached result of a test draw, where None means "not exact". Running out of memory is not cached."""
    with _results.lock:
        if (device, op, *key) in _results.decisions:
            return _results.decisions[(device, op, *key)]
        try:
            answer, reason = ask(), "a test draw differs"
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            answer, reason = None, f"{type(error).__name__}: {error}"
        if answer is None:
            distrust(backend, device, op, key, reason)
        else:
            _results.decisions[(device, op, *key)] = answer
        return answer


# ------------------------------------------------------------------------------------------------- fills


def fill_is_exact(backend: Backend, fill: Fill, numel: int, device: torch.device, generator: PhiloxGenerator) -> bool:
    """Return whether a fill of ``numel`` elements can be replayed. The generator's offset is left as it was."""
    trial = replace(fill, args=trial_args(fill.op, fill.dtype, wide=fill.values == WIDE), kwargs={})
    grid = backend.grid(device)
    window, key = nullary_rounds(fill.values, grid).window, (fill.dtype, fill.values)
    sizes = (window // fill.values + 3, window + 5, 2 * window + 7)

    def ask() -> bool | None:
        return all(_fill_matches(backend, trial, size, _thirds(size), device, generator) for size in sizes) or None

    def ask_split() -> bool | None:
        size = grid.index_limit // fill.dtype.itemsize + 5  # the least that is split, and then some
        parts = [(0, 3), (size // 2 - 3, size // 2 + 3), (size - 3, size)]
        return _fill_matches(backend, trial, size, parts, device, generator) or None

    is_split = len(split_tree(numel, fill.dtype.itemsize, grid.index_limit)) > 1
    exact = _decide(backend, device, fill.op, key, ask)
    return bool(exact and (not is_split or _decide(backend, device, fill.op, (*key, "split"), ask_split)))


def _fill_matches(
    backend: Backend,
    fill: Fill,
    numel: int,
    parts: Iterable[tuple[int, int]],
    device: torch.device,
    generator: PhiloxGenerator,
) -> bool:
    """Compare flat ranges of a fill of ``numel`` elements with their replay."""
    before = generator.get_offset()
    try:
        whole = torch.empty(numel, dtype=fill.dtype, device=device)
        backend.fill(fill.op, whole, fill.args, fill.kwargs, generator)
        after = generator.get_offset()
        for start, stop in parts:
            part = torch.empty(stop - start, dtype=fill.dtype, device=device)
            generator.set_offset(before)
            view = (((start,), (stop - start,)), part)
            fill_part(backend, fill, [view], shape=(numel,), device=device, generator=generator)
            if generator.get_offset() != after or not torch.equal(part, whole[start:stop]):
                return False
        return True
    finally:
        generator.set_offset(before)


def _thirds(numel: int) -> Iterator[tuple[int, int]]:
    cuts = (0, numel // 3, 2 * numel // 3 + 1, numel)
    yield from itertools.pairwise(cuts)


# ------------------------------------------------------------------------------------------------- dropout


def dropout_vector(
    backend: Backend, op: object, divisor: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int] | None:
    """Return how ``native_dropout`` reads a dense tensor, ``(vector, widest)``, or None: it cannot be replayed.

    Releases differ in the widest read of 16-bit dtypes, so that is found out, too. All sizes with the same power of two
    as a divisor (16 or less) are read alike.
    """
    widths = dict.fromkeys((min(16 // dtype.itemsize, 8), 4, 8, 2))

    def ask() -> tuple[int, int] | None:
        for widest in widths:
            vector = vector_size(divisor, dtype.itemsize, 0, widest)
            window = dropout_rounds(vector, backend.grid(device)).window
            sizes = [-(-size // 32) * 32 + divisor for size in (window // 4, window, 2 * window)]
            if all(_dropout_matches(backend, size, dtype, device, vector, widest) for size in sizes):
                return vector, widest
        return None

    return _decide(backend, device, op, (dtype, divisor), ask)


def dropout_is_logical(backend: Backend, op: object, dtype: torch.dtype, device: torch.device, widest: int) -> bool:
    """Return whether elements that are read one by one are numbered in logical order for any strides."""
    numel = 3 * (dropout_rounds(1, backend.grid(device)).window // 2 + 1)

    def ask() -> bool | None:
        columns = torch.ones(numel // 3 | 1, 3, dtype=dtype, device=device).t()
        gaps = torch.ones(3, numel // 3 + 2, dtype=dtype, device=device)[:, :-1]
        return all(_logical_matches(backend, each, widest) for each in (columns, gaps)) or None

    return bool(_decide(backend, device, op, (dtype, "logical"), ask))


def _logical_matches(backend: Backend, whole: Tensor, widest: int) -> bool:
    generator = backend.generator(whole.device, None)
    before = generator.get_offset()
    try:
        drawn = backend.dropout(whole, TRIAL_P)
        generator.set_offset(before)
        expected = _dropout_of(backend, whole.reshape(-1), 0, whole.numel(), 1, widest)
        return all(torch.equal(one.reshape(-1), other) for one, other in zip(drawn, expected, strict=True))
    finally:
        generator.set_offset(before)


def _dropout_matches(
    backend: Backend, numel: int, dtype: torch.dtype, device: torch.device, vector: int, widest: int
) -> bool:
    generator = backend.generator(device, None)
    before = generator.get_offset()
    try:
        whole = torch.ones(numel, dtype=dtype, device=device)
        out, mask = backend.dropout(whole, TRIAL_P)
        after = generator.get_offset()
        for start, stop in _thirds(numel):
            generator.set_offset(before)
            part = _dropout_of(backend, whole[start:stop].clone(), start, numel, vector, widest)
            if generator.get_offset() != after:
                return False
            if not (torch.equal(part[0], out[start:stop]) and torch.equal(part[1], mask[start:stop])):
                return False
        return True
    finally:
        generator.set_offset(before)


def _dropout_of(
    backend: Backend, part: Tensor, start: int, numel: int, vector: int, widest: int
) -> tuple[Tensor, Tensor]:
    out, mask = torch.empty_like(part), torch.empty_like(part, dtype=torch.bool)
    view = (((start,), tuple(part.shape)), part, out, mask)
    dropout_part(backend, [view], shape=(numel,), device=part.device, p=TRIAL_P, vector=vector, widest=widest)
    return out, mask


# ------------------------------------------------------------------------------------------------- bernoulli


def bernoulli_is_exact(
    backend: Backend, op: object, dtype: torch.dtype, device: torch.device, generator: PhiloxGenerator
) -> bool:
    """Return whether ``bernoulli`` with probabilities can be computed. The generator's offset is left as it was."""

    def ask() -> bool | None:
        before, numel = generator.get_offset(), NUM_TRIAL_PROBABILITIES
        try:
            p = torch.linspace(0, 1, numel, device=device)
            whole, part = (torch.empty(numel, dtype=dtype, device=device) for _ in range(2))
            backend.bernoulli(whole, p, generator)
            after = generator.get_offset()
            generator.set_offset(before)
            bernoulli_part([(((0,), (numel,)), p, part)], shape=(numel,), generator=generator)
            return (generator.get_offset() == after and torch.equal(part, whole)) or None
        finally:
            generator.set_offset(before)

    return bool(_decide(backend, device, op, (dtype,), ask))
