"""The comparison with one process can fail: it sees a fault injected into any part of the machinery."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import assert_same_training, run_ranks

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
WAYS = [(zero, reduction) for zero in (0, 1, 2, 3) for reduction in ("backend", "ordered")]


def train(problem, zero, reduction, inject, no_sync):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = problem.model()
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, module)
        model = DDP(module, mesh["dp"], zero=zero, bucket_bytes=300, reduction=reduction)
        optimizer = DistributedOptimizer(SGD[0], model=model, **SGD[1])
        try:
            return problem.train(model, optimizer, coord=dist.get_rank(), size=2, no_sync=no_sync)
        except AssertionError as error:  # replicas that differ between the ranks, said by all ranks alike
            return error
        finally:
            model.wait_for_parameters()


def seen(problem, inject, *, ways=WAYS, no_sync=True):
    """Return in which ways of reducing the comparison sees a fault, and what it says."""
    expected = problem.one_process(SGD[0], **SGD[1])
    records = run_ranks(lambda: [train(problem, *way, inject, no_sync) for way in ways], 2)
    found = {}
    for rank_records in records:
        for way, record in zip(ways, rank_records, strict=True):
            try:
                if isinstance(record, AssertionError):
                    raise record
                assert_same_training(record, expected, rtol=1e-12)
            except AssertionError as error:
                found[way] = str(error)
    return found


def no_fault(_patch, _module):
    pass


def missing_tie(_patch, module):
    module.tied.weight = nn.Parameter(module.tied.weight.detach().clone())


def dropped_bucket(store):
    def forget(bucket, mean, **options):
        store(bucket, mean.zero_() if bucket.plan.index == 1 else mean, **options)

    return forget


def dropped_rank(settle):
    def forget(slot):
        settle(slot)
        if dist.get_rank() == 1 and slot.bucket.plan.index == 1:
            slot.local_view.zero_()

    return forget


def doubled_scale(average_):
    return lambda total, size, dtype: average_(total, size, dtype).mul_(2)


def forgotten_reduced_gradient(settle):
    """What an accumulation has reduced is overwritten by the next reduction."""

    def forget(slot):
        settle(slot)
        slot.reduced = False

    return forget


def test_nothing_is_seen_where_there_is_nothing(problem):
    assert seen(problem, no_fault) == {}


@pytest.mark.parametrize(
    "place, make",
    [
        ("a bucket stores its mean", dropped_bucket),
        ("a slot is made ready for a reduction", dropped_rank),
        ("the mean of a sum", doubled_scale),
        (None, missing_tie),
    ],
)
def test_a_fault_is_seen(problem, fault, place, make):
    found = seen(problem, make if place is None else lambda patch, _module: fault(patch, place, make))
    assert set(found) == set(WAYS)
    assert all("differ" in text or "not expected" in text for text in found.values())


def test_a_stale_gather_is_seen(problem, fault):
    def stale_gather(patch, _module):
        def without_bucket_1(gather):
            return lambda bucket: None if bucket.plan.index == 1 else gather(bucket)

        fault(patch, "a bucket gathers parameters", without_bucket_1)
        fault(patch, "a unit is freed", lambda _free: lambda _unit: None)  # ZeRO 3: gathered once, for all steps

    ways = [way for way in WAYS if way[0] > 0]
    found = seen(problem, stale_gather, ways=ways)
    assert set(found) == set(ways)
    assert all("differ" in text for text in found.values())


def test_a_missing_wait_is_seen(problem, late_gathers, fault):
    def late(patch, _module):
        late_gathers(patch)

    def late_and_not_awaited(patch, module):
        late(patch, module)
        fault(patch, "a guard closes", lambda _close: lambda _guard: None)

    ways = [way for way in WAYS if way[0] in (1, 2)]
    assert seen(problem, late, ways=ways) == {}
    found = seen(problem, late_and_not_awaited, ways=ways)
    assert set(found) == set(ways)
    assert all("differ" in text for text in found.values())


def test_a_fault_in_accumulation_is_seen(accumulating_problem, fault):
    def forget(patch, _module):
        fault(patch, "a slot is made ready for a reduction", forgotten_reduced_gradient)

    assert seen(accumulating_problem, no_fault, no_sync=False) == {}
    assert set(seen(accumulating_problem, forget, no_sync=False)) == set(WAYS)
