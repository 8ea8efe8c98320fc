"""Choose samples of torch's operator database: few per operator, as different from each other as can be.

torch's samples have sizes such as 5 and 3, which four ranks divide unevenly or into empty shards; a second set is
generated with sizes 8 and 12, which they divide evenly. A sample is described by features (number of dims of each
tensor, arguments and their values, dtype, an empty dim); the next one is always that with the most new features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from _torch import database, sizes, tree_flatten, tree_unflatten

__all__ = ["Sample", "choose", "find_operators"]

MAX_SAMPLES, MAX_NUMEL, MAX_TENSORS = 400, 20_000, 16
EVEN = (8, 12)
FLOATS = (torch.float64, torch.float32, torch.complex128)
INTEGERS = (torch.int64, torch.bool)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of an operator, flattened.

    Attributes:
        leaves: All leaves of ``(args, kwargs)``; tensors are plain, detached copies.
        structure: The tree structure of the arguments, to unflatten the leaves.
        tensors: Positions of the tensors among the leaves.
        requires_grad: For each tensor.
        finish: Makes a result unique (signs of eigenvectors).
    """

    leaves: tuple
    structure: object
    tensors: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    finish: Callable[[object], object]

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[tuple, dict]:
        """Return ``(args, kwargs)`` with ``tensors`` in place of the sample's own."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.structure)

    def whole(self) -> list[torch.Tensor]:
        """Return the sample's own tensors."""
        return [self.leaves[position] for position in self.tensors]

    def describe(self) -> str:
        """Return the arguments in short."""
        args, kwargs = tree_unflatten([_Text(_shown(leaf)) for leaf in self.leaves], self.structure)
        return ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


def _shown(leaf: object) -> str:
    is_tensor = isinstance(leaf, torch.Tensor)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if is_tensor else str(leaf)


def find_operators(pattern) -> list:
    """Return the database's operators whose full name matches a compiled regular expression."""
    return [op for op in database() if pattern.search(op.full_name)]


def choose(op, limit: int) -> tuple[dict[str, Sample], str]:
    """Return samples of ``op`` by label, or none and the reason.

    At most ``limit`` are labelled by a number; a sample keeps its number when the limit changes. ``scalar`` has a first
    tensor without dims, ``empty`` one without elements, ``integer`` integers or booleans in place of floats. A sample
    may have two labels.
    """
    supported = op.supported_dtypes("cpu")
    main = next((dtype for dtype in (*FLOATS, *INTEGERS) if dtype in supported), None)
    if main is None:
        return {}, "no dtype on CPU"
    reasons: list[str] = []
    pool = [sample for even in (False, True) for sample in _generate(op, main, even, reasons)]
    chosen = {str(number): sample for number, sample in enumerate(_diverse(pool, limit))}
    for label, test in (("scalar", lambda t: t.ndim == 0), ("empty", lambda t: t.numel() == 0)):
        chosen |= dict([(label, sample) for sample in pool if test(sample.whole()[0])][:1])
    second = next((dtype for dtype in INTEGERS if dtype in supported and dtype is not main), None)
    if second is not None and chosen:
        chosen |= dict(zip(["integer"], _diverse(list(_generate(op, second, False, reasons)), 1), strict=False))
    return chosen, "" if chosen else (reasons[0] if reasons else "no samples")


def _generate(op, dtype: torch.dtype, even: bool, reasons: list[str]) -> Iterator[Sample]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            with sizes(*EVEN) if even else contextlib.nullcontext():
                made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), MAX_SAMPLES))
        except Exception as error:
            reasons.append(f"no samples: {type(error).__name__}: {str(error)[:80]}")
            return
        for sample in made:
            leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            if reason := _unfit([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
                reasons.append(reason)
                continue
            finish = sample.output_process_fn_grad or (lambda result: result)
            yield _freeze(leaves, structure, finish)


def _unfit(tensors: list[torch.Tensor]) -> str:
    if not tensors:
        return "no tensor among the arguments"
    if any(t.layout is not torch.strided or t.is_quantized or t.is_nested for t in tensors):
        return "sparse, quantised or nested tensors"
    if len(tensors) > MAX_TENSORS or max(t.numel() for t in tensors) > MAX_NUMEL:
        return "large samples"
    return ""


def _freeze(leaves: list, structure: object, finish) -> Sample:
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    grads = tuple(leaves[i].requires_grad for i in positions)
    return Sample(tuple(map(_rounded, leaves)), structure, positions, grads, finish)


def _rounded(leaf: object) -> object:
    """Copy a tensor, and leave 24 bits of a double, so that partial tensors sum to it exactly."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch.no_grad():
        copy = leaf.detach().clone().resolve_conj().resolve_neg()
        return copy.float().double() if copy.dtype == torch.float64 else copy


def _features(sample: Sample) -> set[str]:
    features = {f"sizes {max((max(t.shape, default=0) % 4 == 0) for t in sample.whole())}"}
    args, kwargs = tree_unflatten([_kind(leaf) for leaf in sample.leaves], sample.structure)
    features |= {f"{i}:{arg}" for i, arg in enumerate(args)} | {f"{key}={value}" for key, value in kwargs.items()}
    features |= {f"{i}:{type(arg)}" for i, arg in enumerate(args)} | {f"{key}" for key in kwargs}
    return features


def _kind(leaf: object) -> str:
    return f"tensor {leaf.ndim}" if isinstance(leaf, torch.Tensor) else repr(leaf)[:30]


def _diverse(pool: list[Sample], limit: int) -> list[Sample]:
    """Return the samples that together have the most features; the first one has dims to shard."""

    def shardable(sample: Sample) -> int:
        whole = sample.whole()
        return min(t.numel() > 0 for t in whole) * (1 + (2 <= max(t.ndim for t in whole) <= 4))

    chosen, seen = [], set()
    rest = [(sample, _features(sample), shardable(sample)) for sample in pool]
    while rest and len(chosen) < limit:
        index = max(
            range(len(rest)),
            key=lambda i: (rest[i][2] if len(chosen) < 2 else rest[i][2] > 0, len(rest[i][1] - seen), -i),
        )
        sample, features, _ = rest.pop(index)
        if chosen and not features - seen:
            break
        seen |= features
        chosen.append(sample)
    return chosen
