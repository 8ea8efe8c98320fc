"""Checkpoints of ragged, interleaved and strided tensors: boxes that cover the tensor once, and DCP across layouts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.dtensor import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedPlacement,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks

LAYOUTS = [
    ([RaggedShard((0, 1), (3, 5)), Replicate()], 2),
    ([RaggedShard((0,), (0, 2)), InterleavedShard(1, 2)], 1),
    ([InterleavedShard(0, 2), Shard(1)], 1),
    ([_StridedShard(0, split_factor=2), Shard(1)], 1),
]


@ranks(4)
def test_boxes_cover_the_tensor_once_for_each_copy():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(64.0).reshape(8, 8)
    for layout, copies in LAYOUTS:
        tensor = distribute_tensor(whole, mesh, layout)
        assert tensor.__global_shape__ == (8, 8)
        count = torch.zeros(8, 8)
        for offsets, view in tensor.__boxes__():
            index = tuple(slice(o, o + s) for o, s in zip(offsets, view.shape, strict=True))
            assert torch.equal(view, whole[index])
            count[index] += 1
            view.neg_()  # the tensor's own memory
        dist.all_reduce(count)
        assert count.eq(copies).all(), layout
        assert torch.equal(tensor.full_tensor(), -whole)


@ranks(2)
def test_only_our_placements_have_boxes():
    mesh = init_device_mesh("cpu", (2,))
    stock = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    assert not hasattr(stock, "__boxes__")
    assert not hasattr(stock, "__global_shape__")
    assert len(stock.__create_chunk_list__()) == 1


@ranks(4)
def test_unreduced_tensors_have_none():
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [RaggedShard((0,), (1, 1)), Partial()]
    tensor = DTensor.from_local(torch.zeros(2), mesh, placements, shape=(4,), stride=(1,))
    with pytest.raises(UnsupportedPlacement, match="no rank holds its elements; redistribute"):
        tensor.__boxes__()


def test_dcp_between_any_two_layouts(tmp_path):
    @ranks(4)
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.randn(8, 8)
        every = [layout for layout, _ in LAYOUTS] + [[Shard(1), Replicate()]]
        for number, layout in enumerate(every):
            dcp.save({"x": distribute_tensor(whole, mesh, layout)}, checkpoint_id=tmp_path / str(number))
            for other in every:
                target = distribute_tensor(torch.zeros(8, 8), mesh, other)
                dcp.load({"x": target}, checkpoint_id=tmp_path / str(number))
                assert torch.equal(target.full_tensor(), whole), (layout, other)

    check()
