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
    tree = (Outer(Inner([1, 2]), {"a": Point(3, [4])}), None, {"b": (5,)})
    leaves, structure = flatten(tree)
    assert leaves == [1, 2, "inner", 3, 4, None, 5]
    assert structure.rebuild(leaves) == tree


def test_rebuilding_leaves_the_original_alone():
    tree = Outer(Inner([1]), {"a": 2})
    doubled = map_leaves(lambda leaf: leaf * 2, tree)
    assert doubled == Outer(Inner([2], "innerinner"), {"a": 4})
    assert tree == Outer(Inner([1]), {"a": 2})


def test_leaves():
    leaves = [Closed(1), Inner, torch.zeros(2), object(), "text"]
    assert flatten(leaves)[0] == leaves


def test_named_results_of_torch():
    result = torch.tensor([[1.0, 3.0]]).max(dim=1)
    leaves, structure = flatten(result)
    assert len(leaves) == 2
    assert type(structure.rebuild(leaves)) is type(result)
