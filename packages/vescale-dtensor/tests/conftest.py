"""Cut whole tensors into shards, independently of the code under test."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

from vescale.dtensor import InterleavedShard, RaggedShard
from vescale.dtensor.extension import pieces


def _shard_of(tensor, mesh, placements):
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = tensor.chunk(mesh.size(axis), placement.dim)
            index = mesh.get_local_rank(axis)
            tensor = chunks[index] if index < len(chunks) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def _shard(tensor, mesh, placements):
    local = _shard_of(tensor, mesh, placements).detach().clone()
    size = {"shape": tensor.shape, "stride": tensor.stride()}
    made = DTensor.from_local(local, mesh, placements, run_check=False, **size).detach()
    return made.requires_grad_(tensor.requires_grad)


@pytest.fixture(scope="session")
def shard_of():
    """`shard_of(tensor, mesh, placements)`: this rank's part, as `torch.chunk` cuts it, one mesh axis after another."""
    return _shard_of


@pytest.fixture(scope="session")
def shard():
    """`shard(tensor, mesh, placements)`: a whole tensor as a DTensor, a leaf, without communication."""
    return _shard


@pytest.fixture(scope="session")
def assert_drawn_alike():
    """`assert_drawn_alike(draw, tensor, mesh, placements)`: `draw` of the shards is the shards of `draw`, bit for bit.

    The generator ends in the same state, which the next draw confirms. Returns what `draw` gave for the sharded tensor.
    """

    def check(draw, tensor, mesh, placements, **kwargs):
        where = (tuple(tensor.shape), tensor.dtype, placements)
        sharded = _shard(tensor, mesh, placements)
        torch.manual_seed(7)
        expected = draw(tensor.clone(), **kwargs)
        state, follow_up = torch.get_rng_state(), torch.randn(3)
        torch.manual_seed(7)
        actual = draw(sharded, **kwargs)
        assert torch.equal(torch.get_rng_state(), state), where
        assert torch.equal(torch.randn(3), follow_up), where
        assert isinstance(actual, DTensor), where
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual.to_local(), _shard_of(expected, mesh, actual.placements)), where
        return actual

    return check


def _placements_of(tensor, partial):
    kinds = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    return [*kinds, Partial()] if partial and tensor.is_floating_point() else kinds


def _distribute(tensor, mesh, placement, requires_grad):
    if placement.is_partial():
        share = torch.linspace(0.5, 1.5, mesh.size(), dtype=tensor.dtype)
        made = DTensor.from_local(tensor * (share / share.sum())[mesh.get_local_rank()], mesh, [placement])
    else:
        made = _shard(tensor.detach(), mesh, [placement])
    return made.detach().requires_grad_(requires_grad)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _leaves(result):
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@pytest.fixture(scope="session")
def assert_equals_one_device():
    """`assert_equals_one_device(function, tensors, mesh)`: for every placement of every tensor, on a 1-D mesh.

    Values, gradients (with random weights on the results: a plain sum hides errors) and what the function writes to its
    tensors are those of plain tensors. Floating tensors that require a gradient get one. Returns the number of cases.
    """

    def check(function, tensors, mesh, *, partial=True, only=None):
        def weigh(results):
            torch.manual_seed(11)
            floating = [r for r in _leaves(results) if r.requires_grad]
            return sum((r * _weight(r)).sum() for r in floating) if floating else None

        def _weight(result):
            weight = torch.randn(result.shape, dtype=result.dtype)
            return _distribute(weight, mesh, Replicate(), False) if isinstance(result, DTensor) else weight

        plain = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        expected = function(*plain)
        if (loss := weigh(expected)) is not None:
            loss.backward()
        num_cases = 0
        for placements in itertools.product(*(_placements_of(t, partial) for t in tensors)):
            if only is not None and not only(placements):
                continue
            sharded = [_distribute(t, mesh, p, t.requires_grad) for t, p in zip(tensors, placements, strict=True)]
            actual = function(*sharded)
            for a, e in zip(_leaves(actual), _leaves(expected), strict=True):
                assert a.shape == e.shape, placements
                _assert_close(_whole(a), e, placements)
            if (loss := weigh(actual)) is not None:
                loss.backward()
            for s, p in zip(sharded, plain, strict=True):
                _assert_close(_whole(s), p, placements)
                assert (s.grad is None) == (p.grad is None), placements
                if p.grad is not None:
                    _assert_close(_whole(s.grad), p.grad, placements)
            num_cases += 1
        return num_cases

    def _assert_close(actual, expected, placements):
        torch.testing.assert_close(
            actual, expected, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda text: f"{placements}: {text}"
        )

    return check


@pytest.fixture(scope="session")
def meshes_of_1_to_8_ranks():
    """`meshes_of_1_to_8_ranks()`: on 8 ranks, meshes of the first 1 to 8 of them, 1-D to 4-D; others are outside."""
    shapes = [(1,), (2,), (1, 2), (3,), (2, 2), (5,), (2, 3), (3, 2), (7,), (8,), (2, 4), (2, 2, 2), (2, 1, 2, 2)]

    def make():
        return [DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape)) for shape in shapes]

    return make


@pytest.fixture(scope="session")
def draw_placements():
    """`draw_placements(draw, shape, mesh_shape)`: any placements that fit, drawn by hypothesis, one for each axis.

    At most one is ragged, and only with ``ragged=True``; several axes may cut the same dim, in either order.
    """

    def one(draw, shape, size, ragged):
        dim = draw(st.integers(0, len(shape) - 1))
        divisors = [k for k in (2, 3) if shape[dim] % k == 0]
        kinds = [Replicate(), Shard(dim), Shard(dim), *(InterleavedShard(dim, k) for k in divisors)]
        kinds.append(_StridedShard(dim, split_factor=draw(st.integers(1, 4))))
        if ragged:
            units = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(sum))
            kinds.append(RaggedShard(tuple(range(dim + 1)), tuple(units)))
        return kinds[draw(st.integers(0, len(kinds) - 1))]

    def several(draw, shape, mesh_shape, *, ragged=False):
        placements = []
        for size in mesh_shape:
            placements.append(one(draw, shape, size, ragged))
            ragged = ragged and not isinstance(placements[-1], RaggedShard)
        try:
            pieces(tuple(shape), tuple(mesh_shape), None, tuple(placements))
        except ValueError:  # parts or units that do not divide what other axes leave
            placements = [p if type(p) is Shard else Replicate() for p in placements]
        return placements

    return several
