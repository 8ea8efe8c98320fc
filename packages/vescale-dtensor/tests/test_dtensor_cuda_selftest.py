"""The replay of CUDA draws asks the device first, and leaves to the native operator what it cannot do."""

import importlib.util
import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vescale.dtensor._random.cuda_replay import replay_bernoulli, replay_fill, replay_native_dropout
from vescale.dtensor._random.cuda_replay import selftest as _selftest
from vescale_testing import ranks

spec = importlib.util.spec_from_file_location("simulated_cuda", Path(__file__).with_name("simulated_cuda.py"))
simulated_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated_cuda)
Simulated = simulated_cuda.Simulated

aten = torch.ops.aten
CPU = torch.device("cpu")
BOX = ((20,), (40,))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    _selftest.forget()
    monkeypatch.setattr(_selftest, "NUM_TRIAL_PROBABILITIES", 77)


def fill(backend, numel=90, dtype=torch.float32, op=aten.uniform_.default, args=(), local=None):
    local = torch.empty(40, dtype=dtype) if local is None else local
    options = {"shape": (numel,), "dtype": dtype, "device": CPU, "args": args}
    return replay_fill(op, [(BOX, local)], backend=backend, **options)


def dropout(backend, numel=96, dtype=torch.bfloat16):
    local = torch.ones(40, dtype=dtype)
    out, mask = torch.empty_like(local), torch.empty_like(local, dtype=torch.bool)
    return replay_native_dropout(local, out, mask, lambda t: [(BOX, t)], shape=(numel,), p=0.5, backend=backend)


def bernoulli(backend, numel=90):
    p = torch.full((40,), 0.5)
    return replay_bernoulli(p, p.clone(), lambda t: [(BOX, t)], shape=(numel,), backend=backend, least=1)


class OtherGeometry(Simulated):
    """Launches half of the threads that its properties promise."""

    def threads(self, numel):
        return max(super().threads(numel) // 2, 1)


class OtherAdvance(Simulated):
    """Reserves a block more than expected."""

    def _fill(self, op, tensor, args, values, generator):
        super()._fill(op, tensor, args, values, generator)
        generator.take(4)

    def dropout(self, tensor, p):
        drawn = super().dropout(tensor, p)
        self.default.take(4)
        return drawn

    def bernoulli(self, out, p, generator):
        super().bernoulli(out, p, generator)
        generator.take(4)


class OtherSplit(Simulated):
    """Halves large tensors without a reservation of its own for the whole."""

    def _fill(self, op, tensor, args, values, generator):
        before = generator.get_offset()
        super()._fill(op, tensor, args, values, generator)
        if not self._fits(tensor):
            half = tensor.numel() // 2
            generator.set_offset(before)
            super()._fill(op, tensor[:half], args, values, generator)
            super()._fill(op, tensor[half:], args, values, generator)


class OtherWords(Simulated):
    """Has another generator."""

    def bernoulli(self, out, p, generator):
        super().bernoulli(out, p, simulated_cuda.Generator(generator.seed + 1, generator.get_offset()))
        generator.take(10)


class Broken(Simulated):
    """Lacks something that the replay needs."""

    def fill(self, *_):
        raise AttributeError("no such operator")


@pytest.mark.parametrize(
    "draw, backend",
    [
        (fill, OtherGeometry),
        (fill, OtherAdvance),
        (fill, Broken),
        (dropout, OtherGeometry),
        (dropout, OtherAdvance),
        (bernoulli, OtherAdvance),
        (bernoulli, OtherWords),
    ],
)
def test_a_device_that_draws_otherwise_is_refused_with_one_warning(draw, backend, caplog):
    backend = backend()
    with caplog.at_level(logging.WARNING, logger="vescale.dtensor"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not draw(backend)
        assert not draw(backend)
    assert backend.default.get_offset() == 8
    assert len(caught) == len(caplog.records) == 1
    name = {fill: "aten.uniform_.default", dropout: "aten.native_dropout.default", bernoulli: "aten.bernoulli_.Tensor"}
    message = str(caught[0].message)
    assert message.startswith(f"{name[draw]} on simulated cpu with torch {torch.__version__} does not draw as expected")
    assert message.endswith(
        "Its results stay those of one device, but every rank draws the full tensor and keeps its shard, which takes "
        "more memory and time."
    )
    assert caplog.records[0].getMessage() == message


def test_the_warning_says_what_went_wrong():
    with pytest.warns(RuntimeWarning, match=r"\(AttributeError: no such operator\)"):
        assert not fill(Broken())


def test_a_device_that_splits_otherwise_is_found_out_by_the_first_large_draw():
    backend = OtherSplit(index_limit=799)  # 200 elements
    assert fill(backend, numel=200)
    with pytest.warns(RuntimeWarning, match="does not draw as expected"):
        assert not fill(backend, numel=201)
    assert fill(backend, numel=200)
    _selftest.forget()
    assert fill(Simulated(index_limit=799), numel=201)


@pytest.mark.parametrize("draw", [fill, dropout, bernoulli])
def test_a_device_that_draws_as_assumed_is_asked_once(draw):
    backend = Simulated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(backend)
        backend.launches.clear()
        _selftest.NUM_TRIAL_PROBABILITIES = 0  # asking again would fail
        assert draw(backend)
    assert sum(backend.launches) <= 96


def test_each_dtype_and_range_is_asked_for_itself():
    backend = Simulated()
    asked = []
    for dtype, stop in ((torch.int32, 9), (torch.int64, 9), (torch.int64, 2**27), (torch.int64, 2**28)):
        backend.launches.clear()
        assert fill(backend, dtype=dtype, op=aten.random_.to, args=(stop,))
        asked.append(len(backend.launches) > 2)
    assert asked == [True, True, False, True]


@pytest.mark.parametrize("widest, expected", [(8, (8, 8)), (4, (8, 8)), (2, (2, 2))])
def test_the_widest_read_of_dropout_is_found_out(widest, expected):
    """A round of reads of 8 is two rounds of reads of 4, word for word, so the windows of the first serve both."""
    backend = Simulated(widest=widest)
    found = _selftest.dropout_vector(backend, aten.native_dropout.default, 16, torch.bfloat16, CPU)
    assert found == expected
    assert backend.default.get_offset() == 8


def test_an_operator_that_changes_its_advance_is_caught_by_the_draw():
    backend = Simulated()
    assert fill(backend)
    backend.default.set_offset(8)
    changed = OtherAdvance()
    with pytest.warns(RuntimeWarning, match="12 elements moved the generator by 8, not 4"):
        assert not fill(changed)
    assert changed.default.get_offset() == 8


def test_wrong_arguments_raise_as_they_do_natively():
    backend = Simulated()

    def refuse(*_):
        raise RuntimeError("normal expects std >= 0.0")

    assert fill(backend)
    backend.default.set_offset(8)
    backend.fill = refuse
    with pytest.raises(RuntimeError, match="std >= 0"):
        fill(backend)
    assert backend.default.get_offset() == 8
    with pytest.raises(RuntimeError, match="std >= 0"):
        fill(backend, local=torch.empty(0))  # a rank without elements raises, too


def test_out_of_memory_is_no_answer():
    backend = Simulated()
    native, failing = backend.fill, [True]

    def sometimes(*args):
        if failing:
            failing.pop()
            raise torch.OutOfMemoryError("no memory")
        return native(*args)

    backend.fill = sometimes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fill(backend)
        assert fill(backend)


@ranks(1)  # fake tensors add a device to a process whose torch knows CUDA; autograd could not be forked after that
def test_what_is_left_to_the_native_operator():
    backend = Simulated()
    assert not fill(backend, numel=12)  # one launch draws it all
    assert not fill(backend, dtype=torch.complex64, op=aten.normal_.default)
    assert not fill(backend, dtype=torch.float32, op=aten.random_.to, args=(2**28,))  # bounds are rounded first
    assert not fill(backend, op=aten.random_.to, args=())
    assert not dropout(Simulated(index_limit=95))  # not asked for so many elements
    with FakeTensorMode():
        assert not fill(backend)
        assert not dropout(backend)
    assert backend.launches == []
    assert fill(backend)


def test_a_generator_of_another_device_is_left_to_the_native_operator():
    """Which raises; nothing is asked, so that nothing is held against the device."""
    backend, local = Simulated(), torch.empty(40)
    options = {"shape": (90,), "dtype": local.dtype, "device": CPU, "backend": backend}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not replay_fill(aten.uniform_.default, [(BOX, local)], generator=torch.Generator(), **options)
        assert backend.launches == []
        assert replay_fill(aten.uniform_.default, [(BOX, local)], **options)


def test_nothing_is_asked_during_the_capture_of_a_graph():
    backend = Simulated()
    backend.capturing = True
    backend.default = None  # must not be read or set
    assert not fill(backend)
    assert not dropout(backend)
    assert not bernoulli(backend)
