"""Blocks are found by structure: lists that repeat, of a similar size, not inside of each other."""

import pytest
from torch import nn

from vescale.plan import blocks_of, repeated_blocks


def linears(count, width=4):
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class Model(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(embed=nn.Linear(4, 4), layers=linears(2)), ["layers.0", "layers.1"]),
        (Model(decoder=linears(2), encoder=linears(3)), [*(f"decoder.{i}" for i in range(2)), "encoder.0", "encoder.1",
                                                         "encoder.2"]),
        (Model(scales=linears(2, width=1), layers=linears(2, width=8)), ["layers.0", "layers.1"]),
        (Model(scales=linears(2, width=1), layers=linears(3, width=8)), [f"layers.{i}" for i in range(3)]),
        (Model(layers=nn.ModuleList(Model(experts=linears(4)) for _ in range(2))), ["layers.0", "layers.1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
        (Model(stem=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), layers=linears(2)), ["layers.0", "layers.1"]),
        (Model(only=linears(1)), []),
        (nn.Linear(4, 4), []),
    ],
)  # fmt: skip
def test_blocks(model, expected):
    assert list(blocks_of(model)) == expected


def test_every_second():
    assert blocks_of(Model(layers=linears(5)), every=2) == ("layers.1", "layers.3")
    assert blocks_of(Model(layers=linears(1)), every=2) == ()


def test_blocks_of_a_kind_are_found():
    """By all that differs: here dropout of the last one."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in (0.1, 0.1, 0.2)]
    first = repeated_blocks(Model(layers=nn.ModuleList(layers)))
    assert first == {"layers.0": "layers.0", "layers.1": "layers.0", "layers.2": "layers.2"}
