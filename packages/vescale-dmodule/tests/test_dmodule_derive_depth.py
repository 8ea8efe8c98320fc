"""A module of many layers is derived with a few of each kind, and its plan is that of a derivation with all layers."""

import cProfile
import pstats

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale.dmodule.plans import derive
from vescale.dmodule.plans._derive import derived
from vescale.dmodule.plans._derive.depth import shorten

IDS = {"input_ids": torch.ones(2, 8, dtype=torch.int64)}


@pytest.fixture
def with_all_layers(monkeypatch):
    """``with_all_layers(model, inputs, ...)``: derive without leaving out layers."""

    def whole(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(derived, "shorten", lambda _: None)
            return derive(*args, **options)

    return whole


def assert_same(found, expected):
    assert found.plan == expected.plan
    assert str(found) == str(expected)
    assert found.replicated.keys() == expected.replicated.keys()
    assert found.num_bytes == expected.num_bytes


CASES = [
    ("mixtral", {"degree": 2, "expert_axis": "ep", "batch_axis": "ep"}),
]
OTHERS = [
    ("gpt2", {"degree": 2, "sequence_parallel": True}),  # attributes; the first and the last layer differ
    ("llama", {"degree": 4}),  # repeated heads
    ("gemma2", {"degree": 2}),  # two kinds of layers in turn
    ("qwen2_moe", {"degree": 2}),
]


@pytest.mark.parametrize(
    ("family", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)]
)
def test_the_plan_is_that_of_all_layers(family, options, build, with_all_layers):
    model = build(family, num_hidden_layers=9)
    assert len(shorten(model).like) >= 1
    assert_same(derive(model, IDS, **options), with_all_layers(model, IDS, **options))


class Net(nn.Module):
    """Layers between an embedding and a head; a subclass says how they run."""

    def __init__(self, layers):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(32, 16), nn.ModuleList(layers), nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16 * factor), nn.Linear(16 * factor, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class ByNumber(Net):
    def forward(self, x):
        x = self.embed(x)
        for number in range(9):
            x = self.layers[number](x)
        return self.head(x)


class ToTheMiddle(Net):
    """Returns to values of layers before, as many layers ago."""

    def forward(self, x):
        x, before = self.embed(x), []
        for layer in self.layers:
            before.append(x)
            x = layer(x)
        return self.head(x + before[6])


class Mix(nn.Module):
    """A pair of matrices for each of some values: its sums are whole where they leave it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(32, 16)), nn.Parameter(torch.ones(16, 32))

    def forward(self, found):
        return [F.linear(F.relu(F.linear(x, self.up)), self.down) for x in found]


class OfAll(Net):
    """Hands the values of all layers to a module."""

    def __init__(self, layers):
        super().__init__(layers)
        self.mix = Mix()

    def forward(self, x):
        x, found = self.embed(x), []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return self.head(sum(self.mix(found)))


class Tied(Net):
    def __init__(self, layers):
        super().__init__(layers)
        for layer in self.layers:
            layer.up.weight = self.layers[0].up.weight


@pytest.mark.parametrize(
    ("model", "num_left_out"),
    [
        (Net([Block() for _ in range(9)]), 5),
        (Net([Block(2 + number % 2) for number in range(12)]), 4),  # six of each kind
        (Net([nn.Linear(16, 16) for _ in range(9)]), 5),  # columns and rows in turn: no layer stands for others
        (ByNumber([Block() for _ in range(9)]), 5),
        (ToTheMiddle([Block() for _ in range(9)]), 5),
        (OfAll([Block() for _ in range(9)]), 5),
        (Tied([Block() for _ in range(9)]), 0),
        (Net([Block(number + 1) for number in range(9)]), 0),
    ],
    ids=["alike", "two kinds", "in turn", "by number", "to the middle", "of all", "tied", "all differ"],
)
def test_code_that_counts_its_layers(model, num_left_out, with_all_layers):
    short = shorten(model)
    assert len(short.like if short else ()) == num_left_out
    assert_same(derive(model, degree=2), with_all_layers(model, degree=2))


def calls_of(model):
    profile = cProfile.Profile()
    with profile:
        derive(model, degree=2)
    return pstats.Stats(profile).total_calls


def test_the_work_does_not_grow_with_the_number_of_layers():
    few, many = (Net([Block() for _ in range(number)]) for number in (5, 13))
    calls_of(few)  # imports
    assert calls_of(many) < 1.5 * calls_of(few)


def test_the_module_stays_as_it_is():
    model = Net([Block() for _ in range(9)])
    parameters = dict(model.named_parameters())
    short = shorten(model)
    assert [name for name, _ in short.module.layers.named_children()] == ["0", "1", "2", "8"]
    assert all(parameters[name] is parameter for name, parameter in short.module.named_parameters())
    assert len(model.layers) == 9
    assert dict(model.named_parameters()) == parameters


class OfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(9))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


def test_lists_inside_of_layers_stay_whole():
    assert shorten(Net([OfExperts(), OfExperts()])) is None
    kept = shorten(Net([OfExperts() for _ in range(6)])).module.layers
    assert [len(layer.experts) for layer in kept] == [9] * 4


def test_layers_that_are_placed_unlike_stand_for_none():
    model = Net([nn.Linear(16, 16) for _ in range(9)])
    short = shorten(model)
    search = derived._search(short.module, None, 2, spreads_experts=True, sequence_parallel=False)
    assert not short.stands(search.graph, search.draft)
