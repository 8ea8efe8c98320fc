"""The blocks of a model: the modules of its chain that repeat, found by structure and not by names.

**Blocks** are the entries with parameters of the longest ``nn.ModuleList``, and of other lists with entries of a
similar size (an encoder and a decoder); without a list, those of the longest ``nn.Sequential``. Lists inside of another
list, such as the experts of a block, do not count.

A pipeline distributes blocks evenly over its stages, ``Plan(recompute=k)`` recomputes every k-th of them, and memory is
estimated block by block. The packages that need them do not import each other, so each has a copy of this file. A test
compares the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

#: Entries of a list count as blocks if they have at least this part of the parameters of those of the longest list.
ALIKE = 0.25


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model.

    Attributes:
        lists: names of the blocks of each list, by the name of the list, in the order of registration; the name of the
            model itself is "".
        longest: name of the longest list, of several the one with the largest blocks.
    """

    lists: Mapping[str, tuple[str, ...]]
    longest: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all blocks, in the order of registration."""
        return tuple(name for names in self.lists.values() for name in names)


def find_blocks(model: nn.Module) -> Blocks:
    """Return the blocks of a model; no tensor is read.

    Example:
        >>> find_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))).names
        ('0', '2')
    """
    for kind in (nn.ModuleList, nn.Sequential):
        found: dict[str, tuple[str, ...]] = {}
        sizes: dict[str, float] = {}  # mean number of parameters of a block
        for fqn, module in model.named_modules():
            is_inside = any(outer == "" or fqn.startswith(f"{outer}.") for outer in found)
            if not isinstance(module, kind) or is_inside:
                continue
            children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
            if len(children) > 1:
                found[fqn] = tuple(f"{fqn}.{name}".removeprefix(".") for name in children)
                sizes[fqn] = sum(parameter.numel() for parameter in module.parameters()) / len(children)
        if found:
            longest = max(found, key=lambda fqn: (len(found[fqn]), sizes[fqn]))
            if kind is nn.Sequential:
                return Blocks({longest: found[longest]}, longest)
            least = sizes[longest] * ALIKE
            return Blocks(
                {fqn: names for fqn, names in found.items() if fqn == longest or sizes[fqn] >= least}, longest
            )
    return Blocks({})


def uniform_counts(num_blocks: int, num_stages: int) -> list[int]:
    """Return how many blocks each stage gets; the remainder goes to stages 1 .. p-2, then 0, then p-1.

    The ends come last because the first stage also runs the embedding and the last one the head.

    Example:
        >>> uniform_counts(10, 4), uniform_counts(7, 4), uniform_counts(5, 2)
        ([2, 3, 3, 2], [2, 2, 2, 1], [3, 2])
    """
    size, rest = divmod(num_blocks, num_stages)
    counts = [size] * num_stages
    for stage in [*range(1, num_stages - 1), 0][:rest]:
        counts[stage] += 1
    return counts
