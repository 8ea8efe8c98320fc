"""Random lines of a program: the templates of `lines.txt`, with places for tensors, dims and numbers.

====== =====================================================================================
place  becomes
====== =====================================================================================
{a}    a float tensor; {b} {c}: others, which may or may not fit: a line that fails is dropped
{i}    a tensor of indices, {m} a mask; {w}: a tensor that the line writes to
{d}    a dim of {a} or {w}, negative half of the time, {e} another one
{k}    True or False
{n}    an index within dim {d}, negative half of the time; {l}: a smaller size, at least 1
{p}    placements of {a} in code
====== =====================================================================================

A template before which ``*`` stands needs distinct elements of {a}: the order of equal ones is not defined.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["TEMPLATES", "propose"]


def _read(path: Path) -> dict[str, tuple[int, list[str]]]:
    """Return how often a group is chosen, and its templates, by name."""
    groups: dict[str, tuple[int, list[str]]] = {}
    for line in path.read_text().splitlines():
        if head := re.fullmatch(r"\[(\w+) (\d+)\]", line):
            templates: list[str] = []
            groups[head[1]] = int(head[2]), templates
        elif line and not line.startswith("#"):
            templates.append(line)
    return groups


TEMPLATES = _read(Path(__file__).with_name("lines.txt"))


def propose(chooser: random.Random, tensors: dict[str, torch.Tensor], target: str, num_axes: int) -> str | None:
    """Return a line that may fail, or None where no tensor fits; a result is assigned to ``target``."""
    groups = list(TEMPLATES)
    (group,) = chooser.choices(groups, [TEMPLATES[name][0] for name in groups])
    template = chooser.choice(TEMPLATES[group][1])
    kinds = {
        "float": [n for n, t in tensors.items() if t.dtype == torch.float64],
        "bool": [n for n, t in tensors.items() if t.dtype == torch.bool],
        "int": [n for n, t in tensors.items() if t.dtype == torch.int64],
    }
    if not kinds["float"]:
        return None
    recent = kinds["float"][-3:]
    main = chooser.choice(recent if chooser.random() < 0.6 else kinds["float"])
    values = _Values(chooser, tensors, main, num_axes)
    if template.startswith("*") and len(set(tensors[main].flatten().tolist())) < tensors[main].numel():
        return None
    chosen = {"a": main, "w": main}

    def fill(match: re.Match) -> str:
        place = match[1]
        if place not in chosen:
            kind = {"b": "float", "c": "float", "i": "int", "m": "bool"}.get(place)
            if kind is None:
                chosen[place] = getattr(values, place)()
            else:
                chosen[place] = _like(chooser, tensors, kinds[kind], tensors[main].shape)
        return chosen[place]

    try:
        line = re.sub(r"\{(\w)\}", fill, template.removeprefix("*"))
    except LookupError:
        return None
    return line if group == "writes" else f"{target} = {line}"


def _like(chooser: random.Random, tensors: dict, names: Sequence[str], shape: torch.Size) -> str:
    """Return one of ``names``, more often one of equal shape, then one that broadcasts."""
    if not names:
        raise LookupError
    alike = [n for n in names if tensors[n].shape == shape]
    if alike and chooser.random() < 0.7:
        return chooser.choice(alike)
    return chooser.choice(names)


class _Values:
    """Values of the places of a template that are no tensors."""

    def __init__(self, chooser: random.Random, tensors: dict, name: str, num_axes: int):
        self.chooser, self.tensor, self.num_axes = chooser, tensors[name], num_axes
        if self.tensor.ndim:
            self.dim = chooser.randrange(self.tensor.ndim)

    def d(self) -> str:
        if not self.tensor.ndim:
            raise LookupError
        return str(self._signed(self.dim, self.tensor.ndim))

    def e(self) -> str:
        if self.tensor.ndim < 2:
            raise LookupError
        other = self.chooser.choice([dim for dim in range(self.tensor.ndim) if dim != self.dim])
        return str(self._signed(other, self.tensor.ndim))

    def k(self) -> str:
        return str(self.chooser.random() < 0.5)

    def n(self) -> str:
        size = self.tensor.shape[self.dim] if self.tensor.ndim else 0
        if not size:
            raise LookupError
        return str(self._signed(self.chooser.randrange(size), size))

    def l(self) -> str:  # noqa: E743 - the place's letter
        size = self.tensor.shape[self.dim] if self.tensor.ndim else 0
        if not size:
            raise LookupError
        return str(self.chooser.randint(1, size))

    def p(self) -> str:
        kinds = ["Replicate()", *(f"Shard({dim})" for dim in range(-self.tensor.ndim, self.tensor.ndim))]
        return f"[{', '.join(self.chooser.choice(kinds) for _ in range(self.num_axes))}]"

    def P(self) -> str:  # noqa: N802 - the place's letter
        dims = list(range(self.tensor.ndim))
        self.chooser.shuffle(dims)
        return ", ".join(map(str, dims))

    def _signed(self, index: int, size: int) -> int:
        return index - size if self.chooser.random() < 0.5 else index
