"""Conversions of local tensors give what eager boundaries give on DTensors, bit for bit, in the same strides."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from vescale.dmodule._boundary.convert import bring
from vescale.dmodule._static.movement.conversions import Conversion, compile_conversion, identity
from vescale.dmodule._static.movement.steps import Exchange, Gather, Reduce, ReduceScatter, Split, chunk, plan_steps
from vescale.dtensor import DTensor, InterleavedShard, Partial, RaggedShard, Replicate, Shard, init_device_mesh
from vescale_testing import ranks


def local_of(shape, mesh, placements, *, seed, dtype=torch.float64):
    """A rank's part of a tensor of random values, which differ where the placements are Partial."""
    generator = torch.Generator().manual_seed(seed)
    partial = [index for index, p in zip(mesh.get_coordinate(), placements, strict=True) if p.is_partial()]
    for _ in range(1 + sum(index * 7**place for place, index in enumerate(partial))):
        whole = (
            torch.randint(-40, 40, shape, generator=generator).to(dtype) / 7
            if dtype.is_floating_point
            else (torch.randint(0, 9, shape, generator=generator).to(dtype))
        )
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            offset, size = chunk(whole.size(placement.dim), mesh.size(axis), mesh.get_coordinate()[axis])
            whole = whole.narrow(placement.dim, offset, size)
    return whole.contiguous()


def wrap(local, shape, mesh, placements):
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def eager(conversion, local, gradient, mesh):
    """What the eager boundary makes of the same local tensors: value, gradient and its placements."""
    value = wrap(local, conversion.shape, mesh, conversion.source).detach()
    if gradient is not None:
        value.requires_grad_()
    moved = bring(value, conversion.target, mesh)
    if gradient is None:
        return moved.to_local(), None
    (came,) = torch.autograd.grad(moved, value, wrap(gradient, conversion.shape, mesh, conversion.gradient))
    assert tuple(came.placements) == tuple(Replicate() if p.is_partial() else p for p in conversion.source)
    scale = shares(mesh, conversion.target) / shares(mesh, conversion.source)
    return moved.detach().to_local(), came.to_local().mul_(scale)


def shares(mesh, placements):
    """Of how many local values a value is the mean: the gradient of each is that part of the gradient of the mean."""
    return math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if placement == Partial("avg"))


def static(conversion, local, gradient, mesh):
    value = local.detach().requires_grad_(gradient is not None)
    moved = compile_conversion(conversion, mesh)(value)
    came = None if gradient is None else torch.autograd.grad(moved, value, gradient)[0]
    return moved.detach(), came


def same(actual, expected):
    if actual is None or expected is None:
        return actual is expected
    # what is stepped over: nothing along dims of one element, and nowhere in a tensor without elements
    strides = zip(actual.shape, actual.stride(), expected.stride(), strict=True)
    same_strides = actual.numel() == 0 or all(new == old for size, new, old in strides if size > 1)
    return same_strides and actual.dtype == expected.dtype and torch.equal(actual, expected)


def check(conversion, mesh, *, dtype=torch.float64, transposed=False):
    local = local_of(conversion.shape, mesh, conversion.source, seed=1, dtype=dtype)
    gradient = None
    if conversion.gradient is not None:
        gradient = local_of(conversion.shape, mesh, conversion.gradient, seed=2, dtype=dtype)
    if transposed:  # the same values, laid out from the last dim to the first
        local, gradient = (t if t is None else t.mT.contiguous().mT for t in (local, gradient))
    expected, actual = eager(conversion, local, gradient, mesh), static(conversion, local, gradient, mesh)
    for kind, new, old in zip(("value", "gradient"), actual, expected, strict=True):
        assert same(new, old), f"{kind} of {conversion} {dtype}: {new} {new.stride()}, not {old} {old.stride()}"


def to_partial(source, target):
    """Whether an axis would become Partial, which no boundary may ask for."""
    return any(new.is_partial() and new != old for old, new in zip(source, target, strict=True))


def conversions(shape, num_axes, placements):
    layouts = list(itertools.product(placements, repeat=num_axes))
    for source, target in itertools.product(layouts, layouts):
        if not to_partial(source, target):
            yield from (Conversion(shape, source, target, gradient) for gradient in gradients(target))


def gradients(target):
    """The layouts that the gradient of a local tensor can have: Replicate or Partial where there is no shard."""
    return itertools.product(*([p] if p.is_shard() else [Replicate(), Partial()] for p in target))


def every_pair_on_one_axis(*shapes):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    some = [Shard(0), Shard(1), Shard(2), Replicate(), Partial()]
    for shape in shapes:
        for conversion in conversions(shape, 1, some):
            check(conversion, mesh)
    for conversion in conversions((2, 12, 5), 1, some):
        check(conversion, mesh, transposed=True)
    for op in ("max", "min"):
        for target in (Replicate(), Shard(1), Partial(op)):
            check(Conversion((3, 5), (Partial(op),), (target,), next(gradients((target,)))), mesh)


def every_dtype():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    some = [Shard(0), Shard(1), Replicate(), Partial()]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for conversion in conversions((4, 5), 1, some):
            check(conversion, mesh, dtype=dtype)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        for source, target in itertools.product(some[:3], some[:3]):
            check(Conversion((4, 5), (source,), (target,)), mesh, dtype=dtype)


@ranks(2)
def test_every_pair_of_placements_on_two_ranks():
    every_pair_on_one_axis((4, 6, 8), (3, 5, 7), (1, 12, 1), (0, 4, 3))
    every_dtype()


@ranks(3)
def test_every_pair_of_placements_on_three_ranks():
    every_pair_on_one_axis((3, 5, 7))


@ranks(4)
def test_every_pair_of_placements_on_two_axes():
    every_pair_on_one_axis((4, 3, 9))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for conversion in conversions((3, 5), 2, [Shard(0), Shard(1), Replicate(), Partial()]):
        if conversion.gradient[0].is_shard() or conversion.gradient[0].is_partial():
            check(conversion, mesh)
    check(Conversion((4, 6), (Partial(), Partial("avg")), (Replicate(), Replicate()), (Replicate(), Partial())), mesh)
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    some = [(Partial(), Shard(1), Shard(0)), (Replicate(), Partial(), Shard(1)), (Shard(1), Shard(0), Shard(1))]
    for source, target in itertools.product(some, [some[2], (Replicate(),) * 3, (Shard(0),) * 3]):
        for gradient in gradients(target):
            check(Conversion((5, 6), source, target, gradient), cube)


@ranks(4)
def test_other_layouts_go_through_dtensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = [(Replicate(), InterleavedShard(0, 2)), (RaggedShard((0,), (1, 3)), Replicate()), (Shard(0), Replicate())]
    whole = torch.arange(48, dtype=torch.float64).reshape(8, 6)
    for source, target in itertools.product(own, own):
        gradient = tuple(Partial() if p.is_replicate() else p for p in target)
        conversion = Conversion((8, 6), source, target, gradient)
        parts = [wrap(whole, (8, 6), mesh, [Replicate()] * 2).redistribute(placements=p) for p in (source, target)]
        local, arriving = (part.to_local().contiguous() for part in parts)
        expected, actual = eager(conversion, local, arriving, mesh), static(conversion, local, arriving, mesh)
        assert all(torch.equal(new, old) for new, old in zip(actual, expected, strict=True)), conversion
    # reductions over two axes to shards, which torch may merge
    for target in ((Shard(0), Shard(0)), (Shard(1), Shard(0))):
        assert plan_steps((8, 6), (2, 2), (0, 0), (Partial(), Partial()), target) is None
        check(Conversion((8, 6), (Partial(), Partial()), target, target), mesh)


@ranks(2)
def test_descending_ranks_are_cut_by_coordinate():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    turned = type(mesh)("cpu", [1, 0], mesh_dim_names=("tp",))
    local = torch.full((2, 2), 1.0 * turned.get_coordinate()[0])
    joined = compile_conversion(Conversion((4, 2), (Shard(0),), (Replicate(),)), turned)(local)
    assert joined[:, 0].tolist() == [0, 0, 1, 1]


@ranks(2)
def test_a_wrong_variant_is_seen():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shape = (3, 5)
    right = Conversion(shape, (Replicate(),), (Replicate(),), (Partial(),))
    local = local_of(shape, mesh, right.source, seed=1)
    gradient = local_of(shape, mesh, right.gradient, seed=2)
    expected = eager(right, local, gradient, mesh)
    forgotten = static(Conversion(shape, (Replicate(),), (Replicate(),), (Replicate(),)), local, gradient, mesh)
    assert same(forgotten[0], expected[0])
    assert not same(forgotten[1], expected[1])  # the sum over ranks is missing
    summed = Conversion(shape, (Partial(),), (Replicate(),), (Replicate(),))
    value = local_of(shape, mesh, summed.source, seed=1)
    maximum = Conversion(shape, (Partial("max"),), (Replicate(),), (Replicate(),))
    assert not same(static(maximum, value, gradient, mesh)[0], eager(summed, value, gradient, mesh)[0])
    # the strides are compared, too
    assert not same(local.mT.contiguous().mT, local)


@ranks(2)
def test_what_needs_nothing_is_the_identity():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layout in (Replicate(), Shard(0)):
        for gradient in ((layout,), None):
            assert compile_conversion(Conversion((4, 2), (layout,), (layout,), gradient), mesh) is identity
    alone = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    moved = Conversion((4, 2), (Partial(), Replicate()), (Shard(0), Replicate()), (Replicate(), Replicate()))
    assert compile_conversion(moved, alone) is identity
    assert compile_conversion(Conversion((4, 2), (Replicate(),), (Replicate(),), (Partial(),)), mesh) is not identity


@ranks(2)
def test_gradients_that_cannot_be_given_are_errors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.ones(2, 3, requires_grad=True)
    gather = compile_conversion(Conversion((4, 3), (Shard(0),), (Replicate(),)), mesh)
    with pytest.raises(RuntimeError, match=r"no gradient at the boundary Conversion\(shape=\(4, 3\).*mode=\"eager\""):
        gather(x).sum().backward()
    assert gather(x.detach()).shape == (4, 3)
    with pytest.raises(ValueError, match=r"got \(Shard\(dim=0\),\) \(mesh axis 0\); bring .* boundary in the plan"):
        compile_conversion(Conversion((4, 3), (Shard(0),), (Replicate(),), (Shard(0),)), mesh)
    twice = compile_conversion(Conversion((4, 3), (Shard(0),), (Replicate(),), (Replicate(),)), mesh)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad((twice(x) ** 2).sum(), x, create_graph=True)


def test_steps_of_known_layouts():
    four = (4,), (1,)
    assert plan_steps((3, 8), *four, (Partial(),), (Replicate(),)) == (Reduce((0,), (3, 8), ("sum",)),)
    assert plan_steps((3, 8), *four, (Partial(),), (Shard(1),)) == (ReduceScatter((0,), (3, 8), 1, "sum"),)
    assert plan_steps((3, 8), *four, (Shard(0),), (Replicate(),)) == (Gather((0,), (1, 8), 0, 3),)
    assert plan_steps((3, 8), *four, (Shard(0),), (Shard(1),)) == (Exchange((0,), (1, 8), 0, 3, 1),)
    nested = plan_steps((4, 6), (2, 2), (0, 1), (Shard(0), Shard(1)), (Replicate(), Shard(0)))
    assert nested == (Gather((1,), (2, 3), 1, 6), Gather((0,), (2, 6), 0, 4), Split((1,), (4, 6), 0))
    both = plan_steps((4, 6), (2, 2), (0, 1), (Partial(), Partial()), (Replicate(), Replicate()))
    assert both == (Reduce((0, 1), (4, 6), ("sum", "sum")),)
