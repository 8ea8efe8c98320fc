"""Check a reader of JSON: every change of a valid text reads as what it says, or is refused with the reader's error.

Changes of one node are tried one by one, all of them; changes of two and three nodes at once are drawn by hypothesis,
without randomness between runs.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

__all__ = ["Mutation", "check_reader", "mutations"]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, 1.0, 1e308, math.nan, math.inf,
    "", "a", "0", "../a", "\x00", "\ud800", [], [0], ["a"], [[]], {}, {"a": 0}, {"__items__": 0},
)  # fmt: skip
ADDED: tuple[Any, ...] = (None, 0, "a", {})


@dataclass(frozen=True)
class Mutation:
    """A change of one node of a JSON tree.

    Attributes:
        path: keys and indices from the root to the node.
        change: ``"replace"``, ``"drop"`` or ``"add"``; the latter adds ``value`` to an object or a list.
        value: the new value.
    """

    path: tuple[str | int, ...]
    change: str
    value: Any = None

    def apply(self, tree: Any) -> Any:
        """Return ``tree`` with the change, or as it is if it has no such node (any more)."""
        holder = {"": copy.deepcopy(tree)}
        node: Any = holder
        keys = ("", *self.path)
        try:
            for key in keys[:-1]:
                node = node[key]
            if isinstance(node, dict) and not isinstance(keys[-1], str):
                return tree  # it was a list
            if self.change == "drop":
                del node[keys[-1]]
            elif self.change == "replace":
                node[keys[-1]] = copy.deepcopy(self.value)
            elif isinstance(node[keys[-1]], dict):
                node[keys[-1]]["added"] = copy.deepcopy(self.value)
            else:
                node[keys[-1]].append(copy.deepcopy(self.value))
        except (LookupError, TypeError, AttributeError):
            return tree
        return holder.get("")


def mutations(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[Mutation]:
    """Yield every change of one node of a JSON tree."""
    yield from (Mutation(path, "replace", value) for value in VALUES)
    if path:
        yield Mutation(path, "drop")
    if isinstance(tree, dict | list):
        yield from (Mutation(path, "add", value) for value in ADDED)
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from mutations(child, (*path, key))


def check_reader(
    text: str,
    read: Callable[[str], Any],
    write: Callable[[Any], str],
    *,
    error: type[Exception],
    sign: Callable[[Any], Any] = lambda tree: tree,
    max_examples: int = 1000,
) -> int:
    """Read mutations of a text, and return how many were tried.

    Args:
        text: a valid text.
        read: the reader.
        write: writes what ``read`` returns.
        error: the only error that ``read`` may raise.
        sign: applied to a mutated tree, to renew a checksum.
        max_examples: number of examples with two or three changes.

    Raises:
        AssertionError: a mutation raises another error, or reads as something else than it says.
    """
    tree = json.loads(text)
    singles = list(mutations(tree))
    tried = 0

    def check(mutant: Any) -> None:
        nonlocal tried
        tried += 1
        _check_text(json.dumps(sign(mutant)), read, write, error)

    for mutation in singles:
        check(mutation.apply(tree))
    for end in range(0, len(text), max(len(text) // 500, 1)):
        _check_text(text[:end], read, write, error)
        tried += 1

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=tuple(HealthCheck),
    )
    @given(st.lists(st.sampled_from(singles), min_size=2, max_size=3))
    def several(chosen: list[Mutation]) -> None:
        mutant = tree
        for mutation in chosen:
            mutant = mutation.apply(mutant)
        check(mutant)

    several()
    return tried


def _check_text(text: str, read: Callable[[str], Any], write: Callable[[Any], str], error: type[Exception]) -> None:
    try:
        value: Any = read(text)
    except error as refusal:
        value = refusal
    except Exception as other:
        raise AssertionError(f"expected {error.__name__}, got {type(other).__name__}: {other} for {text}") from other
    if isinstance(value, Exception):
        assert type(value) is error, f"expected {error.__name__}, got {type(value).__name__}: {value} for {text}"
        assert re.search("expected .*got ", str(value), re.DOTALL), f"{value} for {text}"
    else:
        written = write(value)
        assert _says(json.loads(written), json.loads(text)), f"{text} reads as {written}"


def _says(written: Any, read: Any) -> bool:
    """Return whether a tree says what another says; a key with a default may be absent from the latter."""
    if (type(written), type(read)) == (float, int):
        return bool(written == read)
    if type(written) is not type(read):
        return False
    if isinstance(read, dict):
        return all(key in written and _says(written[key], value) for key, value in read.items())
    if isinstance(read, list):
        return len(written) == len(read) and all(map(_says, written, read))
    return bool(written == read or (written != written and read != read))
