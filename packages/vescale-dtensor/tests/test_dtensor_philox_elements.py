"""Any box of a draw, computed in pieces of any size, holds the elements of the whole draw."""

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale.dtensor._random.philox import cipher as _cipher
from vescale.dtensor._random.philox import elements as _elements
from vescale.dtensor._random.philox import values as _values
from vescale.dtensor._random.philox.cipher import Key, encrypt

KEY = Key(0x0123456789ABCDEF, 2**64 - 2)  # the counter wraps around within a few blocks
DISTRIBUTIONS = [
    _values.Uniform(torch.float32),
    _values.Uniform(torch.float64),
    _values.Normal(torch.float32),
    _values.Normal(torch.bfloat16),
    _values.Bernoulli(torch.bool, 0.5),
    _values.Integers(torch.int64, -5, 11),
]
CPU = torch.device("cpu")


def sample(distribution, shape, box, limit):
    result = torch.full(box[1], -77, dtype=torch.float64)
    written = torch.zeros(box[1], dtype=torch.int64)
    with mock.patch.object(_elements, "ELEMENTS_AT_A_TIME", {"cpu": limit}):
        for index, values in _elements.sample_box(distribution, KEY, shape, box, CPU):
            result[index] = values.to(torch.float64)
            written[index] += 1
    assert (written == 1).all()  # every element once
    return result


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, (offsets, sizes)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(boxes(), st.sampled_from(DISTRIBUTIONS), st.integers(1, 40))
def test_boxes_are_cut_out_of_the_whole(where, distribution, limit):
    shape, box = where
    whole = sample(distribution, shape, ((0,) * len(shape), shape), 10**6)
    index = tuple(slice(o, o + s) for o, s in zip(*box, strict=True))
    assert torch.equal(sample(distribution, shape, box, limit), whole[index])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(boxes(), st.integers(0, 2**62))
def test_elements_use_the_words_of_their_index(where, start):
    """Against the definition, with rows so far inside a tensor that indices need more than 32 bits."""
    shape, (offsets, sizes) = where
    shape, offsets, sizes = (start // math.prod(shape) + 8, *shape), (start // math.prod(shape), *offsets), (1, *sizes)
    if math.prod(shape) >= 2**63:
        return
    actual = sample(_values.Uniform(torch.float32), shape, (offsets, sizes), 10**6).flatten()
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for position, inside in enumerate(torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist()):
        element = sum((o + i) * stride for o, i, stride in zip(offsets, inside, strides, strict=True))
        counter = (KEY.offset + element // 4) % 2**64
        word = encrypt((counter % 2**32, counter >> 32, 0, 0), KEY.seed)[element % 4]
        assert float(actual[position]) == (word % 2**24) / 2**24


def test_work_and_scratch_follow_the_shard_not_the_tensor(monkeypatch):
    """One row of a tensor with 2**50 elements; and runs of five elements in pieces of whole runs."""
    counted = []
    real = _elements.blocks

    def counting(key, first, count, device):
        counted.append(len(first) * count)
        return real(key, first, count, device)

    monkeypatch.setattr(_elements, "blocks", counting)
    uniform, cpu = _values.Uniform(torch.float32), CPU
    box = ((2**30 + 1, 0), (1, 2**20))
    pieces = list(_elements.sample_box(uniform, Key(1, 2), (2**31, 2**20), box, cpu))
    assert sum(values.numel() for _, values in pieces) == 2**20
    assert sum(counted) == 2**18
    assert max(counted) <= _cipher.BLOCKS_AT_A_TIME
    counted.clear()
    pieces = list(_elements.sample_box(uniform, Key(1, 2), (10**5, 100), ((0, 37), (10**5, 5)), cpu))
    assert sum(values.numel() for _, values in pieces) == 5 * 10**5
    assert max(counted) <= 3 * _cipher.BLOCKS_AT_A_TIME
    assert sum(counted) <= 3 * 10**5
