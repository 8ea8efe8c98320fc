"""Collectives of an axis: in place over gloo, of tensors that are elsewhere, and errors that name who is gone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.dtensor.extension import Failures
from vescale.optim import DDP, DistributedOptimizer, _torch
from vescale.optim._ranks.axis import IN_PLACE_BYTES, Axis, Pending
from vescale_testing import assert_same_training, halved, ranks, run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def the_axis():
    return Axis.of(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), role="the mesh")


def values(numel, dtype, *, of):
    return torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(of)).to(dtype)


class Calls:
    """Counts what is called of torch.distributed."""

    def __init__(self, monkeypatch):
        self.broadcast = self.all_gather = 0
        for module, name in ((dist, "broadcast"), (_torch, "all_gather")):
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name, function):
        def counted(*args, **kwargs):
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return counted


@halved
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("more", [-1, 0, 5])
def test_every_size_and_dtype_is_gathered(world_size, more):
    def body():
        axis, patch = the_axis(), pytest.MonkeyPatch()
        for dtype in DTYPES:
            numel = IN_PLACE_BYTES // dtype.itemsize + more
            shards = [values(numel, dtype, of=rank) for rank in range(world_size)]
            for lies_in_its_place in (True, False):
                buffer = torch.zeros(world_size * numel, dtype=dtype)
                own = shards[dist.get_rank()]
                if lies_in_its_place:
                    place = buffer.view(world_size, -1)[dist.get_rank()]
                    own = place.copy_(own)
                with patch.context() as inner:
                    calls = Calls(inner)
                    axis.all_gather(buffer, own).wait()
                assert torch.equal(buffer, torch.cat(shards))
                assert not torch.equal(buffer, torch.cat(shards[::-1]))
                assert (calls.broadcast, calls.all_gather) == ((0, 1) if more < 0 else (world_size, 0))

    run_ranks(body, world_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@ranks(3)
def test_a_sum_is_that_of_torch_and_needs_no_copy(dtype):
    axis, rank = the_axis(), dist.get_rank()
    whole = [torch.randn(3 * 1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(3)]
    expected, shard, buffer = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype), whole[rank].clone()
    _torch.reduce_scatter(expected, whole[rank])
    with torch.profiler.profile(profile_memory=True) as profile:
        axis.reduce_scatter(shard, buffer).wait()
    assert torch.equal(shard, expected)
    assert not torch.equal(shard, whole[rank].view(3, -1)[rank])
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert allocated < buffer.numel() * buffer.element_size()


@ranks(3)
def test_numbers_that_the_host_reads_travel_between_hosts():
    """An axis of accelerators: on this machine a number that went to one would raise."""
    rank, host = dist.get_rank(), the_axis()
    axis = Axis("dp", 3, rank, host.group, "cuda")
    assert axis.gather_number(rank + 5, what="a number") == [5, 6, 7]
    assert axis.on_host.group is host.group  # gloo serves the CPU
    assert host.on_host is host
    used = torch.tensor([rank, -rank])
    axis.on_host.all_reduce(used, dist.ReduceOp.MAX).wait()
    assert used.tolist() == [2, 0]


@ranks(2)
def test_an_axis_without_a_backend_for_the_cpu_gets_another_group():
    axis, patch = Axis("dp", 2, dist.get_rank(), the_axis().group, "cuda"), pytest.MonkeyPatch()
    with patch.context() as inner:
        inner.setattr(dist, "get_backend_config", lambda _group: "cuda:nccl")
        assert axis.on_host.group is not axis.group
    assert axis.gather_number(dist.get_rank(), what="a number") == [0, 1]


def train(problem, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(problem.model(), mesh["dp"], bucket_bytes=300, **settings)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.5)
    return problem.train(model, optimizer, coord=dist.get_rank(), size=dist.get_world_size())


@pytest.mark.parametrize("settings", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "offload": True}], ids=str)
@pytest.mark.usefixtures("gathers_by_broadcasts")
def test_training_with_gathers_by_broadcasts_is_one_process(problem, settings):
    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    for record in run_ranks(train, 3, problem, **settings):
        assert_same_training(record, expected, rtol=1e-12)


@pytest.mark.usefixtures("gathers_by_broadcasts")
def test_a_broadcast_that_is_left_out_is_seen(problem, monkeypatch):
    broadcast = dist.broadcast

    def without_that_of_coord_1(part, *, group_src, **settings):
        return broadcast(part, group_src=0 if group_src == 1 else group_src, **settings)

    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    monkeypatch.setattr(dist, "broadcast", without_that_of_coord_1)
    with pytest.raises(AssertionError):
        assert_same_training(run_ranks(train, 3, problem, zero=1)[2], expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------- tensors that are elsewhere


def train_small(reduction):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double(), mesh["dp"], zero=2, reduction=reduction)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=0.5)
    for step in range(3):
        x = torch.full((2, 3), 1.0 + step + dist.get_rank(), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [value for entries in optimizer.full_state_dict()["state"].values() for value in entries.values()]
    return [*(p.detach().clone() for p in model.parameters()), *full]


def assert_equal(actual, expected):
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@ranks(2)
def test_every_collective_brings_its_result_back(monkeypatch):
    init = Pending.__init__

    def lost(self, work, name, axis, copy_back=None):
        """Leave the sums of gradients where they came."""
        init(self, work, name, axis, None if "bucket" in name else copy_back)

    for reduction in ("backend", "ordered"):
        expected = train_small(reduction)
        with monkeypatch.context() as patch:
            patch.setattr(Axis, "is_elsewhere", lambda _axis, _tensor: True)
            assert_equal(train_small(reduction), expected)
            patch.setattr(Pending, "__init__", lost)
            with pytest.raises(AssertionError):
                assert_equal(train_small(reduction), expected)


def test_a_tensor_is_elsewhere_by_its_device():
    axis = Axis("dp", 2, 0, None, "cpu")
    assert not axis.is_elsewhere(torch.zeros(1))
    assert axis.is_elsewhere(torch.zeros(1, device="meta"))


# ------------------------------------------------------------------------------------------- failures


class _Broken:
    """A store whose host is gone."""

    def __getattr__(self, _name):
        raise dist.DistStoreError("Broken pipe")


@ranks(2)
def test_a_store_that_is_gone_is_said():
    failures = Failures((0, 1), dist.get_rank(), dist.HashStore())
    failures._store = _Broken()
    assert failures.seen()
    message = failures.describe("the all-gather of bucket 1", "Connection closed by peer")
    head = f"the all-gather of bucket 1 failed on rank {dist.get_rank()}; the store cannot be reached either: the proc"
    assert message.startswith(head)
    assert message.endswith("gone\nConnection closed by peer")


@ranks(2)
def test_a_collective_that_fails_where_every_rank_is_there():
    failures = Failures((0, 1), dist.get_rank(), _torch.default_store())
    message = failures.describe("the all-reduce of bucket 0", "Operation timed out" if dist.get_rank() else "")
    assert message == (
        f"the all-reduce of bucket 0 failed on rank {dist.get_rank()}; every rank of the axis is there, so none has "
        "ended\n  rank 0: was waiting in the all-reduce of bucket 0\n"
        "  rank 1: the all-reduce of bucket 0: Operation timed out"
    )
