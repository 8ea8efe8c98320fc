"""Every transition of a static program, and the module after an exception in every state."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dmodule._static import program as _program
from vescale.dmodule._static.call import Call, State
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {
    "parameter": {r"layers\.\d\.up\.(weight|bias)": S0, r"layers\.\d\.down\.weight": S1},
    "forward": {r"layers\.\d\.up\.input": [R], r"layers\.\d\.down\.output": [R]},
    "local_attribute": {"width": 4},
}
IDLE, RECORDING, CHECKING, EAGER_ONCE, OPEN = State


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """With a part that is recomputed in backward, and failures on request."""

    def __init__(self):
        super().__init__()
        self.layers, self.width, self.fails = nn.ModuleList([Layer(), Layer()]), 8, None
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x, again=False):
        y = self.layers[0](x)
        assert self.width == (8 if isinstance(self.layers[0].up.weight, DTensor) or not is_parallel(self) else 4)
        if self.fails is not None:
            self.fails(self)
        y = checkpoint(self.layers[1], y, use_reentrant=False)
        self.calls = self.calls + 1
        return self(y) if again else y


def is_parallel(model):
    return "_vescale_execution" in vars(model)


def batch(rows=3):
    return torch.linspace(-1, 1, rows * 6, dtype=torch.float64).view(rows, 6).requires_grad_()


@contextlib.contextmanager
def transitions():
    """The states of all programs that are made inside, in order."""
    seen = []

    class Traced(Call):
        @property
        def state(self):
            return vars(self)["state"]

        @state.setter
        def state(self, new):
            if vars(self).get("state") is not new:
                seen.append(new)
            vars(self)["state"] = new

    _program.Call = Traced
    try:
        yield seen
    finally:
        _program.Call = Call


def parallel():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Model(), mesh, PLAN, mode="static")


def plain():
    torch.manual_seed(0)
    return Model()


def snapshot(model):
    """Everything that a program may change in a module; the values are compared by identity."""
    tables = [vars(part) for part in model.modules()]
    tables += [table for part in model.modules() for table in vars(part).values() if isinstance(table, dict)]
    return [[(key, id(value)) for key, value in table.items() if key not in ("fails", "calls")] for table in tables]


def assert_trains(model):
    reference = plain()
    expected, actual = reference(batch()), model(batch())
    torch.testing.assert_close(actual, expected)
    model.zero_grad()
    expected.sum().backward()
    actual.sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
    model.zero_grad(set_to_none=True)


@ranks(2)
def test_transitions():
    with transitions() as seen:
        model = parallel()
        seen.clear()

        y = model(batch())
        dry_runs = [RECORDING, IDLE, CHECKING, OPEN, CHECKING, OPEN, CHECKING, IDLE]  # forward, recomputation
        assert seen == [*dry_runs, OPEN, IDLE], seen
        seen.clear()
        y.sum().backward()
        assert seen == [OPEN, IDLE], seen  # the recomputed layer
        seen.clear()
        model(batch())
        assert seen == [OPEN, IDLE], seen
        seen.clear()
        with torch.no_grad():
            model(batch())
            assert seen == [EAGER_ONCE, IDLE], seen
            seen.clear()
            model(batch())  # no backward, so nothing is recomputed
            assert seen == [RECORDING, IDLE, CHECKING, OPEN, CHECKING, IDLE, OPEN, IDLE], seen
            seen.clear()
            model(batch())
            assert seen == [OPEN, IDLE], seen


@ranks(2)
def test_a_module_that_calls_itself():
    model, reference = parallel(), plain()
    for _ in range(2):
        torch.testing.assert_close(model(batch(), again=True), reference(batch(), again=True))
    with torch.no_grad():  # in eager mode, recorded, known
        for _ in range(3):
            torch.testing.assert_close(model(batch(), again=True), reference(batch(), again=True))
    assert model.calls == reference.calls


def on_dtensors(model):
    if isinstance(model.layers[0].up.weight, DTensor):
        raise ZeroDivisionError


def on_local_tensors(model):
    if not isinstance(model.layers[0].up.weight, DTensor):
        raise ZeroDivisionError


def always(_model):
    raise ZeroDivisionError


def interrupted(_model):
    raise KeyboardInterrupt


# state -> what fails, the error, whether the shape is known, whether gradients are recorded
FAILURES = {
    RECORDING: (on_dtensors, ZeroDivisionError, False, True),
    CHECKING: (on_local_tensors, NotLocalFriendlyError, False, True),
    EAGER_ONCE: (always, ZeroDivisionError, False, False),
    OPEN: (always, ZeroDivisionError, True, True),
}


@ranks(2)
def test_an_exception_in_every_state_leaves_the_module_as_it_was():
    for state, (failure, error, is_known, has_grad) in FAILURES.items():
        model = parallel()
        if is_known:
            assert_trains(model)
        before, calls = snapshot(model), model.calls
        model.fails = failure
        with pytest.raises(error), torch.set_grad_enabled(has_grad):
            model(batch())
        assert snapshot(model) == before, state
        assert model.calls is calls
        model.fails = None
        assert_trains(model)
        after = snapshot(model)
        assert_trains(model)
        assert snapshot(model) == after, state


@ranks(2)
def test_an_exception_in_a_recomputation_leaves_the_module_as_it_was():
    model = parallel()
    assert_trains(model)
    before = snapshot(model)
    y = model(batch())
    handle = model.layers[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    handle.remove()
    assert snapshot(model) == before
    model.zero_grad(set_to_none=True)
    assert_trains(model)


@ranks(2)
def test_an_exception_while_opening_leaves_the_module_as_it_was(monkeypatch):
    model = parallel()
    assert_trains(model)
    before = snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr(_program.LocalParameters, "opened", lambda _parameters: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch())
    assert snapshot(model) == before
    assert_trains(model)


@ranks(2)
def test_an_interrupted_call_is_put_back_by_the_next_one():
    """Torch runs no hooks after a KeyboardInterrupt."""
    for has_grad in (True, False):
        model = parallel()
        if has_grad:
            assert_trains(model)
        model.fails = interrupted
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(has_grad):
            model(batch())
        model.fails = None
        assert_trains(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
