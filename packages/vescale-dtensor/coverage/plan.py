"""The ordered list of cases of each operator: made once, before the ranks are forked, and the same on all of them."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator

import _torch
import samples as sampling
import torch
from combos import alike, combinations, options
from enlarge import enlarged, is_small
from relations import related
from samples import Sample

__all__ = ["UNINITIALISED", "Case", "Plan", "given_out", "make_plan", "run_variant"]

#: Operators with undefined values: only shapes, dtypes and placements are compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
UNINITIALISED |= {"resize_as_"}

#: Operators for which torch does not write to an ``out`` of any tensor subclass (``TwoTensor`` as well).
IGNORE_OUT = {"linalg.matrix_rank"}

#: Number of samples that are enlarged.
NUM_LARGE = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of an operator.

    Attributes:
        sample: Label of the sample in the plan.
        variant: ``op``, ``inplace``, ``out``, or ``twice``: the result is used, and then read again.
        placements: One text per tensor, see :mod:`combos`.
        partial_grad: Replicated results get their gradient as partial sums.
    """

    sample: str
    variant: str
    placements: tuple[str, ...]
    partial_grad: bool = False

    @property
    def key(self) -> str:
        """The case in one word: what ``--case`` takes."""
        return f"{self.sample}:{self.variant}:{','.join(self.placements)}" + (":P" if self.partial_grad else "")

    @classmethod
    def parse(cls, key: str) -> Case:
        """Return the case of a key."""
        sample, variant, placements, *partial = key.split(":")
        return cls(sample, variant, tuple(placements.split(",")), bool(partial))

    @property
    def num_axes(self) -> int:
        """Number of mesh axes."""
        return sum(letter in "RSP" for letter in self.placements[0])

    @property
    def is_sharded(self) -> bool:
        """Whether a tensor is sharded."""
        return any("S" in text for text in self.placements)


@dataclasses.dataclass
class Plan:
    """An operator with its samples and cases, or the reason why it has none."""

    op: object
    samples: dict[str, Sample]
    cases: list[Case]
    skipped: str = ""

    @property
    def name(self) -> str:
        """The operator's name in the database, with its variant."""
        return self.op.full_name


def make_plan(op, *, limit: int, cap: int, only: Case | None = None, with_related: bool = False) -> Plan:
    """Choose samples that run on one device, and their placements.

    Args:
        op: An ``OpInfo``.
        limit: Number of samples, in addition to a few special ones.
        cap: Number of combinations of placements for each of the first two samples. The other samples, two mesh axes
            and variants get fewer.
        only: Plan this case only.
        with_related: Add what follows from a sample: dims from the end, other data, results that are used twice.
    """
    chosen, reason = sampling.choose(op, max(limit, NUM_LARGE))
    numbered = [sample for label, sample in chosen.items() if label.isdigit()]
    if chosen and is_small(op.name, numbered):
        chosen |= enlarged(numbered[:NUM_LARGE], lambda sample: not _fails(op, sample, "op"))
    chosen = {label: sample for label, sample in chosen.items() if not label.isdigit() or int(label) < limit or only}
    main = ("0", "large0") if "large0" in chosen else ("0", "1")
    base = "large0" if "large0" in chosen else "0"
    if with_related and base in chosen and not _fails(op, chosen[base], "op"):
        chosen |= related(chosen[base], lambda sample: _leaves(op, sample))
    plan = Plan(op, {}, [], reason)
    for label, sample in chosen.items():
        if (only is None and any(sample is other for other in plan.samples.values())) or (
            only is not None and label != only.sample
        ):
            continue
        failure = _fails(op, sample, "op")
        if failure:
            plan.skipped = plan.skipped or f"fails on one device: {failure}"
            continue
        plan.samples[label] = sample
        if only is not None:
            plan.cases.append(only)
        elif label in ("dims", "other"):
            plan.cases += _related_cases(plan, label, base, cap)
        else:
            plan.cases += _cases(plan, label, cap, main)
    if plan.cases:
        plan.skipped = ""
    return plan


def _cases(plan: Plan, label: str, cap: int, main: tuple):
    sample = plan.samples[label]
    whole, seed = sample.whole(), f"{plan.name} {label}"
    single = [options(tensor, 1) for tensor in whole]
    is_main, few = label in main, max(2, cap // 5)
    rows = combinations(single, cap=cap if is_main else few * 2, seed=seed)
    yield from (Case(label, "op", row, partial_grad=i % 4 == 3) for i, row in enumerate(rows))
    if is_main:
        yield from (Case(label, "op", row) for row in _on_two_axes(whole, few + 1, seed))
    if label in ("0", "2"):
        writes_out = plan.op.supports_out and plan.op.name not in IGNORE_OUT
        variants = {"inplace": plan.op.inplace_variant is not None, "out": writes_out}
        for variant in [name for name, exists in variants.items() if exists and not _fails(plan.op, sample, name)]:
            yield from (Case(label, variant, row) for row in combinations(single, cap=few + 2, seed=seed)[1:])


def _on_two_axes(whole: list[torch.Tensor], num: int, seed: str) -> Iterator[tuple[str, ...]]:
    """Yield distributed combinations for two mesh axes: half of them alike, half of them not."""
    double, chooser = [options(tensor, 2) for tensor in whole], random.Random(seed)
    rows = alike(double)[1:]
    mixed = [tuple(chooser.choice(each) for each in double) for _ in range(num - num // 2)]
    yield from dict.fromkeys([*chooser.sample(rows, min(len(rows), num // 2)), *mixed])


def _related_cases(plan: Plan, label: str, base: str, cap: int) -> Iterator[Case]:
    """Yield cases of a sample that was made from another one; those with other data have the other one's placements."""
    single, few = [options(tensor, 1) for tensor in plan.samples[label].whole()], max(2, cap // 5)
    if label == "dims":  # each dim is sharded once
        yield from (Case(label, "op", row) for row in alike(single)[1 : few + 4])
        return
    rows = combinations(single, cap=cap, seed=f"{plan.name} {base}")[1:]
    yield from (Case(label, "op", row) for row in rows[: few + 1])
    if plan.name not in UNINITIALISED:
        yield from (Case(label, "twice", row) for row in rows[-few:])


def run_variant(op, variant: str, args: tuple, kwargs: dict, out=None):
    """Run an operator: by itself, in place, or with a given ``out``."""
    if variant == "inplace":
        return op.inplace_variant(*args, **kwargs)
    if variant == "out":
        return op(*args, **kwargs, out=out)
    return op(*args, **kwargs)


def _fails(op, sample: Sample, variant: str) -> str:
    """Run a sample on one device without autograd; return the error's name, or an empty string."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = run_variant(op, "op" if variant == "out" else variant, *_copies(sample))
            if variant == "out":
                run_variant(op, variant, *_copies(sample), out=given_out(result, torch.empty_like))
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def given_out(result: object, make: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Return what an operator writes its result to: a tensor that ``make`` gives for each tensor of the result."""
    return make(result) if isinstance(result, torch.Tensor) else tuple(map(make, result))


def _leaves(op, sample: Sample) -> list | None:
    torch.manual_seed(5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args, kwargs = _copies(sample)
            return _torch.tree_leaves(op(*args, **kwargs))
        except Exception:
            return None


def _copies(sample: Sample) -> tuple[tuple, dict]:
    return sample.arguments([tensor.clone() for tensor in sample.whole()])
