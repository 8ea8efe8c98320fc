"""The walk through two runs in program order, up to the step of the first difference.

Inputs, parameters and inner calls of a module are equal, or within rounding, when the walk comes to its output. So the
first tensor that differs is in the module with the fault, and its kind says where in the module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .digest import NUM_BLOCKS, Digest
from .file import RankFile
from .merge import Key, MergedStep, Whole, merged_steps
from .result import NAMES, Comparison, Difference, alike
from .tolerance import deviations, digest_error, understatement, unit_roundoff, variance

_PREFERRED = ("rows", "flat", "whole", "sum", "mean")


def find_first(
    labels: tuple[str, str], files: tuple[Sequence[RankFile], Sequence[RankFile]], *, bits: bool | None
) -> Comparison:
    """Compare two records up to the step of the first difference."""
    result = Comparison(labels, headers=(files[0][0].header, files[1][0].header))
    staged = [any(file.header.get("coords", {}).get("pp") for file in each) for each in files]
    walk = _Walk(result, by_second=staged == [True, False])
    for a, b in _aligned(merged_steps(files[0]), merged_steps(files[1]), result):
        use_bits = (a.exact is not None and a.exact == b.exact) if bits is None else bits
        result.bits = result.bits and use_bits
        result.steps.append(a.number)
        walk.step(a, b, bits=use_bits)
        if result.first is not None:
            break
    else:
        _note_ends(result, files)
    result.bits = result.bits and bool(result.steps)
    return result


def _aligned(
    first: Iterator[MergedStep], second: Iterator[MergedStep], result: Comparison
) -> Iterator[tuple[MergedStep, MergedStep]]:
    a, b = next(first, None), next(second, None)
    while a is not None or b is not None:
        if a is not None and b is not None and a.number == b.number:
            yield a, b
            a, b = next(first, None), next(second, None)
        elif b is None or (a is not None and a.number < b.number):
            result.uncompared[f"step recorded by {NAMES[0]} only"] += 1
            a = next(first, None)
        else:
            result.uncompared[f"step recorded by {NAMES[1]} only"] += 1
            b = next(second, None)


def _note_ends(result: Comparison, files: tuple[Sequence[RankFile], Sequence[RankFile]]) -> None:
    for name, of_ranks in zip(NAMES, files, strict=True):
        for end in dict.fromkeys(file.end for file in of_ranks):
            if end == "max_bytes":
                result.uncompared[f"{name}: steps after max_bytes was reached"] += 1
            elif end != "closed":
                result.uncompared[f"{name}: the record ends with {end or 'no last line: the run was ended'}"] += 1
        missing = Counter[str]()
        for file in of_ranks:
            missing |= Counter(file.missing)
        for text, count in missing.items():
            result.uncompared[f"{name}: {text}"] += count
        silent = set(of_ranks[0].silent).intersection(*(file.silent for file in of_ranks))
        for module in [each for each in of_ranks[0].silent if each in silent]:
            result.uncompared[f"{name}: no call of {alike(module)} was seen"] += 1


@dataclass
class _Measured:
    """A difference that was measured: its norm, the norms of both tensors, and what is allowed."""

    norm: float
    scale: float
    allowed: float


class _Walk:
    """Compares steps in their order, and keeps what earlier tensors allow for later ones.

    Args:
        result: receives what is found.
        by_second: whether the order of the program is that of the second run, since the first is a pipeline.
    """

    def __init__(self, result: Comparison, *, by_second: bool) -> None:
        self._result, self._by_second = result, by_second
        self._drift: dict[str, float] = {}  # allowed difference of each parameter
        self._apart: dict[str, float] = {}  # measured difference of each parameter
        self._doubt: dict[str, float] = {}  # part of its norm by which the gradient of a parameter may differ
        self._before: dict[str, tuple[Digest, Digest]] = {}

    def step(self, a: MergedStep, b: MergedStep, *, bits: bool) -> None:
        """Compare a step, and store its first difference in the result."""
        self._bits, self._number = bits, a.number
        self._variance = self._flow = self._any = self._backward = 0.0
        self._inner: dict[str, float] = {}
        self._inputs: dict[tuple[str, int], float] = {}
        self._norms: dict[str, list[float]] = {}
        self._equal: list[Key] = []
        self._now: dict[str, tuple[Digest, Digest]] = {}
        found: list[Difference] = []
        if not self._check_calls(a, b, found):
            for key in b.tensors if self._by_second else a.tensors:
                if key in a.tensors and key in b.tensors:
                    self._compare(key, a.tensors[key], b.tensors[key], found)
        for name, one, other in ((NAMES[0], a, b), (NAMES[1], b, a)):
            for _, fqn, _, _ in (
                key for key in one.tensors if key not in other.tensors and key not in other.incomplete
            ):
                self._result.uncompared[f"tensor of {alike(fqn)} recorded by {name} only"] += 1
            for _, fqn, _, _ in one.incomplete:
                text = f"{name}: tensor of {alike(fqn)} whose parts or layout were not all recorded"
                self._result.uncompared[text] += 1
            if not one.is_complete:
                self._result.uncompared[f"{name}: step that did not end on every rank"] += 1
        self._before = self._now
        if found:
            self._result.first = _with_others(found)

    def _check_calls(self, a: MergedStep, b: MergedStep, found: list[Difference]) -> bool:
        """Return whether a module was called another number of times, as far as all of its calls are known."""
        counts: list[dict[str, int]] = [{}, {}]
        for number, step in enumerate((a, b)):
            for kind, module, call, _ in step.tensors:
                if kind in ("input", "output"):
                    counts[number][module] = max(counts[number].get(module, 0), call + 1)
        unknown = {module for _, module, _, _ in (*a.incomplete, *b.incomplete)}
        if not (a.is_complete and b.is_complete):
            return False
        for module, count in counts[0].items():
            other = counts[1].get(module, count)
            if other != count and module not in unknown:
                times = [f"{_times(each)} in {run}" for run, each in zip(NAMES, (count, other), strict=True)]
                verdict = f"the module was called {times[0]} and {times[1]}"
                found.append(Difference(a.number, "input", module, min(count, other), "", "calls", verdict))
                return True
        return False

    # ------------------------------------------------------------------------------------------- one tensor

    def _compare(self, key: Key, a: list[Whole], b: list[Whole], found: list[Difference]) -> None:
        pair, what = _pair(a, b)
        if pair is None:
            if what:
                found.append(self._difference(key, a[0], b[0], what, None))
            else:
                self._result.uncompared["tensor without a common reading of its rows in both layouts"] += 1
            return
        one, other = pair
        self._result.compared += 1
        if one.conflict or other.conflict:
            found.append(self._difference(key, one, other, "replicas", None))
            return
        measured = self._measure(key, one, other)
        has_bits = one.has_bits and other.has_bits
        is_same = has_bits and one.dtype == other.dtype and one.digest.hashes == other.digest.hashes
        if not is_same and self._may_be_sorted(one, other, measured):
            self._result.uncompared[f"tensor of {alike(key[1])} whose rows are in another order"] += 1
            return
        self._note(key, one, other, measured)
        if is_same:
            self._equal.append(key)
            return
        needs_bits = (self._bits and has_bits) or not unit_roundoff(one.dtype)
        if needs_bits and one.dtype != other.dtype:
            found.append(self._difference(key, one, other, "dtype", measured))
        elif needs_bits or not measured.norm <= measured.allowed:
            allowed = _Measured(measured.norm, measured.scale, 0.0) if needs_bits else measured
            found.append(self._difference(key, one, other, "values", allowed))
        else:
            self._equal.append(key)

    def _may_be_sorted(self, a: Whole, b: Whole, measured: _Measured) -> bool:
        """Return whether the same rows may be in another order: tokens by experts, in each part of the batch."""
        if "flat" not in (a.reading, b.reading) or measured.norm <= measured.allowed:
            return False
        return abs(a.digest.norm - b.digest.norm) <= measured.allowed

    def _measure(self, key: Key, a: Whole, b: Whole) -> _Measured:
        """Return the norm of the difference of two tensors, and how much of it rounding explains."""
        kind, name, call, _ = key
        norm = _distance(a.digest, b.digest, has_norms=a.has_bits and b.has_bits)
        own = max(a.digest.norm, b.digest.norm)
        dtype = a.dtype if unit_roundoff(a.dtype) >= unit_roundoff(b.dtype) else b.dtype
        self._variance += variance(dtype, max(a.terms, b.terms))
        sigma = deviations(self._result.compared)
        rounding = math.sqrt(self._variance) + digest_error(a.numel)
        if kind in ("parameter", "initial parameter", "initial buffer"):
            allowed = sigma * (unit_roundoff(dtype) + digest_error(a.numel)) * own
            if kind == "parameter":
                allowed += self._drift.get(name, 0.0) + self._update(name, a.digest, b.digest, rounding * sigma)
            return _Measured(norm, own, allowed)
        if kind == "gradient":
            module = name.rpartition(".")[0]
            inputs, outputs = self._norms.get(f"input {module}"), self._norms.get(f"output gradient {module}")
            scale = own * math.sqrt(max(a.terms, b.terms))
            if outputs is not None:
                scale = max(own, math.hypot(*outputs) * max(math.hypot(*(inputs or [0.0])), math.sqrt(a.terms)))
            source = max(self._flow, self._backward)
            return _Measured(norm, scale, sigma * (rounding + source) * scale)
        source = {
            "input": self._any,
            "output": max(self._inputs.get((name, call), 0.0), self._inner.get(name, 0.0)),
            "output gradient": max(self._flow, self._backward),
        }.get(kind, self._any)
        explained = self._of_parameters(name, a) if kind == "output" else 0.0
        return _Measured(norm, own, sigma * (rounding + source) * own + explained)

    def _update(self, name: str, a: Digest, b: Digest, rounding: float) -> float:
        """Return by how much the steps of an optimizer may differ."""
        if name not in self._before:
            return math.inf  # of the first recorded step nothing is known about the values before
        moved = max(_distance(new, old) for new, old in zip((a, b), self._before[name], strict=True))
        doubt = min(1.0, self._doubt.get(name, rounding))
        return 2 * math.sqrt(doubt) * moved

    def _of_parameters(self, module: str, output: Whole) -> float:
        """Return by how much accepted differences of a module's own parameters change its output."""
        inputs = math.hypot(*self._norms.get(f"input {module}", [0.0]))
        rows = math.prod(output.shape[:-1]) if output.shape else 1
        own = (apart for name, apart in self._apart.items() if name.rpartition(".")[0] == module)
        return sum(own) * max(inputs, math.sqrt(rows))

    def _note(self, key: Key, a: Whole, b: Whole, measured: _Measured) -> None:
        """Keep what later tensors need of this one."""
        kind, name, call, _ = key
        own = max(a.digest.norm, b.digest.norm)
        apart = measured.norm / measured.scale if measured.scale and math.isfinite(measured.norm) else 0.0
        if not unit_roundoff(a.dtype):
            return
        if kind in ("parameter", "initial parameter"):
            self._now[name] = (a.digest, b.digest)
            if kind == "initial parameter":
                self._before[name] = (a.digest, b.digest)
            if math.isfinite(measured.allowed):
                self._drift[name] = measured.allowed
            differ = sum(x != y for x, y in zip(a.digest.hashes, b.digest.hashes, strict=True))
            self._apart[name] = min(measured.allowed, measured.norm * understatement(differ)) if differ else 0.0
        elif kind == "gradient":
            self._doubt[name] = max(self._doubt.get(name, 0.0), measured.allowed / own if own else 1.0)
        elif kind == "output gradient":
            self._backward = max(self._backward, apart)
            self._norms.setdefault(f"output gradient {name}", []).append(own)
        else:
            self._any = max(self._any, apart)
            if kind == "input":
                self._inputs[name, call] = max(self._inputs.get((name, call), 0.0), apart)
                self._norms.setdefault(f"input {name}", []).append(own)
            else:
                is_explained = apart * measured.scale <= self._of_parameters(name, a)
                self._flow = self._flow if is_explained else max(self._flow, apart)
                parts = name.split(".")
                for depth in range(len(parts) if name else 0):
                    outer = ".".join(parts[:depth])
                    self._inner[outer] = max(self._inner.get(outer, 0.0), apart)

    # ------------------------------------------------------------------------------------------- the report

    def _difference(self, key: Key, a: Whole, b: Whole, what: str, measured: _Measured | None) -> Difference:
        kind, name, call, place = key
        blocks = [
            index
            for index in range(NUM_BLOCKS)
            if what == "values" and a.digest.hashes[index] != b.digest.hashes[index]
        ]
        rows = None
        if blocks and a.shape and a.has_bits and b.has_bits:
            size = a.shape[0]
            rows = -(-blocks[0] * size // NUM_BLOCKS), -(-(blocks[-1] + 1) * size // NUM_BLOCKS)
        scale = max(a.digest.norm, b.digest.norm)
        index, values = _first_index(a, b, measured) if what == "values" else (None, None)
        return Difference(
            step=self._number,
            kind=kind,
            fqn=name,
            call=call,
            tensor=place,
            what=what,
            verdict=self._verdict(key, a, b, what) + (_of_another_dtype(a, b, measured) if what == "values" else ""),
            size=measured.norm / scale if measured is not None and scale else math.nan,
            allowed=measured.allowed / scale if measured is not None and scale else 0.0,
            norms=(a.digest.norm, b.digest.norm),
            placements=(a.placements, b.placements),
            shape=a.shape,
            rows=rows,
            index=index,
            values=values,
        )

    def _verdict(self, key: Key, a: Whole, b: Whole, what: str) -> str:
        kind, name, call, _ = key
        of = name or "the model"
        if what == "replicas":
            which = [f"{run}: {each.conflict}" for run, each in zip(NAMES, (a, b), strict=True) if each.conflict]
            return (
                f"ranks should hold the same values and do not ({'; '.join(which)}): a reduction or gather is missing"
            )
        if what == "shape":
            return f"the global shapes are {list(a.shape)} and {list(b.shape)}"
        if what == "dtype":
            return f"the dtypes are {a.dtype} and {b.dtype}"
        before = self._equal[-1] if self._equal else None
        if kind.startswith("initial"):
            return "the runs start from different values: initialization, seed or checkpoint"
        if kind == "input":
            if before is None or not any(each[0] in ("input", "output") for each in self._equal):
                return "nothing differs before it: the runs got different batches, or prepare them differently"
            where = self._around(before[1], name)
            place = f"the forward of {where}, between {_words(before)} and this call"
            return f"nothing differs before it: the fault is in {place}"
        if kind == "output":
            inner = any(each[0] == "output" and each[1].startswith(f"{name}." if name else "") for each in self._equal)
            inputs = [each for each in self._equal if each[0] == "input" and each[1] == name and each[2] == call]
            same = ["compared inputs", *["parameters"] * bool(self._parameters_of(name)), *["inner calls"] * inner]
            if not inputs:
                return f"its inputs were not compared: the fault is in {of} or before it"
            return f"its {_listed(same)} are equal: the fault is in this module's own code, {of}"
        if kind == "output gradient":
            since = "at the beginning of backward"
            if before is not None and before[0] == "output gradient":
                since = f"after {_words(before)}"
            return f"nothing differs before it: the fault is in the backward of what uses this output, {since}"
        if kind == "gradient":
            seen = any(each[0] == "output gradient" and each[1] == name.rpartition(".")[0] for each in self._equal)
            start = "the gradients of the module's outputs are equal" if seen else "nothing differs before it"
            return f"{start}: the fault is in how this gradient is summed over calls, rows and ranks, or clipped"
        if kind == "buffer":
            return "nothing differs before it: the fault is in how the module updates this buffer"
        seen = any(each[:2] == ("gradient", name) for each in self._equal)
        stale = [
            run
            for run, now, old in zip(NAMES, (a, b), self._before.get(name, ()), strict=False)
            if now.digest.hashes == old.hashes
        ]
        cause = f"; {_listed(stale)} still has the value before the step" if stale else ""
        return f"its gradient {'is equal' if seen else 'was not compared'}: the fault is in the optimizer's step{cause}"

    def _around(self, first: str, second: str) -> str:
        """Return the innermost module whose forward calls two modules, one after the other."""
        shared = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(first.split("."), second.split("."), strict=False)
        )
        parts = [part for part, _ in shared]
        known = self._result.headers[0].get("modules", [])
        names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        return next((name for name in names if name in known and name != second), "the model")

    def _parameters_of(self, module: str) -> list[str]:
        return [name for name in self._apart if name.startswith(f"{module}." if module else "")]


def _pair(a: list[Whole], b: list[Whole]) -> tuple[tuple[Whole, Whole] | None, str]:
    """Return readings of a tensor with the same shape in both runs, or what differs, or "" if that is not known."""
    pairs = [(one, other) for one in a for other in b if one.shape == other.shape]
    ranked = sorted(pairs, key=lambda pair: tuple(map(_PREFERRED.index, (pair[0].reading, pair[1].reading))))
    clean = [pair for pair in ranked if not (pair[0].conflict or pair[1].conflict)]
    if clean:
        return clean[0], ""
    if ranked and all(each.has_bits for pair in ranked for each in pair):
        return ranked[0], ""
    is_known = all(each.reading == "whole" and not each.is_assumed for each in (*a, *b))
    return None, "shape" if is_known and not ranked else ""


def _distance(a: Digest, b: Digest, *, has_norms: bool = True) -> float:
    """Return an estimate of the norm of the difference of two tensors, whose norms may be estimates themselves."""
    found = math.sqrt(sum((x - y) ** 2 for x, y in zip(a.projections, b.projections, strict=True)))
    return max(found, abs(a.norm - b.norm)) if has_norms and not math.isnan(found) else found


def _first_index(
    a: Whole, b: Whole, measured: _Measured | None
) -> tuple[tuple[int, ...] | None, tuple[Any, Any] | None]:
    """Return the first index whose values differ by more than their part of what rounding explains."""
    one, other = a.values(), b.values()
    if one is None or other is None or one.shape != other.shape:
        return None, None
    if one.is_floating_point():
        limit = 0.0 if measured is None else measured.allowed / math.sqrt(max(1, one.numel()))
        apart = ~((one.double() - other.double()).abs() <= limit) & ~(one.isnan() & other.isnan())
    else:
        apart = one != other
    if not apart.any():
        return None, None
    flat = int(apart.reshape(-1).int().argmax())
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(flat), one.shape)) if one.shape else ()
    return index, (one[index].item(), other[index].item())


def _with_others(found: list[Difference]) -> Difference:
    return dataclasses.replace(found[0], others=len(found) - 1)


def _of_another_dtype(a: Whole, b: Whole, measured: _Measured | None) -> str:
    """Return a text if the difference is as small as a rounding to a dtype of fewer bits than that of the tensor."""
    own = max(unit_roundoff(a.dtype), unit_roundoff(b.dtype))
    single = unit_roundoff("float32")
    if measured is None or not 0 < own < single or not measured.norm <= single * measured.scale:
        return ""
    return "; it is as small as a rounding to float32, in which a module may compute inside"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _words(key: Key) -> str:
    kind, name, call, _ = key
    return f"the {kind} of {name or 'the model'} (call {call})"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1] if words else "")))
