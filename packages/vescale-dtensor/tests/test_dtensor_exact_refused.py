"""What has no exact form is refused inside of `exact`, by name and on every rank alike."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dtensor import (
    Partial,
    Replicate,
    Shard,
    UnsupportedOperator,
    debug,
    distribute_tensor,
    exact,
    init_device_mesh,
    random,
    set_exact,
)
from vescale.dtensor.extension import exact_num_blocks, one_addend
from vescale_testing import ranks


@ranks(2)
def test_sums_that_the_backend_adds():
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with exact(), pytest.raises(UnsupportedOperator, match=r"aten\.mul.*no values are sums over ranks"):
        partial * 2
    with exact(), pytest.raises(UnsupportedOperator, match=r"all_reduce.*got a sum over ranks"):
        partial.redistribute(placements=[Replicate()])
    with exact():
        counts = DTensor.from_local(torch.ones(4, dtype=torch.int64), mesh, [Partial()])
        assert counts.full_tensor().tolist() == [2, 2, 2, 2]  # integers do not round


@ranks(2)
def test_collectives_of_the_program():
    x = torch.ones(4)
    with exact():
        for call in (lambda: dist.all_reduce(x.clone()), lambda: dist.reduce(x.clone(), 0)):
            with pytest.raises(UnsupportedOperator, match="a sum over ranks"):
                call()
        gathered = [torch.empty(4) for _ in range(2)]
        dist.all_gather(gathered, x)  # moves values
        assert torch.equal(gathered[1], x)


@ranks(2)
def test_data_parallelism_of_torch():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with exact(), pytest.raises(UnsupportedOperator, match="put data parallelism into the mesh"):
        model(torch.ones(2, 4)).sum().backward()


@ranks(3)
def test_axes_that_do_not_divide_the_blocks():
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    with exact(num_blocks=8), pytest.raises(UnsupportedOperator, match=r"divides 8.*mesh of shape \(3,\)"):
        x.sum()
    with exact(num_blocks=6):
        assert x.sum().full_tensor() == 6


@ranks(2)
def test_modes_that_would_hide_operators():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    with exact(), debug.comm_log(), pytest.raises(UnsupportedOperator, match="open it before exact"):
        x.sum()
    with debug.comm_log() as log, exact():
        assert x.sum().full_tensor() == 6
    assert len(log) == 1
    with exact(), random.stream("philox", seed=0):  # it passes other operators on
        assert x.sum().full_tensor() == 6


def test_fused_optimizers():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    with exact(), pytest.raises(UnsupportedOperator, match="fused=False"):
        torch.optim.AdamW([parameter], fused=True).step()


def test_contexts_in_each_other():
    with exact(num_blocks=4):
        with exact(num_blocks=4):
            assert exact_num_blocks() == 4
        with pytest.raises(ValueError, match="expected exact\\(num_blocks=4\\)"), exact(num_blocks=8):
            pass
        assert exact_num_blocks() == 4
    assert exact_num_blocks() is None


def test_the_number_of_threads_comes_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with exact():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_number_of_blocks_that_is_none():
    for wrong in (0, -1, 2.5, "8", None):
        with pytest.raises((ValueError, TypeError), match="num_blocks"):
            exact(num_blocks=wrong)


@ranks(2)
def test_sums_of_one_addend_keep_their_bits():
    x = torch.tensor([1.5, -0.0, float("inf"), 1e-45])
    for others, is_same in ((-0.0, True), (0.0, False)):
        mine = x.clone() if dist.get_rank() == 1 else torch.full_like(x, others)
        with exact(), one_addend():
            dist.all_reduce(mine)
        assert torch.equal(mine.view(torch.int32), x.view(torch.int32)) == is_same


def test_the_mode_of_the_process():
    set_exact(4)
    try:
        assert exact_num_blocks() == 4
        set_exact(4)
        with exact(num_blocks=4):
            assert exact_num_blocks() == 4
        with pytest.raises(ValueError, match=r"expected exact\(num_blocks=4\).*got num_blocks=8"):
            set_exact(8)
    finally:
        set_exact(None)
    assert exact_num_blocks() is None
    set_exact(None)  # nothing to leave
