"""Random operators on DTensors in placements that hold several boxes: interleaved, ragged, strided, and mixtures.

The expected elements are cut by the layout of the placements, which has tests of its own.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.dtensor import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    RaggedShard,
    Replicate,
    Shard,
    disabled,
    init_device_mesh,
)
from vescale.dtensor.extension import local_shape, local_views
from vescale_testing import ranks

S0, S1, R = Shard(0), Shard(1), Replicate()

DRAWS = {
    "uniform_": lambda x: x.uniform_(-1.0, 2.0),
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "exponential_": lambda x: x.exponential_(),
    "randn_like": torch.randn_like,
    "bernoulli": torch.bernoulli,
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "normal": lambda x: torch.normal(x, x),
}

STRIDED = _StridedShard(0, split_factor=2)

LAYOUTS = {
    (4,): [
        (InterleavedShard(0, 3),),
        (InterleavedShard(1, 2),),
        (RaggedShard((0,), (1, 0, 3, 2)),),
        (RaggedShard((0, 1), (1, 2, 0, 3)),),
        (_StridedShard(1, split_factor=2),),
    ],
    (2, 2): [
        (STRIDED, S0),
        (S1, InterleavedShard(0, 3)),
        (RaggedShard((0,), (1, 2)), S1),
        (RaggedShard((0, 1), (1, 2)), R),
        (InterleavedShard(1, 2), S1),
    ],
}
SHAPE = (12, 8)


def place(whole, mesh, placements):
    """This rank's elements of a whole tensor."""
    coord = tuple(mesh.get_coordinate())
    local = torch.zeros(local_shape(SHAPE, tuple(mesh.shape), coord, placements), dtype=whole.dtype)
    for (offsets, sizes), view in local_views(local, SHAPE, mesh, placements):
        view.copy_(whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])
    return local


def check(draw, mesh, placements):
    whole = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1))
    local = place(whole, mesh, placements)
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    torch.manual_seed(5)
    expected, state = draw(whole.clone()), torch.get_rng_state()
    torch.manual_seed(5)
    actual = draw(tensor)
    assert torch.equal(torch.get_rng_state(), state)
    assert actual.placements == tensor.placements
    assert torch.equal(actual.to_local(), place(expected, mesh, placements))


@ranks(4)
def test_several_boxes_on_a_rank():
    for mesh_shape, layouts in LAYOUTS.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        for placements in layouts:
            for name, draw in DRAWS.items():
                try:
                    check(draw, mesh, placements)
                except AssertionError as error:
                    raise AssertionError((name, placements)) from error


@ranks(4)
def test_meshes_with_axes_of_size_one_and_ranks_in_another_order():
    meshes = [
        (init_device_mesh("cpu", (1, 4, 1)), (S1, S0, R)),
        (init_device_mesh("cpu", (2, 1, 2, 1)), (S0, S0, S1, S1)),
        (DeviceMesh("cpu", [[3, 1], [0, 2]]), (S0, S1)),
        (DeviceMesh("cpu", [[2, 0], [1, 3]]), (S0, S0)),
    ]
    for mesh, placements in meshes:
        for name in ("normal_", "native_dropout", "randn_like"):
            check(DRAWS[name], mesh, placements)


@pytest.mark.parametrize("world", [1, 8])
def test_worlds_of_one_and_of_eight(world):
    @ranks(world)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (world,))
        units = tuple(range(world)) if world > 1 else (1,)
        for placement in (S0, S1, RaggedShard((0, 1), (*units[:-1], 96 - sum(units[:-1])))):
            for name in ("normal_", "native_dropout", "exponential_"):
                check(DRAWS[name], mesh, (placement,))

    on_every_rank()


@ranks(2)
def test_stock_shards_repeat_here_too():
    mesh = init_device_mesh("cpu", (2,))
    check(F.dropout, mesh, (InterleavedShard(0, 3),))
    if mesh.get_local_rank() == 1:
        with disabled("random"), pytest.raises(AssertionError):
            check(DRAWS["uniform_"], mesh, (S0,))
