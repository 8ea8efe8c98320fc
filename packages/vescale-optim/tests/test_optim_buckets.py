"""The bucket plan: every element has one place and one owner, whatever the sizes, and the plan prints."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import InterleavedShard, distribute_tensor
from vescale.optim._buckets.granularity import is_even, local_shapes, resolve_blocks
from vescale.optim._buckets.plan import ParamInfo, plan_buckets
from vescale_testing import ranks


def infos(sizes, dtypes=(torch.float32,)):
    return [ParamInfo(f"p{i}", n, dtype) for i, (n, dtype) in enumerate(zip(sizes, itertools.cycle(dtypes)))]


CASES = [
    (sizes, dtypes, num_shards, bucket_bytes, align_bytes)
    for sizes in itertools.chain.from_iterable(itertools.product((0, 1, 3, 8), repeat=n) for n in (1, 2, 3))
    for dtypes in ((torch.float32,), (torch.bfloat16, torch.float64))
    for num_shards in (1, 2, 3, 4)
    for bucket_bytes in (1, 24, 1000)
    for align_bytes in (1, 16)
]


def check_plan(params, plan, num_shards):
    by_fqn = {param.fqn: param for param in params}
    assert sorted(slot.fqn for bucket in plan.buckets for slot in bucket.slots) == sorted(by_fqn)
    for position, bucket in enumerate(plan.buckets):
        assert bucket.index == position
        assert bucket.numel == num_shards * bucket.shard_numel
        end = 0
        for slot in bucket.slots:
            assert (by_fqn[slot.fqn].numel, by_fqn[slot.fqn].dtype) == (slot.numel, bucket.dtype)
            assert slot.start >= end
            end = slot.start + slot.numel
        assert end <= bucket.numel


def owners(bucket):
    """Return, by buffer element, the coords that own it, following the parts of each parameter."""
    owned = [[] for _ in range(bucket.numel)]
    for coord in range(bucket.num_shards):
        first, last = bucket.shard(coord)
        for slot, part in zip(bucket.slots, bucket.parts(coord), strict=True):
            assert part.fqn == slot.fqn
            assert 0 <= part.start <= part.stop <= slot.numel
            for element in range(slot.start + part.start, slot.start + part.stop):
                assert first <= element < last
                owned[element].append(coord)
    return owned


def test_every_element_has_one_place_and_one_owner():
    for sizes, dtypes, num_shards, bucket_bytes, align_bytes in CASES:
        params = infos(sizes, dtypes)
        plan = plan_buckets(params, num_shards=num_shards, bucket_bytes=bucket_bytes, align_bytes=align_bytes)
        check_plan(params, plan, num_shards)
        for bucket in plan.buckets:
            held = owners(bucket)
            for slot in bucket.slots:
                assert all(len(coords) == 1 for coords in held[slot.start : slot.start + slot.numel])


def test_the_check_sees_a_parameter_that_overlaps_another():
    params = infos((4, 4))
    plan = plan_buckets(params, num_shards=2, bucket_bytes=1000, align_bytes=1)
    object.__setattr__(plan.buckets[0].slots[1], "start", 2)
    with pytest.raises(AssertionError):
        check_plan(params, plan, 2)


def test_starts_and_shards_are_aligned():
    for sizes, dtypes, num_shards, bucket_bytes, align_bytes in CASES:
        plan = plan_buckets(
            infos(sizes, dtypes), num_shards=num_shards, bucket_bytes=bucket_bytes, align_bytes=align_bytes
        )
        for bucket in plan.buckets:
            size = bucket.dtype.itemsize
            starts = [slot.start for slot in bucket.slots] + [bucket.shard(c)[0] for c in range(num_shards)]
            assert all(start * size % align_bytes == 0 or align_bytes < size for start in starts)


def test_a_bucket_is_closed_before_it_exceeds_its_size():
    for sizes, dtypes, num_shards, bucket_bytes, align_bytes in CASES:
        plan = plan_buckets(
            infos(sizes, dtypes), num_shards=num_shards, bucket_bytes=bucket_bytes, align_bytes=align_bytes
        )
        for bucket in plan.buckets:
            last = bucket.slots[-1]
            assert len(bucket.slots) == 1 or (last.start + last.numel) * bucket.dtype.itemsize <= bucket_bytes


def test_padding_is_less_than_one_unit_per_parameter_and_shard():
    for sizes, dtypes, num_shards, bucket_bytes, align_bytes in CASES:
        plan = plan_buckets(
            infos(sizes, dtypes), num_shards=num_shards, bucket_bytes=bucket_bytes, align_bytes=align_bytes
        )
        for bucket in plan.buckets:
            unit = max(1, align_bytes // bucket.dtype.itemsize)
            padding = bucket.numel - sum(slot.numel for slot in bucket.slots)
            assert padding < unit * (len(bucket.slots) + num_shards)


def test_parameters_are_in_reverse_order_and_buckets_in_the_order_in_which_they_fill():
    params = infos((4, 4, 4, 4, 4), (torch.float32, torch.float64))
    plan = plan_buckets(params, num_shards=1, bucket_bytes=2 * 4 * 4, align_bytes=1)
    assert [[slot.fqn for slot in bucket.slots] for bucket in plan.buckets] == [["p3"], ["p4", "p2"], ["p1"], ["p0"]]


def test_the_plan_prints():
    params = [ParamInfo("embed.weight", 10, torch.float32), ParamInfo("norm.weight", 3, torch.bfloat16)]
    plan = plan_buckets(params, num_shards=2, bucket_bytes=1000, align_bytes=16)
    assert str(plan) == (
        "bucket 0: bfloat16, 2 x 8 elements, 32 bytes\n"
        "  [0, 3)  norm.weight\n"
        "bucket 1: float32, 2 x 8 elements, 64 bytes\n"
        "  [0, 10)  embed.weight"
    )


def test_thousands_of_parameters_take_milliseconds():
    params = infos([1000 + i % 7 for i in range(5000)])
    plan = plan_buckets(params, num_shards=64, bucket_bytes=25 * 2**20)
    assert sum(len(bucket.slots) for bucket in plan.buckets) == 5000
    assert sum(bucket.num_bytes for bucket in plan.buckets) < 1.02 * 4 * sum(param.numel for param in params)


@pytest.mark.parametrize("num_shards, bucket_bytes", [(0, 10), (2, 0)])
def test_sizes_must_be_positive(num_shards, bucket_bytes):
    with pytest.raises(ValueError, match=f"must be positive, got {num_shards} and {bucket_bytes}"):
        plan_buckets(infos((1,)), num_shards=num_shards, bucket_bytes=bucket_bytes)


def test_a_name_comes_once():
    with pytest.raises(ValueError, match="a parameter name comes twice; give tied parameters once"):
        plan_buckets(infos((1,)) * 2, num_shards=1, bucket_bytes=10)


# ------------------------------------------------------------------------------------------- blocks


def blocked(sizes, blocks):
    return [ParamInfo(f"p{i}", n, torch.float32, b) for i, (n, b) in enumerate(zip(sizes, blocks, strict=True))]


def test_buckets_are_filled_until_shards_have_room_for_a_block():
    whole = blocked([64] * 9, [64] * 9)
    plan = plan_buckets(whole, num_shards=4, bucket_bytes=4 * 64)
    assert [len(bucket.slots) for bucket in plan.buckets] == [4, 5]  # the ninth joins, for four shards of 64 hold 4
    assert [bucket.shard_numel for bucket in plan.buckets] == [64, 128]
    plain = plan_buckets(blocked([64] * 9, [1] * 9), num_shards=4, bucket_bytes=4 * 64)
    assert [len(bucket.slots) for bucket in plain.buckets] == [1] * 9
    rows = plan_buckets(blocked([64] * 9, [16] * 9), num_shards=4, bucket_bytes=4 * 64)
    assert str(rows) == str(plain)  # blocks that fit change nothing


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 1, 7, 16, 50]), st.booleans()), max_size=9),
    st.integers(1, 5),
    st.sampled_from([1, 400, 10**6]),
)
def test_buckets_hold_everything_and_cut_no_block(kinds, num_shards, bucket_bytes):
    sizes = [count * block for count, block, _ in kinds]
    blocks = [max(count * block, 1) if whole else block for count, block, whole in kinds]
    params = blocked(sizes, blocks)
    plan = plan_buckets(params, num_shards=num_shards, bucket_bytes=bucket_bytes, align_bytes=16)
    assert sorted(slot.fqn for bucket in plan.buckets for slot in bucket.slots) == [param.fqn for param in params]
    for bucket in plan.buckets:
        held = [param for param in params if param.fqn in {slot.fqn for slot in bucket.slots}]
        end = 0
        for slot in bucket.slots:
            assert slot.start >= end
            assert slot.start % 4 == 0
            end = slot.start + slot.numel
            parts = [bucket.part(slot, coord) for coord in range(num_shards)]
            assert sum(part.stop - part.start for part in parts) == slot.numel
            block = blocks[int(slot.fqn[1:])]
            assert all(part.start % block == 0 and part.stop % block == 0 for part in parts)
        assert end <= bucket.numel
        total = sum(-(-param.numel // 4) * 4 for param in held)
        longest = max((param.numel for param in held if param.block > 1), default=0)
        assert bucket.shard_numel <= max(-(-total // num_shards) + longest, longest) + 4


def test_blocks_by_name():
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
    module.back = nn.Linear(3, 2, bias=False)
    module.back.weight = module.layers[1].weight
    module.experts, module.scale = nn.Parameter(torch.zeros(5, 6, 4)), nn.Parameter(torch.tensor(1.5))
    module.frozen = nn.Linear(4, 6).requires_grad_(False)
    by_name = {r"layers\.\d\.weight": "tensor", "layers.0.weight": "rows", re.compile(r"layers\.0\.b.*"): 3}
    blocks = {"layers.0.weight": 2, "layers.0.bias": 3, "layers.1.weight": 6}
    assert resolve_blocks(module, by_name) == blocks
    by_name = {"experts": "expert", "frozen.weight": ("dim0", 2), "scale": "rows"}
    assert resolve_blocks(module, by_name) == {"experts": 24, "frozen.weight": 8, "scale": 1}
    assert resolve_blocks(module, {"back.weight": "tensor"}) == {"layers.1.weight": 6}  # the second name of a tied one
    assert resolve_blocks(module, None) == {}
    module.layers[1] = nn.Identity()  # as a pipeline stage has it that lacks the layer
    with pytest.raises(ValueError, match=r"'layers.1.bias' matches no parameter"):
        resolve_blocks(module, {"layers.1.bias": "tensor"})
    module.layers[1].absent_fqns = ("", "weight", "bias")
    assert resolve_blocks(module, {"layers.1.bias": "tensor", r"layers\.1\..*": "rows", "experts": "rows"}) == {
        "experts": 24
    }
    with pytest.raises(ValueError, match=r"'layers.2.bias' matches no parameter"):
        resolve_blocks(module, {"layers.2.bias": "tensor"})


@ranks(4)
def test_shapes_of_all_ranks():
    mesh = init_device_mesh("cpu", (2, 2))
    for placements, expected in [
        ([Replicate(), Shard(0)], [(2, 4), (3, 4)]),
        ([Shard(0), Shard(0)], [(1, 4), (2, 4)]),
        ([Shard(1), Shard(0)], [(2, 2), (3, 2)]),
        ([Shard(1), Replicate()], [(5, 2)]),
        ([InterleavedShard(1, 2), Shard(1)], [(5, 0), (5, 2)]),
    ]:
        tensor = distribute_tensor(torch.zeros(5, 4), mesh, placements)
        shapes = [None] * 4
        dist.all_gather_object(shapes, tuple(tensor.to_local().shape))
        if not isinstance(placements[0], InterleavedShard):
            assert sorted(set(shapes)) == local_shapes(tensor) == expected
        else:
            assert set(shapes) <= set(local_shapes(tensor))
        assert is_even(tensor) == (len(set(shapes)) == 1)
    assert local_shapes(torch.zeros(3, 2)) == [(3, 2)]
