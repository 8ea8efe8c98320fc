"""Saved random states resume both streams where they were; seeds, nested streams, and states that are not ours."""

import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import Shard, disabled, init_device_mesh, random
from vescale_testing import ranks


@pytest.fixture(autouse=True)
def _leave_no_trace():
    with random.fork(seed=0):
        yield


def draws():
    return torch.cat([torch.rand(3), torch.randn(3), F.dropout(torch.ones(20), 0.5)])


@pytest.mark.parametrize("name", ["torch", "philox"])
def test_resume_in_the_middle(name):
    with random.stream(name):
        draws()
        torch.randn(3)  # leaves half of a pair in the stock generator
        state = random.get_state()
        expected, following = draws(), draws()
        assert not torch.equal(expected, following)
        random.set_state(state)
        assert torch.equal(draws(), expected)
        assert torch.equal(draws(), following)


def test_both_streams_are_saved_whichever_is_in_force():
    with random.stream("philox"):
        draws()
    outside = random.get_state()
    with random.stream("philox"):
        inside = random.get_state()
        expected = draws()
    expected_torch = draws()
    assert inside.keys() == outside.keys()
    assert all(torch.equal(torch.as_tensor(inside[k]), torch.as_tensor(outside[k])) for k in inside)
    for state in (inside, outside):
        random.manual_seed(99)
        random.set_state(state)
        assert torch.equal(draws(), expected_torch)
        with random.stream("philox"):
            assert torch.equal(draws(), expected)
        random.manual_seed(99)
        with random.stream("philox"):
            random.set_state(state)
            assert torch.equal(draws(), expected)
        assert torch.equal(draws(), expected_torch)


def test_a_state_is_a_flat_dict_of_tensors_and_integers():
    state = random.get_state()
    assert set(map(type, state.values())) <= {int, torch.Tensor}
    assert state["version"] == 1
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for again in (torch.load(buffer, weights_only=True), pickle.loads(pickle.dumps(state))):
        expected = draws()
        random.set_state(again)
        assert torch.equal(draws(), expected)
        random.set_state(state)


class Accelerator:
    """Two devices with a generator each, as far as saving and restoring goes."""

    def __init__(self):
        self.states = [torch.full((16,), float(i), dtype=torch.uint8) for i in range(2)]

    def is_initialized(self):
        return True

    def device_count(self):
        return len(self.states)

    def get_rng_state(self, index):
        return self.states[index].clone()

    def set_rng_state(self, state, index):
        self.states[index] = state.clone()


def test_generators_of_accelerators(monkeypatch):
    fake = Accelerator()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _kind: fake)
    before = torch.stack(fake.states)
    state = random.get_state()
    assert torch.equal(state["torch.cuda"], before)
    for around in (random.fork, lambda: random.stream("torch", seed=1), lambda: random.stream("philox", seed=1)):
        with around():
            fake.set_rng_state(torch.full((16,), 9, dtype=torch.uint8), 1)
        assert torch.equal(torch.stack(fake.states), before)
    fake.set_rng_state(torch.full((16,), 9, dtype=torch.uint8), 1)
    random.set_state(state)
    assert torch.equal(torch.stack(fake.states), before)
    fake.states.pop()
    with pytest.raises(ValueError, match="a random state of 1 cuda devices, as this process sees, got one of 2"):
        random.set_state(state)


@ranks(2)
def test_inside_contexts():
    """What a state does not hold, the program's contexts, stays in force."""
    dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.ones(6)
    with random.stream("philox", seed=4):
        state = random.get_state()
        whole = F.dropout(torch.ones(12), 0.5)
    with random.stream("philox", seed=5), random.local_batch(dp):
        random.set_state(state)
        assert torch.equal(F.dropout(x, 0.5), whole.chunk(2)[dp.get_local_rank()])
        random.manual_seed(4)
        assert torch.equal(F.dropout(x, 0.5), whole.chunk(2)[dp.get_local_rank()])
        kept = torch.get_rng_state()
        following = F.dropout(x, 0.5)
        torch.set_rng_state(kept)
        assert torch.equal(F.dropout(x, 0.5), following)


WRONG = {
    "expected a random state of version 1, got version 2": {"version": 2},
    "got one without philox.counter, torch.cpu": {"philox.counter": None, "torch.cpu": None},
    "expected philox.seed to be of type int, got str": {"philox.seed": "1"},
    "got unknown entries extra": {"extra": 1},
    r"expected torch.cpu to be a torch.uint8 tensor of shape \(5056,\), got torch.uint8 of shape \(3,\)": {
        "torch.cpu": torch.zeros(3, dtype=torch.uint8)
    },
    "got unknown entries philox.modules": {"philox.modules": torch.zeros(1, 2)},
    "expected 0 <= seed .* got -1 and": {"philox.seed": -1},
    "cuda devices, as this process sees, got one of 2": {"torch.cuda": torch.zeros(2, 16, dtype=torch.uint8)},
    r"expected torch.cuda to be a uint8 tensor of shape \(devices, bytes\)": {"torch.cuda": 3},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_states_change_nothing(text):
    if "cuda devices" in text and torch.cuda.device_count() == 2:
        pytest.skip("two devices are right here")
    state = random.get_state() | WRONG[text]
    state = {key: value for key, value in state.items() if value is not None}
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        random.set_state(state)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError, match=r"set_state: expected dict for state, got \["):
        random.set_state([])


# ------------------------------------------------------------------------------------------------- seeds and nesting


def test_seeds():
    random.manual_seed(7)
    torch_draw = draws()
    with random.stream("philox"):
        philox_draw = draws()
    torch.manual_seed(7)
    assert torch.equal(draws(), torch_draw)
    with random.stream("philox", seed=7):
        assert torch.equal(draws(), philox_draw)
        torch.manual_seed(7)  # inside it seeds the stream in force
        assert torch.equal(draws(), philox_draw)
        random.manual_seed(7)
        assert torch.equal(draws(), philox_draw)
    random.manual_seed(8)
    assert not torch.equal(draws(), torch_draw)
    with random.stream("philox"):
        assert not torch.equal(draws(), philox_draw)
        random.manual_seed(7)
        assert torch.equal(draws(), philox_draw)
    assert torch.equal(draws(), torch_draw)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -1, -(2**63)])
def test_seeds_of_64_bits(seed):
    with random.stream("philox", seed=seed):
        first = draws()
    with random.stream("philox", seed=seed % 2**64):
        assert torch.equal(draws(), first)
    for wrong in (2**64, -(2**63) - 1):
        with (
            pytest.raises(ValueError, match="an integer of 64 bits for seed"),
            random.stream("philox", seed=wrong),
        ):
            pass
        with pytest.raises(ValueError, match="an integer of 64 bits for seed"):
            random.manual_seed(wrong)


def test_a_stream_without_a_seed_goes_on_where_it_was_left():
    with random.stream("philox", seed=0):
        expected = draws(), draws()
    random.manual_seed(0)
    before = torch.get_rng_state()
    for values in expected:
        with random.stream("philox"):
            assert torch.equal(draws(), values)
        with random.stream("philox", seed=3):  # leaves no trace
            draws()
    assert torch.equal(torch.get_rng_state(), before)


def draw_and_fail():
    draws()
    raise ZeroDivisionError


def test_nested_streams():
    random.manual_seed(0)
    stock = draws()
    with random.stream("philox", seed=0):
        first, second, third = draws(), draws(), draws()
    random.manual_seed(0)
    with random.stream("philox"):
        assert torch.equal(draws(), first)
        with random.stream("philox"):
            assert torch.equal(draws(), second)
        with random.stream("torch"):
            assert torch.equal(draws(), stock)
            with random.stream("philox", seed=0):
                assert torch.equal(draws(), first)
        with pytest.raises(ZeroDivisionError), random.stream("philox", seed=1):
            draw_and_fail()
        with random.stream("torch", seed=0):
            assert torch.equal(draws(), stock)
        assert torch.equal(draws(), third)
    with pytest.raises(ValueError, match="got 'mrg'"):
        with random.stream("mrg"):
            pass


def test_what_does_not_follow_the_stream_gets_proper_numbers():
    """Elements drawn in spite of it come from a seeded generator, and the stream then never repeats itself."""
    with random.stream("philox", seed=0):
        first = draws()
        with disabled():
            stock = torch.rand(1000)
        after = draws()
    assert 0.4 < stock.mean() < 0.6
    assert len(stock.unique()) > 980
    assert not torch.equal(after, first)
    with random.stream("philox", seed=0):
        draws()
        assert not torch.equal(after, draws())


@ranks(2)
def test_shards_inside_disabled_are_stock(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(torch.zeros(8), mesh, (Shard(0),))
    with disabled(), random.stream("philox", seed=0):
        first, second = x.uniform_().full_tensor().chunk(2)
    assert torch.equal(first, second)
    with random.stream("philox", seed=0):
        first, second = x.uniform_().full_tensor().chunk(2)
    assert not torch.equal(first, second)


def test_states_of_torch_inside_the_stream():
    """`torch.get_rng_state` holds the position."""
    with random.stream("philox", seed=0):
        draws()
        state = torch.get_rng_state()
        expected = draws()
        torch.set_rng_state(state)
        assert torch.equal(draws(), expected)
        with torch.random.fork_rng():
            draws()
        assert not torch.equal(draws(), expected)


OTHER_PROCESS = """
import sys
import torch
from vescale.dtensor import random
with random.stream("philox", seed=0):
    torch.rand(1)
    outside = torch.get_rng_state()
    with random.micro_batches(2) as micro_batch, micro_batch(0):
        inside = torch.get_rng_state()
        torch.rand(1)
torch.save((outside, inside), sys.argv[1])
"""


def test_states_of_torch_from_another_process(tmp_path):
    """Batch windows are kept by the process; a state that needs none is read everywhere."""
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, tmp_path / "states"], check=True, timeout=100)
    outside, inside = torch.load(tmp_path / "states")
    with random.stream("philox", seed=0):
        torch.rand(1)
        expected = draws()
        torch.set_rng_state(outside)
        assert torch.equal(draws(), expected)
        state = torch.get_rng_state()
        torch.set_rng_state(inside)
        with pytest.raises(ValueError, match=r"saved in another process by torch\.get_rng_state"):
            draws()
        torch.set_rng_state(state)
