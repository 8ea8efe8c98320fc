"""Redistribution among all placements on real ranks: bit for bit, and torch's own results where torch knows them."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.dtensor import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from vescale.dtensor.extension import pieces
from vescale_testing import ranks

PLACEMENTS = [
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=2),
    InterleavedShard(1, 2),
    RaggedShard((0,), (1, 3)),
    RaggedShard((0, 1, 2), (5, 3)),
]


def layouts():
    pairs = itertools.product(PLACEMENTS, repeat=2)
    return [pair for pair in pairs if sum(isinstance(p, RaggedShard) for p in pair) < 2]


@ranks(4)
def test_every_pair_of_layouts_bit_for_bit():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.randn(8, 4, 2)
    shards = [distribute_tensor(whole, mesh, layout, src_data_rank=None) for layout in layouts()]
    for number, shard in enumerate(shards):
        assert torch.equal(shard.full_tensor(), whole), shard.placements
        for other in shards[number % 4 :: 4]:
            moved = shard.redistribute(placements=other.placements)
            assert moved.placements == other.placements
            assert moved.shape == whole.shape
            assert torch.equal(moved.to_local(), other.to_local()), (shard.placements, other.placements)


@ranks(4)
def test_dtypes_uneven_shapes_and_mesh_orders():
    whole = torch.arange(3 * 5 * 8).reshape(3, 5, 8)
    for mesh in (
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [3, 1, 0, 2]),
        DeviceMesh("cpu", [[3], [0], [2], [1]]),
    ):
        rest = [Replicate()] * (mesh.ndim - 1)
        targets = [Shard(0), Shard(1), InterleavedShard(2, 2), _StridedShard(1, split_factor=2), Replicate()]
        targets += [
            RaggedShard((0,), (0, 1, 0, 2)),
            RaggedShard((0, 1), (2, 0, 10, 3)),
            RaggedShard((0, 1, 2), (1, 1, 1, 1)),
        ]
        for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float8_e5m2):
            typed = whole.to(dtype)
            for source, target in itertools.product(targets[:: 1 if dtype is torch.float64 else 3], targets):
                if dtype.is_complex or (dtype.itemsize == 1 and not own((source, target))):
                    continue  # gloo moves bytes for us only
                tensor = distribute_tensor(typed, mesh, [source, *rest], src_data_rank=None)
                moved = tensor.redistribute(placements=[target, *rest])
                expected = distribute_tensor(typed, mesh, [target, *rest], src_data_rank=None)
                assert torch.equal(bits(moved), bits(expected)), (source, target, dtype)


def own(placements):
    return any(isinstance(placement, (RaggedShard, _StridedShard)) for placement in placements)


def bits(tensor):
    return tensor.to_local().contiguous().view(torch.uint8)


@ranks(4)
def test_random_walks_through_layouts():
    choose = random.Random(5)
    for _ in range(12):
        mesh = init_device_mesh("cpu", choose.choice([(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)]))
        shape = choose.choice([(12, 6), (24,), (4, 3, 8)])
        whole = torch.randn(shape)
        tensor = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)
        for _ in range(4):
            placements = random_layout(choose, shape, tuple(mesh.shape))
            tensor = tensor.redistribute(placements=placements)
            expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(tensor.to_local(), expected.to_local()), placements
        assert torch.equal(tensor.full_tensor(), whole)


def random_layout(choose, shape, mesh_shape):
    """Any placements that fit, uneven shards included."""
    dims = range(len(shape))
    plain = [Replicate(), *(Shard(d) for d in dims), *(_StridedShard(d, split_factor=3) for d in dims)]
    plain += [InterleavedShard(d, 2) for d in dims if shape[d] % 2 == 0]
    while True:
        placements = [choose.choice(plain) for _ in mesh_shape]
        axis = choose.randrange(len(mesh_shape) + 1)
        if axis < len(mesh_shape):
            units = [choose.randrange(4) for _ in range(mesh_shape[axis])]
            units[choose.randrange(len(units))] += 1
            placements[axis] = RaggedShard(range(choose.choice(dims) + 1), units)
        try:
            pieces(shape, mesh_shape, None, tuple(placements))
        except ValueError:
            continue
        return placements


@ranks(4)
def test_meshes_whose_ranks_do_not_ascend():
    """Torch gathers in the order of the process group, which is another one."""
    for ranks_of_mesh in ([3, 1, 0, 2], [[3, 1], [0, 2]], [[2, 3], [0, 1]]):
        mesh = DeviceMesh("cpu", ranks_of_mesh)
        rest = [Replicate()] * (mesh.ndim - 1)
        whole = torch.arange(32.0).reshape(4, 8)
        for src_data_rank in (0, None):
            tensor = distribute_tensor(whole, mesh, [Shard(0), *rest], src_data_rank=src_data_rank)
            index = mesh.get_coordinate()[0]
            assert torch.equal(tensor.to_local(), whole.chunk(mesh.size(0))[index])
            assert torch.equal(tensor.full_tensor(), whole)
        target = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        stock = _redistribute.redistribute_local_tensor.__wrapped__(tensor.to_local(), tensor._spec, target._spec)
        right = torch.tensor(int(torch.equal(stock, whole)))
        dist.all_reduce(right, op=dist.ReduceOp.MIN)
        assert not right


@ranks(4)
def test_partial_to_everything():
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.randn(8, 4, 2, dtype=torch.float64) + dist.get_rank()
    for ops, reduce in [
        (("sum", "sum"), dist.ReduceOp.SUM),
        (("sum", "avg"), None),
        (("max", "max"), dist.ReduceOp.MAX),
    ]:
        whole = local.clone()
        dist.all_reduce(whole, op=reduce or dist.ReduceOp.SUM)
        whole = whole if reduce else whole / 2
        for layout in layouts()[:: 1 if reduce is None else 3]:
            moved = DTensor.from_local(local, mesh, [Partial(op) for op in ops]).redistribute(placements=layout)
            torch.testing.assert_close(moved.full_tensor(), whole, rtol=1e-12, atol=1e-12)
    for op, kept in itertools.product(("sum", "min"), PLACEMENTS[1:]):
        unreduced = DTensor.from_local(whole - mesh.get_local_rank(1), mesh, [Replicate(), Partial(op)])
        moved = unreduced.redistribute(placements=[kept, Partial(op)])
        assert moved.placements == (kept, Partial(op))
        back = moved.redistribute(placements=[Replicate(), Replicate()])
        torch.testing.assert_close(back.to_local(), unreduced.full_tensor(), rtol=1e-12, atol=1e-12)


@ranks(4)
def test_unequal_reduce_scatter_moves_no_padding_and_equals_a_sum():
    mesh = init_device_mesh("cpu", (4,))
    local = torch.randn(8, 3, dtype=torch.float64)
    with CommDebugMode() as comm:
        moved = DTensor.from_local(local, mesh, [Partial()]).redistribute(placements=[RaggedShard((0,), (1, 0, 2, 5))])
    assert comm.get_total_counts() == 1, comm.get_comm_counts()
    every = [torch.empty_like(local) for _ in range(4)]
    dist.all_gather(every, local)
    start = (0, 1, 1, 3)[dist.get_rank()]
    expected = (((every[0] + every[1]) + every[2]) + every[3])[start : start + (1, 0, 2, 5)[dist.get_rank()]]
    assert torch.equal(moved.to_local(), expected)


@ranks(4)
def test_several_partial_axes_are_one_reduction_with_one_result():
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(dist.get_rank())
    local = torch.randn(1000)
    unreduced = DTensor.from_local(local, mesh, [Partial(), Partial()])
    for target in ([Replicate(), Replicate()], [RaggedShard((0,), (1, 1)), Replicate()], [Shard(0), Replicate()]):
        with CommDebugMode() as comm:
            result = unreduced.redistribute(placements=target)
        counts = {str(name): count for name, count in comm.get_comm_counts().items() if "reduce" in str(name)}
        if target[0].is_replicate():
            assert sum(counts.values()) == 1, counts
        copies = [torch.empty_like(local) for _ in range(4)]
        dist.all_gather(copies, result.full_tensor())
        assert all(torch.equal(copy, copies[0]) for copy in copies)
    mixed = DTensor.from_local(local, mesh, [Partial("sum"), Partial("avg")]).full_tensor()
    torch.testing.assert_close(mixed, unreduced.full_tensor() / 2)


@ranks(4)
def test_torch_reduces_axis_after_axis():
    """What the rule above replaces."""
    mesh = init_device_mesh("cpu", (2, 2))
    unreduced = DTensor.from_local(torch.randn(8), mesh, [Partial(), Partial()])
    target = DTensor.from_local(torch.randn(8), mesh, [Replicate(), Replicate()])
    with CommDebugMode() as comm:
        _redistribute.redistribute_local_tensor.__wrapped__(unreduced.to_local(), unreduced._spec, target._spec)
    assert comm.get_total_counts() == 2


@ranks(4)
def test_ranks_outside_the_mesh_take_part_in_nothing():
    mesh = DeviceMesh("cpu", [0, 2])
    whole = torch.arange(12.0).reshape(6, 2)
    tensor = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 2))])
    moved = tensor.redistribute(placements=[Replicate()])
    if dist.get_rank() in (0, 2):
        assert torch.equal(moved.to_local(), whole)
    else:
        assert moved.to_local().numel() == 0


@ranks(2)
def test_gradients_return_to_the_placements_of_the_tensor():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(6, 4, dtype=torch.float64)
    factor = torch.randn(6, 4, dtype=torch.float64)
    targets = [Replicate(), Shard(1), InterleavedShard(0, 3), RaggedShard((0, 1), (1, 5)), RaggedShard((0,), (2, 1))]
    for source, target in itertools.product(targets, repeat=2):
        tensor = distribute_tensor(whole, mesh, [source]).requires_grad_()
        moved = tensor.redistribute(placements=[target])
        local = moved.to_local()
        upstream = distribute_tensor(factor, mesh, [target]).to_local()
        (gradient,) = torch.autograd.grad((local * upstream).sum(), tensor, create_graph=True)
        assert gradient.placements == (source,)
        assert torch.equal(gradient.full_tensor(), factor)
        leaf = tensor.to_local().detach().requires_grad_()
        made = DTensor.from_local(leaf, mesh, [source], shape=whole.shape, stride=whole.stride())
        (made.redistribute(placements=[target]).to_local() * upstream).sum().backward()
        assert torch.equal(leaf.grad, distribute_tensor(factor, mesh, [source]).to_local())


@ranks(2)
def test_gradients_of_gradients():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(8, dtype=torch.float64)
    tensor = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 3))]).requires_grad_()
    moved = tensor.redistribute(placements=[Shard(0)])
    (gradient,) = torch.autograd.grad((moved**3).sum().full_tensor(), tensor, create_graph=True)
    torch.testing.assert_close(gradient.full_tensor(), 3 * whole**2)
    second = gradient.redistribute(placements=[Shard(0)]).to_local().sum()
    second.backward()
    torch.testing.assert_close(tensor.grad.full_tensor(), 6 * whole)


@ranks(2)
def test_gradients_of_unreduced_tensors_are_whole():
    mesh = init_device_mesh("cpu", (2,))
    local = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for target in (RaggedShard((0,), (1, 3)), InterleavedShard(0, 2), Shard(0)):
        local.grad = None
        tensor = DTensor.from_local(local, mesh, [Partial()])
        tensor.redistribute(placements=[target]).redistribute(
            placements=[Replicate()]
        ).to_local().square().sum().backward()
        assert torch.equal(local.grad, 2 * tensor.full_tensor())


@ranks(2)
def test_dtypes_of_the_collectives():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.randn(4), mesh, [RaggedShard((0,), (1, 3))]).requires_grad_()
    moved = tensor.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert moved.dtype == moved.to_local().dtype == torch.bfloat16
    moved.to_local().sum().backward()
    assert tensor.grad.dtype == torch.float32
    assert torch.equal(tensor.grad.full_tensor(), torch.ones(4))


@ranks(2)
def test_the_source_rank_is_taken_or_none():
    mesh = init_device_mesh("cpu", (2,))
    mine = torch.full((4,), float(dist.get_rank()))
    for placement in (RaggedShard((0,), (1, 3)), InterleavedShard(0, 2)):
        assert distribute_tensor(mine, mesh, [placement]).full_tensor().eq(0).all()
        own = distribute_tensor(mine, mesh, [placement], src_data_rank=None).to_local()
        assert own.eq(dist.get_rank()).all()
        own.zero_()
        assert mine.eq(dist.get_rank()).all()
    parameter = torch.nn.Parameter(mine)
    assert distribute_tensor(parameter, mesh, [InterleavedShard(0, 2)]).requires_grad
    with pytest.raises(RuntimeError, match="detach it first"):
        distribute_tensor(parameter * 2, mesh, [RaggedShard((0,), (1, 3))])
    with pytest.raises(ValueError, match="4 is not divisible by 3"):
        distribute_tensor(mine, mesh, [RaggedShard((0,), (1, 2))])


@ranks(4)
def test_errors_name_the_way_out():
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(torch.zeros(8, 4), mesh, [RaggedShard((0,), (1, 3)), Replicate()])
    with pytest.raises(RuntimeError, match="redistributing to Partial is for internal use only"):
        tensor.redistribute(placements=[Partial(), Replicate()])
    with pytest.raises(ValueError, match="at most one RaggedShard"):
        tensor.redistribute(placements=[RaggedShard((0,), (1, 3))] * 2)
    with pytest.raises(ValueError, match="8 is not divisible by 5"):
        tensor.redistribute(placements=[RaggedShard((0,), (1, 4)), Replicate()])
    with pytest.raises(NotImplementedError, match=r"to another mesh.*full_tensor"):
        tensor.redistribute(init_device_mesh("cpu", (4,)), [Replicate()])
    size = {"shape": (8, 4), "stride": (4, 1)}
    mixed = DTensor.from_local(tensor.to_local(), mesh, [RaggedShard((0,), (1, 3)), Partial("max")], **size)
    summed = DTensor.from_local(torch.zeros(8, 4), mesh, [Replicate(), Partial("sum")], **size)
    # As dispatch calls it:
    part = _redistribute.redistribute_local_tensor(mixed.to_local() + 2, mixed._spec, summed._spec)
    assert torch.equal(part, torch.full((8, 4), 2.0 if mesh.get_local_rank(1) == 0 else 0.0))


@ranks(6)
def test_axis_orders_stay_torchs():
    """FSDP2 over tensor parallel cuts 7 rows by tp first; cut from left to right, the last row is another rank's."""
    mesh = init_device_mesh("cpu", (3, 2))
    whole = torch.arange(7.0)
    dp, tp = mesh.get_coordinate()
    by_tp = whole.chunk(2)[tp]
    chunks = (*by_tp.chunk(3), *[by_tp[:0]] * 3)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(chunks[dp].clone(), mesh, placements, shape=whole.shape, stride=(1,))
    assert torch.equal(tensor.full_tensor(), whole)
    assert not hasattr(tensor, "__boxes__")


@ranks(2)
def test_a_shard_of_another_size_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(3), mesh, [RaggedShard((0,), (1, 3))], shape=(8,), stride=(1,))
    with pytest.raises(ValueError, match=r"a shard of shape \([26],\).* but got \(3,\); .*pass shape and stride"):
        tensor.full_tensor()


@ranks(2)
def test_lazy_conjugates_are_sent_as_values():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 2, dtype=torch.complex128)
    tensor = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 3))], src_data_rank=None)
    lazy = DTensor.from_local(
        tensor.to_local().conj(), mesh, tensor.placements, shape=whole.shape, stride=whole.stride()
    )
    assert torch.equal(lazy.full_tensor(), whole.conj())
    moved = lazy.redistribute(placements=[InterleavedShard(0, 2)])
    assert torch.equal(moved.full_tensor(), whole.conj())
