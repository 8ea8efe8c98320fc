"""Over gloo, sums are taken in place and large shards gathered by broadcasts: the same bits, without more memory."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, _torch
from vescale.optim._ranks import axis as _axis
from vescale.optim._ranks.axis import IN_PLACE_BYTES, Axis
from vescale_testing import assert_same_training, ranks, run_ranks

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


def train(problem, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(problem.model(), mesh["dp"], bucket_bytes=300, **settings)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.5)
    return problem.train(model, optimizer, coord=dist.get_rank(), size=dist.get_world_size())


@pytest.mark.parametrize("settings", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "offload": True}], ids=str)
def test_training_with_gathers_by_broadcasts_is_one_process(problem, monkeypatch, settings):
    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    monkeypatch.setattr(_axis, "IN_PLACE_BYTES", 0)
    for record in run_ranks(train, 3, problem, **settings):
        assert_same_training(record, expected, rtol=1e-12)


def test_a_broadcast_that_is_left_out_is_seen(problem, monkeypatch):
    broadcast = dist.broadcast

    def without_that_of_coord_1(part, *, group_src, **settings):
        return broadcast(part, group_src=0 if group_src == 1 else group_src, **settings)

    expected = problem.one_process(torch.optim.AdamW, clip=0.5, lr=0.01)
    monkeypatch.setattr(_axis, "IN_PLACE_BYTES", 0)
    monkeypatch.setattr(dist, "broadcast", without_that_of_coord_1)
    with pytest.raises(AssertionError):
        assert_same_training(run_ranks(train, 3, problem, zero=1)[2], expected, rtol=1e-12)
