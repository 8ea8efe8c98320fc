"""What other packages build on: nested values, agreement between ranks, chunks, texts."""

import collections
import dataclasses

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import extension, init_device_mesh
from vescale.dtensor.extension import (
    bytes_text,
    chunk,
    describe_difference,
    differing_texts,
    leaves,
    map_leaves,
    tensors_in,
    text_table,
)
from vescale_testing import ranks

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Output:
    """What a module may return."""

    logits: torch.Tensor
    cache: list
    doubled: object = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.logits)


class Cache(collections.OrderedDict):
    """A dict of a class of its own."""


def nested():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    return (a, b, c), [a, Pair(1, b), Cache(x=(c, "text")), Output(c, [a]), torch.Size([4, 5])]


def test_leaves_in_order():
    (a, b, c), value = nested()
    assert [id(t) for t in tensors_in(value)] == [id(a), id(b), id(c)]
    assert [id(t) for t in tensors_in(value, dataclasses=True)] == [id(a), id(b), id(c), id(c), id(a)]
    assert list(leaves({"x": [], "y": (1, None)})) == [1, None]


def test_classes_of_containers_are_kept():
    _, value = nested()
    numel = map_leaves(torch.Tensor.numel, value, torch.Tensor, dataclasses=True)
    assert numel == [1, Pair(1, 2), Cache(x=(3, "text")), Output(3, [1]), torch.Size([4, 5])]
    assert [type(item) for item in numel] == [int, Pair, Cache, Output, torch.Size]
    assert value[3].cache[0].numel() == 1, "the original has not changed"
    assert numel[3].doubled == 6, "derived again"


def test_what_does_not_change_is_the_same_object():
    (a, *_), value = nested()
    assert map_leaves(lambda leaf: leaf, value, dataclasses=True) is value
    changed = map_leaves(lambda leaf: -1 if leaf is a else leaf, value)
    assert [new is old for new, old in zip(changed, value, strict=True)] == [False, True, True, True, True]


def test_results_of_torch_functions():
    doubled = map_leaves(lambda t: 2 * t, torch.max(torch.tensor([[1, 2]]), dim=1), torch.Tensor)
    assert type(doubled) is torch.return_types.max
    assert doubled.values.tolist() == [4]


@ranks(4)
def test_texts_that_differ_are_known_to_all():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert differing_texts("same", mesh) == {}
    assert differing_texts("same", dist.group.WORLD) == {}
    text = "line 1\nline b" if dist.get_rank() == 2 else "line 1\nline a"
    for over in (mesh, dist.group.WORLD):
        texts = differing_texts(text, over)
        assert list(texts) == [0, 1, 2, 3]
        assert [rank for rank, each in texts.items() if each != texts[0]] == [2]
    rows = differing_texts(text, mesh["dp"])
    assert list(rows) == ([0, 2] if dist.get_rank() % 2 == 0 else [])
    assert describe_difference("the plan", texts) == (
        "the plan differs between ranks: ranks 0, 1, 3 have 'line a', rank 2 has 'line b'"
    )


@pytest.mark.parametrize(
    "texts, expected",
    [
        ({0: "a", 1: "a"}, ""),
        ({0: "a\nb", 1: "a"}, "it differs between ranks: rank 0 has 'b', rank 1 has 'nothing more'"),
        (
            {rank: str(rank // 10) for rank in range(11)},
            "it differs between ranks: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more have '0', rank 10 has '1'",
        ),
    ],
)
def test_descriptions(texts, expected):
    assert describe_difference("it", texts) == expected


@pytest.mark.parametrize("total", range(10))
def test_chunks_are_those_of_torch(total):
    for num_chunks in range(1, 7):
        parts = [part.tolist() for part in torch.arange(total).chunk(num_chunks)]
        parts += [[]] * (num_chunks - len(parts))  # torch.chunk leaves out empty chunks
        found = [chunk(total, num_chunks, index) for index in range(num_chunks)]
        assert [list(range(start, start + length)) for start, length in found] == parts
        assert all(0 <= start <= total for start, _ in found)


def test_a_table_aligns_its_columns_and_rules_off_the_sum():
    text = text_table(["name", "count"], [["a", "10"], ["all", "10"]], num_text=1)
    assert text.splitlines() == ["name  count", "----  -----", "a        10", "----  -----", "all      10"]


def test_bytes():
    sizes = (0, 999, 1023, 1000 / 3, 1536, 3 * 2**40)
    assert [bytes_text(n) for n in sizes] == ["0 B", "999 B", "1023 B", "333.3 B", "1.5 KiB", "3 TiB"]


def test_every_name_is_documented():
    assert [name for name in extension.__all__ if name not in ("Box",) and not getattr(extension, name).__doc__] == []
