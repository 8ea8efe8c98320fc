"""Make larger samples from small ones: dims of equal size grow together, and values are shuffled.

Many of torch's samples have two rows and three columns, too few to show the usual errors on four ranks. A factor of 4
gives dims that four ranks divide evenly; a factor of 5 gives dims that leave the last rank fewer rows. Values come from
the sample, so that they stay in the operator's domain. They are shuffled, so that no two shards are equal. Indices are
random. A run on one device decides whether the operator accepts the larger sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator

import torch
from samples import MAX_NUMEL, Sample

__all__ = ["FACTORS", "enlarged", "is_small"]

FACTORS = (4, 5)  # in turn
#: Operators whose result depends on an order where indices repeat, or whose arguments fit each other exactly.
ORDERED = re.compile(r"scatter|index_(put|copy|reduce)|^put$|unpool|ormqr|householder|ldl|lu_|geqrf|segment_reduce")


def is_small(name: str, samples: list[Sample]) -> bool:
    """Return whether an operator's samples leave its first tensor without a dim that four ranks divide evenly."""
    firsts = [sample.whole()[0] for sample in samples]
    divided = any(size and size % 4 == 0 for tensor in firsts for size in tensor.shape)
    return not divided and any(max(tensor.shape, default=0) > 1 for tensor in firsts) and not ORDERED.search(name)


def enlarged(samples: list[Sample], runs: Callable[[Sample], bool]) -> dict[str, Sample]:
    """Return larger samples, labelled ``large0``, ``large1``: for each sample the first candidate that runs."""
    large = {}
    for number, sample in enumerate(samples):
        for candidate in _candidates(sample, FACTORS[number % len(FACTORS)]):
            if max(tensor.numel() for tensor in candidate.whole()) <= MAX_NUMEL and runs(candidate):
                large[f"large{number}"] = candidate
                break
    return large


def _candidates(sample: Sample, factor: int) -> Iterator[Sample]:
    """Yield all dims grown, then those of one size; numbers among the arguments that equal a size grow in turn."""
    distinct = sorted({size for tensor in sample.whole() for size in tensor.shape if size > 1}, reverse=True)
    for grown in [distinct, *([size] for size in distinct)] if len(distinct) > 1 else [distinct]:
        for numbers, fresh in itertools.product((False, True), (True, False)):
            if grown:
                yield _grow(sample, set(grown), factor, numbers=numbers, fresh=fresh)


def _grow(sample: Sample, sizes: set[int], factor: int, *, numbers: bool, fresh: bool) -> Sample:
    leaves, generator = list(sample.leaves), torch.Generator().manual_seed(3)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shape = [size * factor if size in sizes else size for size in leaf.shape]
            drawn = fresh and leaf.dtype == torch.int64 and leaf.numel() > 0 and leaf.min() >= 0
            leaves[i] = _drawn(leaf, shape, factor, generator) if drawn else _dealt(leaf, shape, generator)
        elif numbers and isinstance(leaf, torch.Size):
            leaves[i] = torch.Size(size * factor if size in sizes else size for size in leaf)
        elif numbers and type(leaf) is int and leaf in sizes:
            leaves[i] = leaf * factor
    return dataclasses.replace(sample, leaves=tuple(leaves))


def _drawn(tensor: torch.Tensor, shape: list[int], factor: int, generator: torch.Generator) -> torch.Tensor:
    """Return random indices, which may point to the added elements."""
    return torch.randint(0, factor * (int(tensor.max()) + 1), shape, generator=generator)


def _dealt(tensor: torch.Tensor, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of ``shape`` with the values of ``tensor``, each as often as the others, in random order."""
    if list(tensor.shape) == shape or not tensor.numel():
        return tensor
    numel = math.prod(shape)
    values = itertools.islice(itertools.cycle(range(tensor.numel())), numel)
    order = torch.tensor(list(values))[torch.randperm(numel, generator=generator)]
    dealt = tensor.reshape(-1)[order].view(shape)
    if dealt.is_floating_point() or dealt.is_complex():  # distinct values: no ties between equals
        noise = torch.randint(1, 64, shape, generator=generator).to(dealt.dtype) / 4096
        dealt = (dealt * (1 + noise)).float().double() if dealt.dtype == torch.float64 else dealt
    return dealt
