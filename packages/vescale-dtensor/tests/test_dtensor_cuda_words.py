"""Which random word each element of a CUDA draw gets, against the kernels' loops run thread by thread."""

import itertools

import pytest

from vescale.dtensor._random.cuda_replay.geometry import (
    Grid,
    bernoulli_word,
    dropout_advance,
    dropout_rounds,
    dropout_word,
    nullary_advance,
    nullary_draws,
    nullary_rounds,
    nullary_word,
    split_tree,
    vector_size,
)

GRIDS = [Grid(3, 4, block=4), Grid(2, 11, block=4), Grid(1, 3, block=2)]


def num_threads(numel, grid):
    """Threads of a launch: full blocks, as many as the elements need, at most what the device holds."""
    blocks = min(grid.num_sms * (grid.threads_per_sm // grid.block), -(-numel // grid.block))
    return grid.block * blocks


def run_fill_kernel(numel, values, grid):
    """The grid-stride loop of the fills: `words[element]`, and the offset reserved for it."""
    threads, words = num_threads(numel, grid), {}
    rounded = ((numel - 1) // (threads * values) + 1) * threads * values
    for thread in range(threads):
        for block, linear in enumerate(range(thread, rounded, threads * values)):
            for lane in range(values):
                if linear + threads * lane < numel:
                    words[linear + threads * lane] = (thread, block, lane)
    return words, ((numel - 1) // (threads * values) + 1) * 4


def run_dropout_kernel(numel, vector, grid):
    """The loop of the vectorized dropout kernel, each thread with its own counter of blocks."""
    threads, words = num_threads(numel, grid), {}
    for thread in range(threads):
        block = 0
        for linear in range(thread * vector, numel, threads * vector):
            num_blocks = -(-vector // 4)
            for place in range(vector):
                words[linear + place] = (thread, block + place // 4, place % 4)
            block += num_blocks
    return words, ((numel - 1) // (threads * 4) + 1) * 4


@pytest.mark.parametrize("values", [4, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_fills_of_every_size(values, grid):
    for numel in range(1, 3 * values * grid.most_threads + 3):
        words, advance = run_fill_kernel(numel, values, grid)
        assert [words[e] for e in range(numel)] == [nullary_word(e, values, grid) for e in range(numel)], numel
        assert nullary_advance(numel, values, grid) == advance, numel


@pytest.mark.parametrize("vector", [2, 4, 8])
@pytest.mark.parametrize("grid", GRIDS)
def test_dropout_of_every_size(vector, grid):
    for numel in range(vector, 3 * vector * grid.most_threads + 3, vector):
        words, advance = run_dropout_kernel(numel, vector, grid)
        assert [words[e] for e in range(numel)] == [dropout_word(e, vector, grid) for e in range(numel)], numel
        assert dropout_advance(numel, grid) == advance, numel


def test_dropout_without_vectors_is_a_fill():
    grid = GRIDS[0]
    for numel in (1, 12, 13, 50, 145):
        words, advance = run_fill_kernel(numel, 4, grid)
        assert [words[e] for e in range(numel)] == [dropout_word(e, 1, grid) for e in range(numel)]
        assert dropout_advance(numel, grid) == advance


@pytest.mark.parametrize(
    "rounds, word",
    [
        *((nullary_rounds(values, GRIDS[0]), lambda e, v=values: nullary_word(e, v, GRIDS[0])) for values in (2, 4)),
        *((dropout_rounds(v, GRIDS[0]), lambda e, v=v: dropout_word(e, v, GRIDS[0])) for v in (1, 2, 4, 8)),
    ],
)
def test_a_window_is_a_draw_from_a_shifted_generator(rounds, word):
    for number, element in itertools.product(range(4), range(rounds.window)):
        subsequence, block, lane = word(element)
        shifted = (subsequence, block + number * rounds.offset // 4, lane)
        assert word(number * rounds.window + element) == shifted
        if number:
            assert word(number * rounds.window + element) != (
                subsequence,
                block + (number - 1) * rounds.offset // 4,
                lane,
            )


def test_the_loop_of_bernoulli():
    for numel in range(1, 50):
        words = {}
        for thread in range(-(-numel // 4)):
            words |= {thread * 4 + lane: (thread, 0, lane) for lane in range(4) if thread * 4 + lane < numel}
        assert [words[e] for e in range(numel)] == [bernoulli_word(e) for e in range(numel)]


def test_vectors_by_size_and_address():
    # 16 bytes at most, aligned, without a remainder
    assert [vector_size(64, itemsize, 0, 16 // itemsize) for itemsize in (2, 4, 8)] == [8, 4, 2]
    assert [vector_size(64, 4, 4 * shift, 4) for shift in range(5)] == [4, 1, 2, 1, 4]
    assert [vector_size(64, 2, 2 * shift, 8) for shift in (0, 1, 2, 4, 8)] == [8, 1, 2, 4, 8]
    assert [vector_size(numel, 4, 0, 4) for numel in (5, 6, 7, 8)] == [1, 2, 1, 4]


def halves(start, numel, itemsize, limit):
    """What the tensor iterator does: a stack of ranges, the back of which is halved until it fits."""
    stack, found = [(start, numel)], []
    while stack:
        start, numel = stack.pop()
        if numel > limit or 1 + (numel - 1) * itemsize > limit:
            stack += [(start + numel // 2, numel - numel // 2), (start, numel // 2)]
        else:
            found.append((start, numel))
    return found


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_split_of_large_tensors(itemsize):
    for numel in range(1, 200):
        assert split_tree(numel, itemsize, 31) == halves(0, numel, itemsize, 31)
    assert split_tree(2**31 - 1, 1, 2**31 - 1) == [(0, 2**31 - 1)]
    assert split_tree(2**29, 4, 2**31 - 1) == [(0, 2**29)]
    assert split_tree(2**29 + 1, 4, 2**31 - 1) == [(0, 2**28), (2**28, 2**28 + 1)]


def test_a_split_draw_reserves_its_own_advance_first():
    grid = Grid(3, 4, block=4, index_limit=400)  # 12 threads, at most 100 elements of 4 bytes
    for numel in (90, 101, 250, 401):
        leaves = halves(0, numel, 4, 400)
        offset = run_fill_kernel(numel, 4, grid)[1] if len(leaves) > 1 else 0
        expected = []
        for start, size in leaves:
            expected.append((offset, start, size))
            offset += run_fill_kernel(size, 4, grid)[1]
        assert nullary_draws(numel, 4, 4, grid) == (tuple(expected), offset)


def test_the_geometry_of_known_devices():
    assert Grid(108, 2048).most_threads == 221_184
    assert Grid(132, 2048).most_threads == 270_336
    assert Grid(40, 1024).most_threads == 40_960
    assert Grid(128, 1536).most_threads == 196_608


def test_a_map_that_ignores_the_lanes_is_seen():
    grid = GRIDS[0]
    words, _ = run_fill_kernel(60, 2, grid)
    assert [words[e] for e in range(60)] != [nullary_word(e, 4, grid) for e in range(60)]
    words, _ = run_dropout_kernel(144, 8, grid)
    assert [words[e] for e in range(144)] != [dropout_word(e, 4, grid) for e in range(144)]
