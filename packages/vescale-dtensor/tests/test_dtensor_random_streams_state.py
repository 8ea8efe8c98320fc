"""`random.Streams` in a checkpoint: the same on every rank, whichever device it has, and on any number of devices."""

import pytest
import torch

from vescale.dtensor import random


@pytest.fixture(autouse=True)
def _leave_no_trace():
    with random.fork(seed=0):
        yield


class Accelerator:
    """Devices with a generator each, of which one is current."""

    def __init__(self, states, current):
        self.states, self.current = [torch.full((16,), state, dtype=torch.uint8) for state in states], current

    def is_initialized(self):
        return True

    def device_count(self):
        return len(self.states)

    def current_device(self):
        return self.current

    def get_rng_state(self, index):
        return self.states[index].clone()

    def set_rng_state(self, state, index):
        self.states[index] = state.clone()

    def numbers(self):
        return [int(state[0]) for state in self.states]


@pytest.fixture
def use(monkeypatch):
    """`use(states, current)`: from here on the process has such devices."""

    def install(states, current):
        fake = Accelerator(states, current)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch, "get_device_module", lambda _kind: fake)
        return fake

    return install


@pytest.mark.parametrize("name", ["torch", "philox"])
def test_a_stream_goes_on_where_it_was_saved(name):
    streams = random.Streams()
    with random.stream(name):
        torch.rand(3)
        state = streams.state_dict()
        expected, following = torch.rand(3), torch.rand(3)
        assert not torch.equal(expected, following)
        random.manual_seed(99)
        random.Streams().load_state_dict(state)
        assert torch.equal(torch.rand(3), expected)
        assert torch.equal(torch.rand(3), following)


def test_ranks_with_other_devices_have_the_same_state(use):
    """Each draws from its own device, and leaves those of the others as they were."""
    use([7, 0], 0)
    first = random.Streams().state_dict()
    use([0, 7], 1)
    second = random.Streams().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(torch.as_tensor(first[key]), torch.as_tensor(second[key])) for key in first)
    whole = random.get_state()["torch.cuda"]
    assert not torch.equal(whole, whole.flip(0))  # which `get_state` alone does not give


def test_another_number_of_devices(use):
    use([1, 7, 3], 1)
    state = random.Streams().state_dict()
    fake = use([4, 5], 0)
    random.Streams().load_state_dict(state)
    assert fake.numbers() == [7, 5]


WRONG = {
    "expected a random state of version 1, got version 2": {"version": 2},
    "expected a state saved by random.get_state\\(\\), got unknown entries extra": {"extra": 1},
    r"expected generators of devices in use here \(cuda\), got torch.xpu; continue on the kind": {"torch.xpu": 1},
    r"expected torch.cuda to be a torch.uint8 tensor of shape \(16,\), got torch.uint8 of shape \(2, 16\)": {
        "torch.cuda": torch.zeros(2, 16, dtype=torch.uint8)
    },
    r"expected torch.cuda to be a torch.uint8 tensor of shape \(16,\), got 3": {"torch.cuda": 3},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_states_change_nothing(text, use):
    fake = use([1, 2], 0)
    state = random.Streams().state_dict() | WRONG[text]
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        random.Streams().load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert fake.numbers() == [1, 2]


def test_devices_that_are_not_here():
    state = random.Streams().state_dict() | {"torch.xpu": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"expected generators of devices in use here .* got torch.xpu; continue on"):
        random.Streams().load_state_dict(state)
