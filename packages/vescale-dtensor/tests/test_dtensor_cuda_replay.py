"""Shards of CUDA draws by replay, on a simulated device of a dozen threads: the elements and the end state of stock."""

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale.dtensor import Replicate, Shard
from vescale.dtensor._layout.shards import local_shape, pieces
from vescale.dtensor._placements import InterleavedShard, RaggedShard
from vescale.dtensor._random.cuda_replay import replay as _replay
from vescale.dtensor._random.cuda_replay import replay_bernoulli, replay_fill, replay_native_dropout
from vescale.dtensor._random.cuda_replay import selftest as _selftest
from vescale.dtensor._random.cuda_replay.geometry import Draw, Rounds
from vescale.dtensor._random.cuda_replay.windows import Request, plan

spec = importlib.util.spec_from_file_location("simulated_cuda", Path(__file__).with_name("simulated_cuda.py"))
simulated_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated_cuda)
Simulated = simulated_cuda.Simulated

aten = torch.ops.aten
CPU = torch.device("cpu")
FILLS = {
    "float32": (aten.uniform_.default, torch.float32, (0.0, 2.0)),
    "float64": (aten.uniform_.default, torch.float64, (0.0, 1.0)),
    "bernoulli": (aten.bernoulli_.float, torch.float32, (0.3,)),
    "2^27": (getattr(aten.random_, "from"), torch.int64, (0, 2**27)),
    "2^28": (getattr(aten.random_, "from"), torch.int64, (0, 2**28)),
    "2^33": (getattr(aten.random_, "from"), torch.int64, (0, 2**33)),
    "unbounded": (aten.random_.default, torch.int64, ()),
}
T = 12  # threads of the simulated device


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Ask the device again in each test, with scratch and launches of a few windows."""
    _selftest.forget()
    monkeypatch.setattr(_selftest, "NUM_TRIAL_PROBABILITIES", 77)
    monkeypatch.setattr(_replay, "SCRATCH_NUMEL", 150)
    monkeypatch.setattr(_replay, "DIRECT_NUMEL", 200)


def memory(shape, layout, dtype, fill=None):
    """A dense tensor whose dims vary in memory as `layout` says."""
    tensor = torch.empty_permuted(shape, layout, dtype=dtype)
    return tensor if fill is None else tensor.fill_(fill)


def flat(tensor, layout):
    return tensor.permute(*layout).view(-1)


def views_of(shape, mesh_shape, coord, placements):
    parts = pieces(shape, mesh_shape, coord, placements)
    return lambda local: [(part.box, part.view(local)) for part in parts]


def slices(box):
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def check_fill(backend, name, shape, layout, mesh_shape, placements):
    op, dtype, args = FILLS[name]
    whole = memory(shape, layout, dtype)
    backend.default.set_offset(8)
    backend.fill(op, flat(whole, layout), args, {}, backend.default)
    after = backend.default.get_offset()
    for coord in itertools.product(*map(range, mesh_shape)):
        local = torch.empty(local_shape(shape, mesh_shape, coord, placements), dtype=dtype)
        views = views_of(shape, mesh_shape, coord, placements)(local)
        backend.default.set_offset(8)
        options = {"shape": shape, "layout": layout, "dtype": dtype, "device": CPU, "args": args}
        assert replay_fill(op, views, backend=backend, **options)
        assert backend.default.get_offset() == after
        for box, view in views:
            assert torch.equal(view, whole[slices(box)]), (name, shape, coord, placements)


# ------------------------------------------------------------------------------------------------- fills


@pytest.mark.parametrize("name", FILLS)
def test_sizes_around_the_rounds_of_the_loop(name):
    backend = Simulated()
    for numel in (T + 1, 2 * T, 2 * T + 1, 4 * T - 1, 4 * T, 4 * T + 1, 8 * T, 8 * T + 1, 8 * T + 8, 301):
        for num_ranks in (1, 2, 3, 7):
            check_fill(backend, name, (numel,), (0,), (num_ranks,), (Shard(0),))


LAYOUTS = [
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 2), (Shard(1), Shard(1))),
    ((3,), (InterleavedShard(1, 2),)),
    ((2, 2), (InterleavedShard(0, 3), Shard(2))),
    ((3,), (RaggedShard((0, 1), (1, 3, 2)),)),
    ((2,), (Replicate(),)),
    ((4,), (Shard(2),)),
]


@pytest.mark.parametrize("mesh_shape, placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["float32", "2^28"])
def test_every_placement(name, mesh_shape, placements):
    check_fill(Simulated(), name, (6, 12, 5), (0, 1, 2), mesh_shape, placements)


@pytest.mark.parametrize("layout", [(2, 0, 1), (0, 2, 1)])
def test_dense_tensors_in_another_memory_order(layout):
    for mesh_shape, placements in LAYOUTS[:4]:
        check_fill(Simulated(), "float32", (6, 12, 5), layout, mesh_shape, placements)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(FILLS)),
    shape=st.lists(st.integers(1, 14), min_size=1, max_size=3).map(tuple),
    block=st.sampled_from([1, 2, 4]),
    num_sms=st.integers(1, 4),
    index_limit=st.sampled_from([2**31 - 1, 700, 1500]),
    num_ranks=st.integers(1, 5),
    data=st.data(),
)
def test_any_device_and_shard(name, shape, block, num_sms, index_limit, num_ranks, data):
    backend = Simulated(num_sms=num_sms, threads_per_sm=4, block=block, index_limit=index_limit)
    if math.prod(shape) <= backend.shape.most_threads:
        shape = (*shape[:-1], shape[-1] + backend.shape.most_threads)
    _selftest.forget()
    dim = data.draw(st.integers(0, len(shape) - 1))
    layout = tuple(data.draw(st.permutations(range(len(shape)))))
    check_fill(backend, name, shape, layout, (num_ranks,), (Shard(dim),))


@pytest.mark.parametrize("name", ["float32", "float64", "2^28"])
def test_tensors_that_are_split(name):
    backend = Simulated(index_limit=900)  # 225 or 112 elements
    for numel in (112, 113, 225, 226, 500, 901):
        check_fill(backend, name, (numel,), (0,), (3,), (Shard(0),))
        check_fill(backend, name, (5, numel // 5), (0, 1), (2,), (Shard(1),))


def test_a_rank_without_elements_only_moves_the_generator():
    backend = Simulated()
    check_fill(backend, "float32", (2, 90), (0, 1), (4,), (Shard(0),))
    backend.launches.clear()
    options = {"shape": (10, 60), "dtype": torch.float32, "device": CPU}
    assert replay_fill(aten.uniform_.default, [], backend=backend, **options)
    assert backend.launches == []


def test_row_shards_draw_little_more_than_their_elements():
    backend, window = Simulated(), 4 * T
    options = {"shape": (100, 48), "dtype": torch.float32, "device": CPU}
    views = views_of((100, 48), (4,), (2,), (Shard(0),))(torch.empty(25, 48))
    replay_fill(aten.uniform_.default, views, backend=backend, **options)
    backend.launches.clear()
    replay_fill(aten.uniform_.default, views, backend=backend, **options)
    assert sum(backend.launches) == 25 * 48  # it starts with a window
    views = views_of((100, 48), (3,), (1,), (Shard(0),))(torch.empty(34, 48))
    backend.launches.clear()
    options["shape"] = (101, 47)
    views = views_of((101, 47), (3,), (1,), (Shard(0),))(torch.empty(34, 47))
    replay_fill(aten.uniform_.default, views, backend=backend, **options)
    assert 34 * 47 < sum(backend.launches) <= 34 * 47 + window


def test_a_cut_sequence_draws_little_more_than_its_elements():
    """Each row of the batch holds a flat range of the shard, longer than a window."""
    backend, shape, window = Simulated(), (5, 200, 7), 4 * T
    local = torch.empty(5, 50, 7)
    options = {"shape": shape, "dtype": torch.float32, "device": CPU}
    views = views_of(shape, (4,), (2,), (Shard(1),))(local)
    replay_fill(aten.uniform_.default, views, backend=backend, **options)
    backend.launches.clear()
    replay_fill(aten.uniform_.default, views, backend=backend, **options)
    assert local.numel() < sum(backend.launches) <= local.numel() + 5 * window
    check_fill(backend, "float32", shape, (0, 1, 2), (4,), (Shard(1),))
    check_dropout(backend, shape, torch.bfloat16, (4,), (Shard(1),))


def test_a_generator_of_the_user():
    backend, generator = Simulated(), simulated_cuda.Generator(7, 40)
    whole, local = torch.empty(90), torch.empty(30)
    backend.fill(aten.uniform_.default, whole, (), {}, simulated_cuda.Generator(7, 40))
    options = {"shape": (90,), "dtype": torch.float32, "device": CPU, "generator": generator}
    assert replay_fill(aten.uniform_.default, [(((30,), (30,)), local)], backend=backend, **options)
    assert torch.equal(local, whole[30:60])
    assert (generator.get_offset(), backend.default.get_offset()) == (48, 8)


@pytest.mark.parametrize("shift", [4, -4])
def test_a_draw_at_another_offset_is_seen(shift):
    backend = Simulated()
    backend.default.set_offset(8 + shift)
    local = torch.empty(90)
    options = {"shape": (90,), "dtype": torch.float32, "device": CPU}
    assert replay_fill(aten.uniform_.default, [(((0,), (90,)), local)], backend=backend, **options)
    whole = torch.empty(90)
    backend.default.set_offset(8)
    backend.fill(aten.uniform_.default, whole, (), {}, backend.default)
    assert not torch.equal(local, whole)


# ------------------------------------------------------------------------------------------------- dropout


def dropped(local, find, **options):
    """Output and mask, or None where that is left to the operator."""
    out, mask = torch.empty_like(local), torch.empty_like(local, dtype=torch.bool)
    return (out, mask) if replay_native_dropout(local, out, mask, find, **options) else None


def check_dropout(backend, shape, dtype, mesh_shape, placements, layout=None):
    layout = layout or tuple(range(len(shape)))
    whole = memory(shape, layout, dtype)
    flat(whole, layout).copy_(torch.arange(whole.numel()) % 97 - 50)
    backend.default.set_offset(8)
    expected = [memory(shape, layout, kind) for kind in (dtype, torch.bool)]
    for target, drawn in zip(expected, backend.dropout(flat(whole, layout), 0.4), strict=True):
        flat(target, layout).copy_(drawn)
    after = backend.default.get_offset()
    for coord in itertools.product(*map(range, mesh_shape)):
        find = views_of(shape, mesh_shape, coord, placements)
        local = torch.empty(local_shape(shape, mesh_shape, coord, placements), dtype=dtype)
        for box, view in find(local):
            view.copy_(whole[slices(box)])
        backend.default.set_offset(8)
        found = dropped(local, find, shape=shape, layout=layout, p=0.4, backend=backend)
        assert found
        assert backend.default.get_offset() == after
        for result, target in zip(found, expected, strict=True):
            assert all(torch.equal(view, target[slices(box)]) for box, view in find(result)), (shape, coord)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dropout_of_any_size(dtype):
    """The kernel reads 1, 2, 4 or 8 neighbours; 2 and 8 use more words than they reserve."""
    backend = Simulated()
    for numel in (T + 1, 2 * T + 2, 48, 49, 50, 52, 56, 96, 97, 98, 100, 104, 200, 201, 202, 204, 8 * T + 8, 408):
        for num_ranks in (1, 3):
            check_dropout(backend, (numel,), dtype, (num_ranks,), (Shard(0),))


@pytest.mark.parametrize("mesh_shape, placements", LAYOUTS, ids=str)
def test_dropout_with_every_placement(mesh_shape, placements):
    check_dropout(Simulated(), (6, 12, 5), torch.bfloat16, mesh_shape, placements)


@pytest.mark.parametrize("shape", [(6, 4, 3), (7, 9, 5), (8, 9, 7), (2, 5, 11)])
def test_dropout_of_uneven_shards(shape):
    for mesh_shape, placements in ((2, 3), (Shard(0), Shard(1))), ((2, 2), (Shard(1), Shard(1))), ((4,), (Shard(2),)):
        check_dropout(Simulated(), shape, torch.bfloat16, mesh_shape, placements)


def test_dropout_in_another_memory_order():
    check_dropout(Simulated(), (6, 12, 5), torch.float32, (2,), (Shard(1),), (1, 2, 0))


@pytest.mark.parametrize("layout, is_dense, cut", [((1, 0), True, 0), ((0, 1), False, 3), ((1, 0), False, 1)])
def test_dropout_one_by_one_is_numbered_in_logical_order(layout, is_dense, cut):
    """An odd number of elements, or gaps in memory."""
    backend, shape = Simulated(), (7, 9 if is_dense else 12)
    larger = [size + cut for size in shape]
    whole = torch.empty_permuted(larger, layout).fill_(1.0)[: shape[0], : shape[1]]
    expected = backend.dropout(whole, 0.4)
    for coord in range(2):
        find = views_of(shape, (2,), (coord,), (Shard(0),))
        local = torch.ones(local_shape(shape, (2,), (coord,), (Shard(0),)))
        backend.default.set_offset(8)
        options = {"shape": shape, "layout": layout, "is_dense": is_dense, "p": 0.4, "backend": backend}
        found = dropped(local, find, **options)
        for result, target in zip(found, expected, strict=True):
            assert all(torch.equal(view, target[slices(box)]) for box, view in find(result))
    if not is_dense:
        backend.default.set_offset(8)
        wrong = dropped(local, find, shape=shape, p=0.4, backend=backend)
        assert not torch.equal(wrong[1], found[1])  # 84 elements in vectors of 4


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    numel=st.integers(13, 700),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
    cuts=st.lists(st.floats(0, 1), min_size=0, max_size=4),
    widest=st.sampled_from([4, 8]),
)
def test_dropout_of_any_flat_ranges(numel, dtype, cuts, widest):
    _selftest.forget()
    edges = sorted({0, numel, *(int(cut * numel) for cut in cuts)})
    backend = Simulated(widest=widest)
    parts = [stop - start for start, stop in itertools.pairwise(edges)]
    check_dropout(backend, (numel,), dtype, (len(parts),), (RaggedShard((0,), tuple(parts)),))


def test_dropout_that_draws_nothing_is_left_to_the_operator():
    find = views_of((90,), (1,), (0,), (Replicate(),))
    for p, train in ((1.0, True), (0.5, False)):
        assert not dropped(torch.ones(90), find, shape=(90,), p=p, train=train, backend=Simulated())


# ------------------------------------------------------------------------------------------------- bernoulli(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool], ids=str)
@pytest.mark.parametrize("mesh_shape, placements", LAYOUTS, ids=str)
def test_bernoulli_with_probabilities(dtype, mesh_shape, placements):
    backend, shape = Simulated(), (6, 12, 5)
    p, whole = torch.linspace(0, 1, 360, dtype=torch.float64).view(shape), torch.empty(shape, dtype=dtype)
    backend.bernoulli(whole, p, backend.default)
    after = backend.default.get_offset()
    assert after == 8 + 12
    for coord in itertools.product(*map(range, mesh_shape)):
        find = views_of(shape, mesh_shape, coord, placements)
        local = torch.empty(local_shape(shape, mesh_shape, coord, placements), dtype=torch.float64)
        out = torch.empty_like(local, dtype=dtype)
        for box, view in find(local):
            view.copy_(p[slices(box)])
        backend.default.set_offset(8)
        assert replay_bernoulli(local, out, find, shape=shape, backend=backend, least=1)
        assert backend.default.get_offset() == after
        assert all(torch.equal(view, whole[slices(box)]) for box, view in find(out))


def test_bernoulli_of_little_is_left_to_the_operator():
    find = views_of((90,), (1,), (0,), (Replicate(),))
    p = torch.full((90,), 0.5)
    assert not replay_bernoulli(p, torch.empty(90), find, shape=(90,), backend=Simulated())


def test_the_generator_of_the_simulation():
    """Published vectors of Philox4x32-10."""
    numpy = simulated_cuda.np
    zero = numpy.zeros(1, numpy.uint64)
    assert [int(w[0]) for w in simulated_cuda.philox(0, zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = zero + numpy.uint64(2**64 - 1)
    words = simulated_cuda.philox(2**64 - 1, ones, ones)
    assert [int(w[0]) for w in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


# ------------------------------------------------------------------------------------------------- plans


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    numel=st.integers(1, 400),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    window=st.sampled_from([8, 24, 48]),
    multiple=st.sampled_from([1, 2, 4, 8]),
    direct=st.booleans(),
)
def test_a_plan_covers_a_flat_range_once(numel, cut, window, multiple, direct):
    numel *= multiple
    start, stop = sorted(int(part * numel) for part in cut)
    if start == stop:
        return
    box = ((start,), (stop - start,))
    request = Request((numel,), (box,), (direct,), (Draw(4, 0, numel),), Rounds(window, 8), multiple, 100, 300)
    covered = []
    for launch in plan(request):
        assert launch.start % window == 0
        assert launch.offset == 4 + launch.start // window * 8
        assert launch.numel % multiple == 0
        assert launch.start + launch.numel <= numel
        assert launch.numel <= (max(100, window) if launch.direct is None else 300)
        if launch.direct is None:
            covered += [
                i for c in launch.copies for i in range(launch.start + c.first, launch.start + c.first + c.sizes[0])
            ]
        else:
            covered += range(launch.start, launch.start + launch.numel)
    assert sorted(covered) == list(range(start, stop))
    spare = window if multiple == 1 else 2 * window
    assert sum(launch.numel for launch in plan(request)) <= stop - start + spare
