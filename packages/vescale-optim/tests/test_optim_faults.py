"""The comparison with one process can fail: it sees a fault injected into any part of the machinery."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._flat import FlatBucket, Reduction
from vescale_testing import assert_same_training, run_ranks

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def train(problem, zero, inject):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = problem.model()
    inject(pytest.MonkeyPatch(), module)  # this process ends with the test: nothing to undo
    model = DDP(module, mesh["dp"], zero=zero, bucket_bytes=300)
    optimizer = DistributedOptimizer(SGD[0], model=model, **SGD[1])
    return problem.train(model, optimizer, coord=dist.get_rank(), size=2)


def check(problem, zero, inject):
    expected = problem.one_process(SGD[0], **SGD[1])
    for record in run_ranks(train, 2, problem, zero, inject):
        assert_same_training(record, expected, rtol=1e-12)


def no_fault(_patch, _module):
    pass


def dropped_bucket(patch, _module):
    reduce = FlatBucket.reduce

    def forget(bucket):
        reduction = reduce(bucket)
        if bucket.plan.index == 1:
            reduction.work.wait()
            reduction.work = None
            reduction.out.zero_()
        return reduction

    patch.setattr(FlatBucket, "reduce", forget)


def doubled_scale(patch, _module):
    finish = Reduction.finish

    def finish_with_the_sum(reduction):
        finish(reduction)
        reduction.out.mul_(2)  # not divided by the number of ranks

    patch.setattr(Reduction, "finish", finish_with_the_sum)


def stale_gather(patch, _module):
    gather = FlatBucket.gather_values
    patch.setattr(FlatBucket, "gather_values", lambda bucket: None if bucket.plan.index == 1 else gather(bucket))


def missing_tie(_patch, module):
    module.tied.weight = nn.Parameter(module.tied.weight.detach().clone())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_nothing_is_seen_where_there_is_nothing(problem, zero):
    check(problem, zero, no_fault)


@pytest.mark.parametrize(
    "zero, fault",
    [
        *((zero, fault) for zero in (0, 1, 2) for fault in (dropped_bucket, doubled_scale, missing_tie)),
        (1, stale_gather),
        (2, stale_gather),
    ],
)
def test_a_fault_is_seen(problem, zero, fault):
    with pytest.raises(AssertionError, match=r"differ|not expected"):
        check(problem, zero, fault)
