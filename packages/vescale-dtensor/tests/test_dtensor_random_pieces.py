"""Draws of every rank of any mesh, simulated without processes: together they are the draw of one device, bit for bit.

Shapes, strides, meshes, placements, operators, and sizes of pieces are chosen by hypothesis.
"""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor._layout import shards as _layout
from vescale.dtensor._placements.types import InterleavedShard, RaggedShard
from vescale.dtensor._random.global_position import BatchWindow, GlobalPosition, _cut, _in_memory
from vescale.dtensor._random.stock import draw as _draw
from vescale.dtensor._random.stock import spans as _spans

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

OPERATORS = {
    aten.uniform_.default: ((-0.3, 1.7), FLOATS),
    aten.normal_.default: ((0.5, 2.0), (*FLOATS, torch.complex64)),
    aten.bernoulli_.float: ((0.3,), (*FLOATS, torch.int64, torch.bool)),
    aten.exponential_.default: ((1.5,), FLOATS),
    aten.geometric_.default: ((0.4,), (torch.float32, torch.int64)),
    aten.log_normal_.default: ((0.2, 0.5), FLOATS),
    aten.cauchy_.default: ((0.0, 2.0), FLOATS),
    aten.random_.default: ((), (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)),
    aten.random_.to: ((100,), (*FLOATS, torch.int64, torch.int16, torch.uint8)),
    getattr(aten.random_, "from"): ((-5, 2**30), (torch.int64,)),
}


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 13, 16, 31]), min_size=1, max_size=4)))


@st.composite
def meshes(draw):
    """1-D to 4-D, of at most 8 ranks."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 2, 3, 4, 5, 7, 8]), min_size=1, max_size=4))
    while math.prod(sizes) > 8:
        sizes.remove(max(sizes))
    return tuple(sizes or [2])


@st.composite
def placements_of(draw, shape, mesh):
    """One placement for each axis; at most one is ragged."""
    placements, ragged_left = [], True
    for size in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["shard", "shard", "replicate", "strided", "interleaved", "ragged"]))
        if kind == "shard":
            placements.append(Shard(dim))
        elif kind == "strided":
            placements.append(_layout.StridedShard(dim, split_factor=draw(st.integers(1, 4))))
        elif kind == "interleaved":
            divisors = [k for k in (2, 3, 5) if shape[dim] % k == 0]
            placements.append(InterleavedShard(dim, draw(st.sampled_from(divisors))) if divisors else Replicate())
        elif kind == "ragged" and ragged_left and 0 not in shape:
            units = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            units = units if sum(units) else [1] * size
            placements.append(RaggedShard(tuple(range(draw(st.integers(1, len(shape))))), tuple(units)))
            ragged_left = False
        else:
            placements.append(Replicate())
    return tuple(placements)


@st.composite
def cases(draw):
    shape, mesh = draw(shapes()), draw(meshes())
    placements = draw(placements_of(shape, mesh))
    try:
        _layout.check(shape, mesh, placements)
    except ValueError:  # units that do not divide what the other axes leave
        placements = tuple(Replicate() if isinstance(p, RaggedShard) else p for p in placements)
    order = draw(st.permutations(range(len(shape))))
    op = draw(st.sampled_from(sorted(OPERATORS, key=str)))
    args, dtypes = OPERATORS[op]
    return {
        "shape": shape,
        "stride": strides(shape, order, gap=draw(st.sampled_from([0, 0, 3]))),
        "mesh": mesh,
        "placements": placements,
        "op": op,
        "args": args,
        "dtype": draw(st.sampled_from(dtypes)),
        "max_piece": draw(st.sampled_from([16, 48, 100, 2**17])),
        "min_direct": draw(st.sampled_from([16, 40, 2048])),
        "cached": draw(st.booleans()),
    }


def strides(shape, order, gap):
    """Of a tensor whose dims lie in memory in the given order, the fastest ``gap`` elements longer than its size."""
    stride, step = [0] * len(shape), 1
    for position, dim in enumerate(reversed(order)):
        stride[dim] = step
        step *= max(shape[dim], 1) + (gap if position == 0 else 0)
    return tuple(stride)


def reference(case, shape=None):
    """What one device draws, and the state of the generator afterwards."""
    shape = shape or case["shape"]
    generator = seeded(case)
    size = sum((n - 1) * s for n, s in zip(shape, case["stride"], strict=True)) + 1 if 0 not in shape else 0
    whole = torch.zeros(size, dtype=case["dtype"]).as_strided(shape, case["stride"])
    case["op"](whole, *case["args"], generator=generator)
    return whole, generator.get_state()


def seeded(case):
    generator = torch.Generator().manual_seed(11)
    if case["cached"]:
        torch.empty(3).normal_(generator=generator)  # leaves half of a pair behind
    return generator


def coordinates(mesh):
    return [tuple(int(c) for c in torch.unravel_index(torch.tensor(r), mesh)) for r in range(math.prod(mesh))]


def laid_out(shape, stride, held):
    return _in_memory(GlobalPosition(shape, tuple(range(len(shape))), True, held), stride)


def draws_alike(case, coord):
    """Draw the part of one coordinate; return whether values and state are those of one device."""
    whole, state = reference(case)
    shape, mesh, placements = case["shape"], case["mesh"], case["placements"]
    held = _layout.pieces(shape, mesh, coord, placements)
    position = laid_out(shape, case["stride"], held)
    local_shape = _layout.local_shape(shape, mesh, coord, placements) if coord is not None else (0,)
    local, expected = (torch.zeros(local_shape, dtype=case["dtype"]) for _ in range(2))
    for piece in held:
        index = tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))
        piece.view(expected).copy_(whole[index])
    generator = seeded(case)
    with (
        mock.patch.multiple(_draw, MAX_PIECE=case["max_piece"]),
        mock.patch.multiple(_spans, MIN_DIRECT=case["min_direct"]),
    ):
        _draw.draw_into(case["op"], local, position, case["args"], {"generator": generator})
    return torch.equal(local, expected) and torch.equal(generator.get_state(), state)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(cases())
def test_every_rank_draws_its_part(case):
    for coord in (*coordinates(case["mesh"]), None):
        assert draws_alike(case, coord), (case, coord)


NUMELS = (1, 7, 15, 16, 17, 31, 33, 255, 256, 257, 1003)


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_sizes_around_the_blocks_of_normal(op):
    """Every dtype, flat tensors in halves, nothing held, and pieces of few elements."""
    args, dtypes = OPERATORS[op]
    case = {"stride": (1,), "mesh": (2,), "placements": (Shard(0),), "op": op, "args": args, "min_direct": 16}
    for dtype, numel, cached in itertools.product(dtypes, NUMELS, (False, True)):
        for max_piece, coord in itertools.product((16, 100, 2**17), ((0,), (1,), None)):
            one = case | {"shape": (numel,), "dtype": dtype, "max_piece": max_piece, "cached": cached}
            assert draws_alike(one, coord), (one, coord)


def test_every_operator_is_tested():
    assert OPERATORS.keys() == _draw.PIECEWISE_OPS


def test_draws_share_a_scratch():
    """The memory of pieces is used again by the next draw, so that none leaves a hole in the memory of the process."""
    scratch, addresses = _draw.Scratch(), set()
    columns = laid_out((300, 40), (40, 1), _layout.pieces((300, 40), (2,), (1,), (Shard(1),)))
    for op in (aten.uniform_.default, aten.normal_.default):
        local = torch.zeros(300, 20)
        with mock.patch.multiple(_draw, MAX_PIECE=1000):
            _draw.draw_into(op, local, columns, (), {}, scratch)
        addresses.add(scratch.take(1, local).data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("broken", ["tail", "scalar", "words"])
def test_the_comparison_sees_a_wrong_walk(broken, monkeypatch):
    """A cut that `normal_` does not allow, its other algorithm, a skip that is one word short."""
    op = aten.bernoulli_.float if broken == "words" else aten.normal_.default
    case = {"shape": (50, 7), "stride": (7, 1), "mesh": (2,), "placements": (Shard(0),), "op": op}
    case |= {"args": OPERATORS[op][0], "dtype": torch.float32, "max_piece": 2**17, "min_direct": 16, "cached": False}
    if broken == "scalar":
        case["stride"] = (1, 50)
    assert draws_alike(case, (1,))
    if broken == "tail":
        monkeypatch.setattr(_draw, "NORMAL_BLOCK", 1)
    elif broken == "scalar":
        monkeypatch.setattr(_draw, "_scalar_normal", aten.normal_.default)
    else:
        skip = _draw.skip_words
        monkeypatch.setattr(_draw, "skip_words", lambda count, generator: skip(count - 2, generator))
    assert not draws_alike(case, (1,))


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_a_draw_of_the_shard_alone_is_another_one(op):
    """Every rank but the first, drawing for its shard as stock torch does, gets values of another rank's."""
    args, dtypes = OPERATORS[op]
    case = {"shape": (26, 7), "stride": (7, 1), "op": op, "args": args, "dtype": dtypes[0], "cached": False}
    whole, state = reference(case)
    generator = seeded(case)
    local = torch.zeros(13, 7, dtype=dtypes[0])
    op(local, *args, generator=generator)
    assert not torch.equal(local, whole[13:])
    assert not torch.equal(generator.get_state(), state)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 4), st.integers(1, 3))
def test_windows_on_the_batch(case, count, outer):
    """Parts of parts of a batch, of tensors of any memory order, plain or sharded."""
    rows, *rest = case["shape"]
    order = sorted(range(len(case["shape"])), key=lambda d: -case["stride"][d])
    if rows < 2:
        return
    shape = (rows * count * outer, *rest)
    case = {**case, "stride": strides(shape, order, gap=0)}
    local_stride = strides(case["shape"], order, gap=0)
    whole, state = reference(case, shape)
    for index in range(count):
        held = _layout.pieces(case["shape"], case["mesh"], (0,) * len(case["mesh"]), case["placements"])
        position = laid_out(case["shape"], local_stride, held)
        for window in (BatchWindow(index, count), BatchWindow(outer - 1, outer)):
            position = _cut(position, window)
        generator = seeded(case)
        local_shape = _layout.local_shape(case["shape"], case["mesh"], (0,) * len(case["mesh"]), case["placements"])
        local, expected = (torch.zeros(local_shape, dtype=case["dtype"]) for _ in range(2))
        first = ((outer - 1) * count + index) * rows
        for piece in held:
            index_ = tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))
            piece.view(expected).copy_(whole[first : first + rows][index_])
        _draw.draw_into(case["op"], local, position, case["args"], {"generator": generator})
        assert torch.equal(local, expected), case
        assert torch.equal(generator.get_state(), state), case


def test_scratch_is_bounded_for_every_memory_order(monkeypatch):
    sizes = []
    for name in ("new_empty", "empty_permuted"):
        owner = torch.Tensor if name == "new_empty" else torch
        original = getattr(owner, name)

        def spy(*args, _original=original, **kwargs):
            made = _original(*args, **kwargs)
            sizes.append(made.numel())
            return made

        monkeypatch.setattr(owner, name, spy)
    shape = (400, 701)
    for stride in [(801, 1), (1, 700), (900, 1)]:
        for op, (args, dtypes) in OPERATORS.items():
            for placement in (Shard(0), Shard(1)):
                held = _layout.pieces(shape, (2,), (1,), (placement,))
                local = torch.zeros(_layout.local_shape(shape, (2,), (1,), (placement,)), dtype=dtypes[0])
                _draw.draw_into(op, local, laid_out(shape, stride, held), args, {})
    assert 0 < max(sizes) <= _draw.MAX_PIECE + 16
