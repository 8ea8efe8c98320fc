"""Choose placements of an operator's tensors: a few combinations in which every pair of placements occurs.

A placement is written as text: ``R``, ``S0``, ``P`` for partial sums, ``A``, ``X`` and ``N`` for partial means, maxima
and minima; on a mesh with two axes ``S0R``. Everything here is pure.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

__all__ = ["LETTER", "REDUCE_OPS", "alike", "combinations", "options", "parse"]

REDUCE_OPS = {"P": "sum", "A": "avg", "X": "max", "N": "min"}
LETTER = re.compile(r"([RPSAXN])(\d*)")


def options(tensor: torch.Tensor, num_axes: int) -> list[str]:
    """Return the texts of all placements of ``tensor``: replicated, sharded in each dim, partial if it is a float."""
    single = ["R", *(f"S{dim}" for dim in range(tensor.ndim))]
    if tensor.is_floating_point() or tensor.is_complex():
        single.append("P")
    return ["".join(pair) for pair in itertools.product(single, repeat=num_axes)]


def parse(text: str) -> tuple[Placement, ...]:
    """Return the placements of a text such as ``S0R``."""
    made = {"R": lambda _: Replicate(), "S": lambda dim: Shard(int(dim))}
    made |= {letter: lambda _, op=op: Partial(op) for letter, op in REDUCE_OPS.items()}
    return tuple(made[letter](dim) for letter, dim in LETTER.findall(text))


def combinations(choices: Sequence[Sequence[str]], *, cap: int, seed: str) -> list[tuple[str, ...]]:
    """Return combinations of one choice per tensor: all of them, or ``cap`` combinations that cover the most pairs.

    The result is the same on every rank and in every run. Only the first combination may be fully replicated.
    """
    if math.prod(map(len, choices)) <= cap:
        return list(itertools.product(*choices))
    generator = random.Random(seed)
    chosen = dict.fromkeys([tuple(options[0] for options in choices)])
    chosen.update(dict.fromkeys(_aligned(choices)))
    open_pairs = {pair for row in itertools.islice(_rows(choices, generator), 4000) for pair in _pairs(row)}
    for row in list(chosen)[:cap]:
        open_pairs -= _pairs(row)
    while len(chosen) < cap:
        candidates = [tuple(generator.choice(options) for options in choices) for _ in range(24)]
        best = max(candidates, key=lambda row: (len(_pairs(row) & open_pairs), row not in chosen))
        chosen[best] = None
        open_pairs -= _pairs(best)
        if not open_pairs and len(chosen) >= cap // 2:
            break
    return list(chosen)[:cap]


def _aligned(choices: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return combinations that programs use: all tensors alike, and one tensor distributed."""
    single = [
        tuple(option if i == j else other[0] for j, other in enumerate(choices))
        for i, options in enumerate(choices[:3])
        for option in options
    ]
    return alike(choices) + single


def alike(choices: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return one combination for each placement: all tensors that can have it."""
    every = dict.fromkeys(option for options in choices for option in options)
    return [tuple(option if option in options else options[0] for options in choices) for option in every]


def _rows(choices: Sequence[Sequence[str]], generator: random.Random):
    while True:
        yield tuple(generator.choice(options) for options in choices)


def _pairs(row: tuple[str, ...]) -> set:
    if len(row) == 1:
        return {row}
    return {(i, row[i], j, row[j]) for i in range(len(row)) for j in range(i)}
