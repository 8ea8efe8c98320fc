"""A random operator drawn in pieces gives the values and the generator state of one whole draw, bit for bit."""

import pytest
import torch

from vescale.dtensor._random.stock.pieces import NORMAL_BLOCK, PIECEWISE_OPS, Scratch, draw_pieces, piece_sizes

aten = torch.ops.aten
RANDOM_FROM = getattr(aten.random_, "from")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)

CASES = [
    *[(aten.uniform_.default, (-0.3, 1.7), dtype) for dtype in FLOATS],
    *[(aten.normal_.default, (0.1, 0.02), dtype) for dtype in FLOATS],
    *[(aten.bernoulli_.float, (0.3,), dtype) for dtype in (*FLOATS, torch.bool, torch.int64)],
    *[(aten.exponential_.default, (1.5,), dtype) for dtype in FLOATS],
    *[(aten.geometric_.default, (0.4,), dtype) for dtype in (*FLOATS, torch.int64)],
    *[(aten.log_normal_.default, (0.2, 0.5), dtype) for dtype in FLOATS],
    *[(aten.cauchy_.default, (0.0, 2.0), dtype) for dtype in FLOATS],
    *[(aten.random_.default, (), dtype) for dtype in (*FLOATS, *INTEGERS, torch.bool)],
    *[(aten.random_.to, (100,), dtype) for dtype in (*FLOATS, *INTEGERS)],
    *[
        (RANDOM_FROM, (-5, 2**27), torch.int64),
        (RANDOM_FROM, (0, 2**28), torch.int64),
        (RANDOM_FROM, (3, 2**33), torch.int64),
    ],
]
NUMELS = (0, 1, 7, 8, 15, 16, 17, 31, 33, 255, 256, 257, 1003)
PIECES = (1, 5, 16, 17, 100, 256, 5000)


def whole(op, args, dtype, numel, generator):
    return op(torch.empty(numel, dtype=dtype), *args, generator=generator)


def in_pieces(op, args, dtype, numel, generator, max_piece):
    out = torch.empty(numel, dtype=dtype)
    for start, piece in draw_pieces(op, numel, dtype, "cpu", args, generator=generator, max_piece=max_piece):
        out[start : start + piece.numel()] = piece
    return out


def generators(*, cached_normal):
    """Two generators in one state; with `cached_normal` they hold the second value of a Box-Muller pair."""
    pair = [torch.Generator().manual_seed(11) for _ in range(2)]
    if cached_normal:
        for generator in pair:
            torch.empty(3).normal_(generator=generator)
    return pair


@pytest.mark.parametrize("cached_normal", [False, True])
@pytest.mark.parametrize(("op", "args", "dtype"), CASES, ids=lambda value: str(value).removeprefix("aten."))
def test_pieces_are_the_whole_draw(op, args, dtype, cached_normal):
    for max_piece in PIECES:
        for numel in (*NUMELS, 2 * max_piece + 5):
            one, other = generators(cached_normal=cached_normal)
            expected = whole(op, args, dtype, numel, one)
            actual = in_pieces(op, args, dtype, numel, other, max_piece)
            assert torch.equal(expected, actual), (numel, max_piece)
            assert torch.equal(one.get_state(), other.get_state()), (numel, max_piece)


def test_every_operator_is_tested():
    assert {op for op, _, _ in CASES} == PIECEWISE_OPS


def test_small_normal_keeps_the_second_value_of_its_pair_for_the_next_draw():
    one, other = generators(cached_normal=False)
    four = torch.empty(4).normal_(generator=one)
    op = aten.normal_.default
    three_and_one = [in_pieces(op, (), torch.float32, numel, other, 2) for numel in (3, 1)]
    assert torch.equal(four, torch.cat(three_and_one))


def test_keyword_arguments_and_the_default_generator():
    torch.manual_seed(3)
    expected = torch.empty(50).normal_(mean=1.0, std=0.5)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    pieces = draw_pieces(
        aten.normal_.default, 50, torch.float32, "cpu", (), {"mean": 1.0, "std": 0.5}, max_piece=NORMAL_BLOCK
    )
    assert torch.equal(expected, torch.cat([piece.clone() for _, piece in pieces]))
    assert torch.equal(state, torch.get_rng_state())


def test_naive_pieces_of_normal_differ():
    """The negative sibling: pieces that ignore the blocks of 16 are not the whole draw."""
    one, other = generators(cached_normal=False)
    expected = whole(aten.normal_.default, (), torch.float32, 100, one)
    naive = torch.cat([torch.empty(25).normal_(generator=other) for _ in range(4)])
    assert not torch.equal(expected, naive)


def test_memory_is_bounded_by_the_piece():
    sizes = piece_sizes(aten.normal_.default, 10**6 + 9, torch.float32, torch.device("cpu"), 1000)
    assert sum(sizes) == 10**6 + 9
    assert max(sizes) <= 1000 + NORMAL_BLOCK - 1
    assert all(size % NORMAL_BLOCK == 0 for size in sizes[:-1])


def test_other_devices_draw_at_once():
    assert piece_sizes(aten.uniform_.default, 1000, torch.float32, torch.device("cuda"), 10) == (1000,)


def test_other_operators_are_refused():
    with pytest.raises(NotImplementedError, match=r"aten\.poisson\.default cannot be drawn in pieces.*aten\.uniform_"):
        next(draw_pieces(aten.poisson.default, 10, torch.float32, "cpu"))
    with pytest.raises(ValueError, match="max_piece must be at least 1 element, got 0"):
        next(draw_pieces(aten.uniform_.default, 10, torch.float32, "cpu", max_piece=0))


def test_bad_arguments_are_refused_also_for_an_empty_tensor():
    with pytest.raises(RuntimeError, match="std >= 0"):
        list(draw_pieces(aten.normal_.default, 0, torch.float32, "cpu", (0.0, -1.0)))


def test_one_scratch_for_several_draws():
    one, other = generators(cached_normal=False)
    scratch = Scratch()
    addresses = set()
    for op, numel in ((aten.normal_.default, 1003), (aten.uniform_.default, 40), (aten.normal_.default, 7)):
        expected = whole(op, (), torch.float32, numel, one)
        pieces = draw_pieces(op, numel, torch.float32, "cpu", generator=other, max_piece=100, scratch=scratch)
        kept = []
        for _, piece in pieces:
            kept.append(piece.clone())
            addresses.add(piece.data_ptr())
        assert torch.equal(expected, torch.cat(kept))
    assert len(addresses) == 1
