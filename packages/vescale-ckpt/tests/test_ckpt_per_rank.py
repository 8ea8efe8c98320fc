"""Every rank has values of its own: it gets them back, and says what becomes of them on another number of ranks."""

import random

import numpy
import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, PerRank, load, read_manifest, save
from vescale_testing import ranks, run_ranks


class Loader:
    """Draws samples from a shard of the data, as a data loader with a state does."""

    def __init__(self, rank):
        self.rank, self.position = rank, 0

    def state_dict(self):
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state):
        self.position, self.rank = state["position"], state["rank"]


def mean_position(values, rank, num_ranks):
    """Return where a rank goes on: all ranks together have seen as many samples."""
    return {"position": sum(value["position"] for value in values) // num_ranks, "rank": rank}


def same(one, other):
    """Compare values and their types, those of elements too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    return one == other


@ranks(3)
def test_each_rank_gets_its_own(tmp_path):
    rank = dist.get_rank()
    loader = Loader(rank)
    loader.position = 100 + rank
    torch.manual_seed(rank)
    random.seed(rank)
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}
    save(tmp_path / "c", {"loader": PerRank(loader), "generators": PerRank(generators), "step": 1})
    expected = torch.rand(4), random.random()
    resumed, drawn = Loader(-1), PerRank(None)
    load(tmp_path / "c", {"loader": PerRank(resumed), "generators": drawn, "step": 0})
    assert (resumed.position, resumed.rank) == (100 + rank, rank)
    assert same(drawn.value, generators)
    torch.set_rng_state(drawn.value["torch"])
    random.setstate(drawn.value["python"])
    assert torch.equal(torch.rand(4), expected[0])
    assert random.random() == expected[1]


@ranks(2)
def test_without_it_values_must_agree(tmp_path):
    """The sibling that breaks it."""
    with pytest.raises(CheckpointError, match="expected equal plain values on all ranks, got 0 on rank 0 and 1"):
        save(tmp_path / "c", {"position": dist.get_rank()})


def saved_by(num_ranks, path):
    def body():
        loader = Loader(dist.get_rank())
        loader.position = 10 * (1 + dist.get_rank())
        save(path, {"loader": PerRank(loader)})

    run_ranks(body, num_ranks)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_another_number_of_ranks(tmp_path, before, after):
    saved_by(before, tmp_path / "c")

    def refused():
        loader = Loader(-1)
        expected = f"'loader': expected the values of {after} ranks, got those of {before} in the checkpoint; say what"
        with pytest.raises(CheckpointError, match=expected):
            load(tmp_path / "c", {"loader": PerRank(loader)})
        assert loader.rank == -1

    def resized():
        loader = Loader(-1)
        load(tmp_path / "c", {"loader": PerRank(loader, resize=mean_position)})
        assert loader.rank == dist.get_rank()
        return loader.position

    run_ranks(refused, after)
    total = sum(10 * (1 + rank) for rank in range(before))
    assert run_ranks(resized, after) == [total // after] * after


VALUES = {
    "None": None,
    "nested": {"a": [1, (2.5, "x", None)], 3: {"b": True}, (1, 2): b"\0\xff"},
    "large": 2**100,
    "not finite": [float("inf"), float("-inf")],
    "keys of the form": {"tuple": [1], "dict": [[1, 2]]},
    "tensors": [torch.arange(6.0).bfloat16().reshape(2, 3), torch.tensor(True), torch.zeros(0, 2), torch.ones(2) * 1j],
    "array": numpy.arange(6, dtype=numpy.uint16).reshape(2, 3),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_value_comes_back_with_its_types(tmp_path, name):
    save(tmp_path / "c", {"x": PerRank(VALUES[name])})
    state = {"x": PerRank("other")}
    load(tmp_path / "c", state)
    assert same(state["x"].value, VALUES[name])
    assert list(read_manifest(tmp_path / "c").tensors) == ["x/rank-0"]


@pytest.mark.parametrize("value", [object(), {"a": lambda: 0}, [{1, 2}], torch.nn.Linear, numpy.array([object()])])
def test_other_values_are_refused(tmp_path, value):
    with pytest.raises(
        CheckpointError, match=r"'x/y': expected a value of plain Python, tensors and arrays in PerRank"
    ):
        save(tmp_path / "c", {"x": {"y": PerRank(value)}})


def test_bad_functions(tmp_path):
    with pytest.raises(TypeError, match=r"PerRank: expected a function for resize, got 3; it takes \(values"):
        PerRank(0, resize=3)
    saved_by(2, tmp_path / "c")
    loader = Loader(-1)
    with pytest.raises(CheckpointError, match=r"'loader': expected PerRank to accept the loaded state, got 'nothing'"):
        load(tmp_path / "c", {"loader": PerRank(loader, resize=lambda values, *_: values[0]["nothing"])})


def test_a_value_that_was_not_saved(tmp_path):
    save(tmp_path / "c", {"step": 1})
    state = {"step": 0, "x": PerRank(5)}
    with pytest.raises(CheckpointError, match=r"requested and not stored \(1\): 'x/rank-0'"):
        load(tmp_path / "c", state)
    load(tmp_path / "c", state, strict=False)
    assert (state["step"], state["x"].value) == (1, 5)


def test_a_plain_tensor_in_its_place(tmp_path):
    save(tmp_path / "c", {"x": {"rank-0": torch.frombuffer(bytearray(b'{"pickle": 1}'), dtype=torch.uint8)}})
    with pytest.raises(CheckpointError, match="'x': expected a value of PerRank, got the kind 'pickle'"):
        load(tmp_path / "c", {"x": PerRank(0)})
