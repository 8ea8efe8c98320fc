"""Random lines of a program: the templates of `lines.txt`, with places for tensors, dims and numbers.

====== =====================================================================================
place  becomes
====== =====================================================================================
{a}    a tensor; {b} {c}: others, which may or may not fit: a line that fails is dropped
{i}    a tensor of indices, {m} a mask; {w}: a tensor that the line writes to
{d}    a dim of {a} or {w}, negative half of the time, {e} another one
{k}    True or False
{n}    an index within dim {d}, negative half of the time; {l}: a smaller size, at least 1
{p}    placements of {a} in code
====== =====================================================================================

The tensors {a}, {b}, {c} and {w} are of the kinds that the head of a template's group names: floats (real or complex)
unless it says otherwise. A template before which ``*`` stands needs distinct elements of {a}: the order of equal ones
is not defined.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["GROUPS", "propose"]


@dataclasses.dataclass
class Group:
    """Templates, how often one of them is chosen, the kinds of {a}, and whether the lines are statements."""

    often: float
    kinds: tuple[str, ...]
    is_statement: bool
    templates: list[str]


def _read(path: Path) -> list[Group]:
    groups: list[Group] = []
    for line in path.read_text().splitlines():
        if head := re.fullmatch(r"\[(.*?) ([\d.]+)(?: of (.*))?\]", line):
            kinds = tuple((head[3] or "float").split())
            groups.append(Group(float(head[2]), kinds, "writes" in head[1], []))
        elif line and not line.startswith("#"):
            groups[-1].templates.append(line)
    return groups


GROUPS = _read(Path(__file__).with_name("lines.txt"))
KINDS = {torch.float64: "float", torch.float32: "float", torch.complex128: "complex", torch.bool: "bool"}


def propose(chooser: random.Random, tensors: dict[str, torch.Tensor], target: str, num_axes: int) -> str | None:
    """Return a line that may fail, or None where no tensor fits; a result is assigned to ``target``."""
    (group,) = chooser.choices(GROUPS, [group.often for group in GROUPS])
    template = chooser.choice(group.templates)
    fitting = [name for name, tensor in tensors.items() if _kind(tensor) in group.kinds]
    if not fitting:
        return None
    main = chooser.choice(fitting[-3:] if chooser.random() < 0.6 else fitting)
    values = _Values(chooser, tensors, main, num_axes)
    if template.startswith("*") and len(set(tensors[main].flatten().tolist())) < tensors[main].numel():
        return None
    chosen = {"a": main, "w": main}

    def fill(match: re.Match) -> str:
        place = match[1]
        if place not in chosen:
            dtype = {"i": torch.int64, "m": torch.bool}.get(place)
            if place in "bc":
                chosen[place] = _like(chooser, tensors, fitting, tensors[main].shape)
            elif dtype is not None:
                names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
                chosen[place] = _like(chooser, tensors, names, tensors[main].shape)
            else:
                chosen[place] = getattr(values, place)()
        return chosen[place]

    try:
        line = re.sub(r"\{(\w)\}", fill, template.removeprefix("*"))
    except LookupError:
        return None
    return line if group.is_statement else f"{target} = {line}"


def _kind(tensor: torch.Tensor) -> str:
    """Return ``"float"``, ``"complex"``, ``"bool"`` or ``"int"``."""
    return KINDS.get(tensor.dtype, "int")


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
