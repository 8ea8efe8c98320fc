"""What torch says about shapes is asked once for all ranks and tests; calls that differ are never confused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import register_sharding

from vescale_testing import keep_float64, run_ranks, shapes


@pytest.fixture
def results(monkeypatch):
    """`results(world_size, *calls)`: dtype and shapes of each result by rank, and the operators new in the cache."""

    def body(calls, dtype, placement):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        x = distribute_tensor(torch.ones(6, 4, dtype=dtype), mesh, [placement])
        before = set(shapes.known)
        found = [call(x) for call in calls]
        added = [operator.split(".")[1] for operator, *_ in shapes.known.keys() - before]
        return [(out.dtype, tuple(out.shape), tuple(out.to_local().shape)) for out in found], added

    def run(world_size, *calls, dtype=torch.float32, placement=None):
        return run_ranks(body, world_size, calls, dtype, placement or Shard(0))

    monkeypatch.setattr(shapes, "known", {})
    return run


def test_ranks_of_later_tests_add_nothing(results):
    double = torch.float64
    assert results(2, torch.exp, dtype=double) == 2 * [([(double, (6, 4), (3, 4))], ["exp"])]
    assert results(3, torch.exp, dtype=double) == 3 * [([(double, (6, 4), (2, 4))], [])]
    assert results(2, torch.exp, dtype=double, placement=Replicate()) == 2 * [([(double, (6, 4), (6, 4))], [])]


def test_what_is_known_is_believed(results):
    results(1, torch.exp)
    (key, meta), *others = shapes.known.items()
    assert not others
    shapes.known[key] = meta._replace(shape=torch.Size((5, 4)))
    assert results(1, torch.exp) == [([(torch.float32, (5, 4), (6, 4))], [])]


def test_calls_that_differ_are_not_confused(results):
    calls = [
        lambda x: x * 2,
        lambda x: x * 2.0,
        lambda x: x.to(torch.float64),
        lambda x: x.to(torch.float16),
        lambda x: x.sum(dim=0),
        lambda x: x.sum(dim=1),
        lambda x: x.sum(dim=1, keepdim=True),
    ]
    expected = [call(torch.ones(6, 4, dtype=torch.int64)) for call in calls]
    for _ in range(2):
        (found, added), *_ = results(2, *calls, dtype=torch.int64)
        assert [each[:2] for each in found] == [(whole.dtype, tuple(whole.shape)) for whole in expected]
    assert not added


def test_default_dtype_and_modes_count(results):
    def divide(x):
        return x / 3

    def with_another_default(x):
        torch.set_default_dtype(torch.float64)
        try:
            return x / 3
        finally:
            torch.set_default_dtype(torch.float32)

    def in_a_mode(x):
        with keep_float64():
            return x / 3

    for call, dtype in ((divide, torch.float32), (with_another_default, torch.float64), (in_a_mode, torch.float64)):
        [([(found, *_)], _)] = results(1, call, dtype=torch.int64)
        assert found == dtype, call


def test_operators_of_tests_are_not_cached(results):
    def every(step):
        def call(x):
            library = torch.library.Library("testing_shapes", "DEF")
            library.define("every(Tensor x) -> Tensor")
            library.impl("every", lambda x: x[::step].clone(), "CompositeExplicitAutograd")
            operator = torch.ops.testing_shapes.every.default
            register_sharding(operator)(lambda _x: [([Replicate()], [Replicate()])])
            return operator(x)

        return call

    for step in (2, 3):
        [([(_, shape, _)], added)] = results(1, every(step))
        assert (shape, added) == ((6 // step, 4), [])


def test_it_can_be_switched_off(results, monkeypatch):
    monkeypatch.setenv("VESCALE_TESTING_SHAPES", "0")
    for _ in range(2):
        assert results(1, torch.exp) == [([(torch.float32, (6, 4), (6, 4))], [])]
    assert not shapes.known
