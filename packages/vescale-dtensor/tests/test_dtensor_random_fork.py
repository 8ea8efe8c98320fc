"""`random.fork` leaves all generators as they were, whatever happens inside, in both streams."""

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import Shard, init_device_mesh, random
from vescale_testing import ranks

STREAMS = pytest.mark.parametrize("name", ["torch", "philox"])


def draws():
    return torch.cat([torch.rand(3), torch.randn(3), F.dropout(torch.ones(20), 0.5)])


def evaluate_with_errors():
    draws()
    torch.manual_seed(4)
    torch.randn(3)
    raise ZeroDivisionError


INSIDE = {
    "draws": draws,
    "seeds": lambda: (torch.manual_seed(3), random.manual_seed(4), draws()),
    "states": lambda: (random.set_state(random.get_state() | {"philox.counter": 99}), draws()),
    "streams": lambda: _in_streams(),
    "exceptions": evaluate_with_errors,
    "forks": lambda: _in_forks(),
}


def _in_streams():
    for name in ("torch", "philox"):
        for seed in (None, 1):
            with random.stream(name, seed=seed):
                draws()


def _in_forks():
    with random.fork():
        draws()
    draws()


@STREAMS
@pytest.mark.parametrize("inside", INSIDE)
def test_nothing_inside_is_seen_outside(name, inside):
    with random.fork(seed=0):
        with random.stream(name):
            expected = draws(), draws()
        expected_torch = draws()
    with random.fork(seed=0):
        with random.stream(name):
            assert torch.equal(draws(), expected[0])
            try:
                with random.fork():
                    INSIDE[inside]()
            except ZeroDivisionError:
                assert inside == "exceptions"
            assert torch.equal(draws(), expected[1])
        assert torch.equal(draws(), expected_torch)


@STREAMS
def test_without_it_the_stream_moves(name):
    with random.stream(name, seed=0):
        draws()
        expected = draws()
    with random.stream(name, seed=0):
        draws()
        draws()  # evaluation
        assert not torch.equal(draws(), expected)


@STREAMS
def test_a_seed_for_the_inside(name):
    with random.stream(name, seed=3):
        expected = draws()
    with random.fork(seed=0), random.stream(name):
        draws()
        with random.fork(seed=3):
            assert torch.equal(draws(), expected)
        with random.fork():  # goes on from here
            here = draws()
        assert torch.equal(draws(), here)


def test_a_wrong_seed_changes_nothing():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="expected an integer of 64 bits for seed"), random.fork(seed=2**64):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@ranks(2)
def test_evaluation_between_steps_of_sharded_training(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(torch.ones(8, 6), mesh, (Shard(1),))
    for name in ("torch", "philox"):
        for fork in (True, False):
            with random.stream(name, seed=0):
                steps = [F.dropout(x, 0.5).full_tensor() for _ in range(2)]
            with random.stream(name, seed=0):
                assert torch.equal(F.dropout(x, 0.5).full_tensor(), steps[0])
                if fork:
                    with random.fork():
                        F.dropout(x, 0.5)
                else:
                    F.dropout(x, 0.5)
                assert torch.equal(F.dropout(x, 0.5).full_tensor(), steps[1]) == fork


def test_a_stream_for_the_whole_program():
    with random.stream("philox", seed=0):
        expected = draws(), draws()
    try:
        random.set_stream("philox", seed=0)
        assert random.current_stream() == "philox"
        assert torch.equal(draws(), expected[0])
        with random.stream("torch"):
            draws()
            with pytest.raises(RuntimeError, match="set_stream is for the whole program"):
                random.set_stream("torch")
        with random.fork(), pytest.raises(RuntimeError, match="set_stream is for the whole program"):
            random.set_stream("torch")
        assert torch.equal(draws(), expected[1])
        random.set_stream("torch", seed=3)
        assert random.current_stream() == "torch"
        actual = draws()
        torch.manual_seed(3)
        assert torch.equal(actual, draws())
    finally:
        random.set_stream("torch")
