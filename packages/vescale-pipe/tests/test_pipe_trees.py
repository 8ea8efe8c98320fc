"""Nested objects are taken apart and put together: containers, registered classes, dataclasses; the rest are leaves."""

import collections
import dataclasses
from typing import Any

import torch

from vescale.pipe._tree import Leaf, flatten, map_leaves


@dataclasses.dataclass(frozen=True)
class Inner:
    values: list[Any]
    name: str = "inner"


@dataclasses.dataclass
class Outer:
    inner: Inner
    table: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Closed(Leaf):
    content: int


Point = collections.namedtuple("Point", "x y")


def test_every_container_is_opened_and_rebuilt():
    first, second = torch.zeros(1), torch.ones(1)
    tree = (Outer(Inner([1, first]), {"a": Point(3, [second])}), None, {"b": (5,)})
    leaves, structure = flatten(tree)
    assert leaves == [1, first, "inner", 3, second, None, 5]
    assert structure.rebuild(leaves) == tree


def test_rebuilding_leaves_the_original_alone():
    tree = Outer(Inner([Closed(1)]), {"a": 2})
    changed = map_leaves(lambda leaf: 0 if isinstance(leaf, Closed) else leaf, tree)
    assert changed == Outer(Inner([0]), {"a": 2})
    assert tree == Outer(Inner([Closed(1)]), {"a": 2})


def test_leaves():
    leaves = [Closed(1), Inner, torch.zeros(2), object(), "text", Inner([1, 2])]
    assert flatten(leaves)[0] == leaves


def test_named_results_of_torch():
    result = torch.tensor([[1.0, 3.0]]).max(dim=1)
    leaves, structure = flatten(result)
    assert len(leaves) == 2
    assert type(structure.rebuild(leaves)) is type(result)
