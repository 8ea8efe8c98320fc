"""Layouts cut no block, pad between tensors only and are nearly as small as possible: every small case, and many."""

import itertools
import math
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vescale.optim._buckets import layout as _layout
from vescale.optim._buckets.layout import BlockedTensor, Layout, plan_layout


def check(layout, tensors, align, num_pieces=1):
    """Assert what every layout promises."""
    assert layout.shard_numel % (align * num_pieces) == 0
    if layout.numel == 0:
        assert not any(tensor.numel for tensor in tensors)
        return
    end = 0
    for start, stop, tensor in sorted(_places(layout, tensors), key=lambda place: place[:2]):
        assert start >= end
        assert start % align == 0
        end = stop
        first = (start // layout.shard_numel + 1) * layout.shard_numel
        for boundary in range(first, end, layout.shard_numel):
            assert (boundary - start) % tensor.block == 0
    assert end <= layout.numel


def _places(layout, tensors):
    return [(start, start + t.numel, t) for start, t in zip(layout.starts, tensors, strict=True)]


def exists(tensors, shard_numel, num_shards, align, after=0):
    """Tell by trying all positions whether tensors can be placed, in order."""
    if not tensors:
        return True
    first, *rest = tensors
    for start in range(-(-after // align) * align, shard_numel * num_shards - first.numel + 1, align):
        cuts = [b for b in range(shard_numel, shard_numel * num_shards, shard_numel) if start < b < start + first.numel]
        allowed = all((cut - start) % first.block == 0 for cut in cuts)
        if allowed and exists(rest, shard_numel, num_shards, align, start + first.numel):
            return True
    return False


def smallest(tensors, num_shards, align):
    return next(size for size in itertools.count(align, align) if exists(tensors, size, num_shards, align))


def smallest_in_any_order(tensors, num_shards, align):
    return min(smallest(order, num_shards, align) for order in set(itertools.permutations(tensors)))


def bound(tensors, num_shards, align, unit):
    """Return the size that the guarantee gives for one common multiple of align and steps."""
    items = [(-(-t.numel // align) * align, math.lcm(t.block, align)) for t in tensors]
    total = sum(size for size, _ in items)
    longest = max((min(size, step) for size, step in items if size and step > align), default=align)
    others = max((size for size, step in items if size and step > align and unit % min(step, size)), default=0)
    enough = max(-(-(total + (num_shards - 1) * (longest - align)) // num_shards), longest, others, align)
    return -(-enough // unit) * unit


def test_the_check_sees_what_is_wrong():
    check(Layout((0, 4), 6, 2), [BlockedTensor(4, 4), BlockedTensor(4, 2)], 1)
    for layout, tensors, align in [
        (Layout((0, 4), 6, 2), [BlockedTensor(4, 4), BlockedTensor(4, 4)], 1),  # a cut block
        (Layout((0, 3), 6, 2), [BlockedTensor(4), BlockedTensor(4)], 1),  # an overlap
        (Layout((0, 9), 6, 2), [BlockedTensor(4), BlockedTensor(4)], 1),  # outside
        (Layout((0, 5), 6, 2), [BlockedTensor(4), BlockedTensor(4)], 2),  # not aligned
    ]:
        with pytest.raises(AssertionError):
            check(layout, tensors, align)


KINDS = [BlockedTensor(n, b) for n in range(1, 9) for b in range(1, n + 1) if n % b == 0]


@pytest.mark.parametrize("align", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_every_pair_of_small_tensors(num_shards, align):
    """In the given order the size is the smallest there is; the layout, which may reorder, is no larger."""
    for tensors in itertools.product(KINDS, repeat=2):
        layout = plan_layout(tensors, num_shards=num_shards, align=align)
        check(layout, tensors, align)
        in_order, _ = _layout._in_order(_layout._Problem(tensors, num_shards, align))
        assert in_order == smallest(tensors, num_shards, align), tensors
        assert layout.shard_numel <= in_order


@pytest.mark.parametrize("num_shards", [2, 4])
def test_triples(num_shards):
    some = [BlockedTensor(1), BlockedTensor(6, 2), BlockedTensor(6, 3), BlockedTensor(8, 8), BlockedTensor(9, 3)]
    better = 0
    for tensors in itertools.product(some, repeat=3):
        layout = plan_layout(tensors, num_shards=num_shards)
        check(layout, tensors, 1)
        in_order, least = smallest(tensors, num_shards, 1), smallest_in_any_order(tensors, num_shards, 1)
        assert least <= layout.shard_numel <= min(in_order, 1.3 * least), tensors
        better += layout.shard_numel < in_order
    assert better, "packing never helped: is it tried at all?"


def test_the_first_allowed_position_by_trying_all():
    for align in (1, 2):
        sizes, steps, shards = range(align, 9, align), range(align, 5, align), range(align, 8, align)
        for size, step, after, shard in itertools.product(sizes, steps, range(0, 9, align), shards):
            if step > size:
                continue
            allowed = [
                start
                for start in range(after, after + 4 * shard, align)
                if all((b - start) % step == 0 for b in range(0, start + size, shard) if b > start)
            ]
            found = _layout._first_position((size, step), after, shard)
            assert found == (allowed[0] if allowed else None)


@st.composite
def problems(draw):
    align = draw(st.sampled_from([1, 2, 8, 32]))
    tensors = []
    for _ in range(draw(st.integers(0, 12))):
        block = draw(st.sampled_from([1, 1, 2, 3, 16, 48, 100]))
        tensors.append(BlockedTensor(block * draw(st.integers(0, 20)), block))
    return [_as_atom(t) if draw(st.integers(0, 3)) == 0 else t for t in tensors], draw(st.integers(1, 9)), align


def _as_atom(tensor):
    return BlockedTensor(tensor.numel, max(tensor.numel, 1))


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from([1, 1, 2, 3]))
@example(([BlockedTensor(1000, 1000), BlockedTensor(999, 3), BlockedTensor(1001)], 4, 16), 1)
def test_no_block_is_cut_and_the_padding_is_bounded(problem, num_pieces):
    tensors, num_shards, align = problem
    layout = plan_layout(tensors, num_shards=num_shards, align=align, num_pieces=num_pieces)
    check(layout, tensors, align, num_pieces)
    assert layout == plan_layout(list(tensors), num_shards=num_shards, align=align, num_pieces=num_pieces)
    steps = sorted({math.lcm(t.block, align) for t in tensors})
    for unit in itertools.accumulate([align * num_pieces, *steps], math.lcm):
        assert layout.shard_numel <= bound(tensors, num_shards, align, unit)
    if all(t.block == 1 for t in tensors):  # the smallest there is, in the given order
        total = sum(-(-t.numel // align) * align for t in tensors)
        piece = align * num_pieces
        assert layout.shard_numel == -(-total // (num_shards * piece)) * piece
        assert list(layout.starts) == sorted(layout.starts)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(2, 3))
def test_whole_tensors_are_spread_nearly_as_well_as_possible(sizes, num_shards):
    layout = plan_layout([BlockedTensor(n, n) for n in sizes], num_shards=num_shards)
    loads = [
        max(sum(n for n, at in zip(sizes, where, strict=True) if at == shard) for shard in range(num_shards))
        for where in itertools.product(range(num_shards), repeat=len(sizes))
    ]
    assert min(loads) <= layout.shard_numel <= 13 / 11 * min(loads) + 1


def models():
    hidden, ffn, vocabulary = 1024, 2816, 32000
    layer = [(hidden, hidden)] * 4 + [(ffn, hidden)] * 2 + [(hidden, ffn)] + [(hidden, 1)] * 2
    yield "rows", [BlockedTensor(n * m, m) for n, m in [(vocabulary, hidden), *layer * 24]], 64, 1.001
    yield "blocks of 32 rows", [BlockedTensor(n * m, 32 * m if n % 32 == 0 else m) for n, m in layer * 24], 64, 1.01
    yield "matrices", [BlockedTensor(n * m, n * m) for n, m in layer * 24], 8, 1.001
    yield "matrices of few layers", [BlockedTensor(n * m, n * m) for n, m in layer * 3], 8, 1.2  # 9 large ones on 8
    yield "elements", [BlockedTensor(n * m) for n, m in layer * 24], 64, 1.001
    yield "experts", [BlockedTensor(64 * n * m, n * m) for n, m in [(768, 2048), (2048, 768)] * 24], 64, 1.001
    odd = [(1 + i * 37 % 1009, 1 + i * 53 % 997) for i in range(1000)]
    yield "odd matrices", [BlockedTensor(n * m, n * m) for n, m in odd], 64, 1.01
    yield "odd rows", [BlockedTensor(n * m, m) for n, m in odd], 64, 1.01


@pytest.mark.parametrize("name, tensors, num_shards, ratio", list(models()))
def test_models_waste_little(name, tensors, num_shards, ratio):
    layout = plan_layout(tensors, num_shards=num_shards, align=16)
    check(layout, tensors, 16)
    total = sum(tensor.numel for tensor in tensors)
    assert layout.numel <= ratio * total, f"{name}: {layout.numel / total:.4f}"


@pytest.mark.parametrize("kind", ["rows", "whole", "mixed"])
def test_thousands_of_tensors_take_milliseconds(kind):
    tensors = []
    for i in range(5000):
        rows, columns = 1 + i * 7 % 50, 1 + i * 53 % 2999
        block = {"rows": columns, "whole": rows * columns, "mixed": (1, columns, rows * columns)[i % 3]}[kind]
        tensors.append(BlockedTensor(rows * columns, block))
    times = []
    for _ in range(3):
        start = time.process_time()
        layout = plan_layout(tensors, num_shards=256, align=32)
        times.append(time.process_time() - start)
    check(layout, tensors, 32)
    assert min(times) < 0.1, times  # 20 to 50 ms


def test_nothing_and_nonsense():
    assert plan_layout([], num_shards=2, align=4) == Layout((), 0, 2)
    assert plan_layout([BlockedTensor(0, 7)], num_shards=2, align=4) == Layout((0,), 0, 2)
    assert plan_layout([BlockedTensor(0), BlockedTensor(3)], num_shards=2) == Layout((0, 0), 2, 2)
    with pytest.raises(ValueError, match="a tensor of 6 elements cannot consist of blocks of 4"):
        BlockedTensor(6, 4)
    with pytest.raises(ValueError, match="num_shards, align and num_pieces must be positive, got 0, 1 and 1"):
        plan_layout([], num_shards=0)
