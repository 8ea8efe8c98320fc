"""Shards of CUDA draws by replay against the native operators, for every coordinate of a pretended mesh."""

import itertools
import math
import warnings

import pytest
import torch

from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale.dtensor._layout.shards import local_shape, pieces
from vescale.dtensor._placements import InterleavedShard, RaggedShard
from vescale.dtensor._random.cuda_replay import replay_bernoulli, replay_fill, replay_native_dropout
from vescale.dtensor._random.cuda_replay import selftest as _selftest
from vescale.dtensor._random.cuda_replay.backend import CUDA
from vescale.dtensor._random.cuda_replay.geometry import dropout_rounds, nullary_word, values_per_block, vector_size
from vescale.dtensor._random.cuda_replay.replay import dropout_part, uniform_of
from vescale.dtensor._random.philox.cipher import words_of_subsequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

aten = torch.ops.aten
RANDOM_FROM = getattr(aten.random_, "from")
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FILLS = [
    *((aten.uniform_.default, dtype, (-1.0, 3.0)) for dtype in FLOATS),
    *((aten.normal_.default, dtype, (0.5, 2.0)) for dtype in FLOATS),
    *((aten.exponential_.default, dtype, (1.5,)) for dtype in FLOATS),
    *((aten.bernoulli_.float, dtype, (0.3,)) for dtype in (*FLOATS, torch.bool, torch.int64)),
    *((op, torch.float32, ()) for op in (aten.cauchy_.default, aten.log_normal_.default)),
    *((aten.geometric_.default, dtype, (0.2,)) for dtype in (torch.float32, torch.float64, torch.int32)),
    *((RANDOM_FROM, torch.int64, (-3, stop - 3)) for stop in (2**27, 2**28, 2**33)),
    *((RANDOM_FROM, torch.int32, (0, stop)) for stop in (2**27, 2**28)),
    *((RANDOM_FROM, torch.int64, (start, None)) for start in (0, -(2**63))),
    *((aten.random_.default, dtype, ()) for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32)),
]
LAYOUTS = [
    ((3,), (Shard(0),)),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 2), (Shard(1), Shard(1))),
    ((3,), (InterleavedShard(1, 2),)),
    ((3,), (RaggedShard((0, 1), (1, 3, 2)),)),
    ((2,), (Replicate(),)),
    ((4,), (Shard(2),)),
]
SHAPE = (6, 61440, 5)  # more elements than a device of any size draws in one launch


@pytest.fixture
def device():
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _no_doubts():
    """A warning would say that the device does not draw as assumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture
def generator(device):
    torch.cuda.manual_seed(3)
    generator = torch.cuda.default_generators[device.index]
    generator.set_offset(16)
    return generator


def name_of(parameter):
    return str(parameter).replace(" ", "") if isinstance(parameter, tuple) else str(parameter)


def slices(box):
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def views_of(shape, mesh_shape, coord, placements):
    parts = pieces(shape, mesh_shape, coord, placements)
    return lambda local: [(part.box, part.view(local)) for part in parts]


def sizes(device, round_):
    threads = CUDA.grid(device).most_threads
    return (threads - 1, threads, threads + 1, 2 * threads + 2, round_ + 1, 8 * threads + 8)


def check_fill(generator, device, op, shape, mesh_shape, placements, *, dtype, args, layout=None):
    layout = layout or tuple(range(len(shape)))
    start = generator.get_offset()
    whole = torch.empty_permuted(shape, layout, dtype=dtype, device=device)
    op(whole, *args)
    after, follow_up = generator.get_offset(), torch.rand(3, device=device)
    for coord in itertools.product(*map(range, mesh_shape)):
        generator.set_offset(start)
        local = torch.empty(local_shape(shape, mesh_shape, coord, placements), dtype=dtype, device=device)
        views = views_of(shape, mesh_shape, coord, placements)(local)
        options = {"shape": shape, "layout": layout, "dtype": dtype, "device": device, "args": args}
        done = replay_fill(op, views, **options)
        assert done == (math.prod(shape) > CUDA.grid(device).most_threads)
        if not done:
            assert generator.get_offset() == start
            continue
        assert generator.get_offset() == after
        assert torch.equal(torch.rand(3, device=device), follow_up)
        for box, view in views:
            assert torch.equal(view, whole[slices(box)]), (shape, coord, placements)
    generator.set_offset(after)


@pytest.mark.parametrize("op, dtype, args", FILLS, ids=name_of)
def test_fills_of_sizes_around_the_rounds_of_the_loop(generator, device, op, dtype, args):
    round_ = values_per_block(op, dtype, args) * CUDA.grid(device).most_threads
    for numel in sizes(device, round_):
        check_fill(generator, device, op, (numel,), (3,), (Shard(0),), dtype=dtype, args=args)


@pytest.mark.parametrize("mesh_shape, placements", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("op, dtype, args", [FILLS[0], FILLS[5], FILLS[6]], ids=name_of)
def test_fills_with_every_placement(generator, device, op, dtype, args, mesh_shape, placements):
    check_fill(generator, device, op, SHAPE, mesh_shape, placements, dtype=dtype, args=args)
    check_fill(generator, device, op, SHAPE, mesh_shape, placements, dtype=dtype, args=args, layout=(2, 0, 1))


@pytest.mark.usefixtures("generator")
def test_the_words_of_a_fill(device):
    """The map itself: words computed one by one give the native values of `uniform_`."""
    grid = CUDA.grid(device)
    numel = 9 * grid.most_threads + 5
    native = torch.empty(numel, device=device).uniform_()
    element = torch.arange(numel, device=device)
    call, subsequence = element // grid.most_threads, element % grid.most_threads
    for block in range(3):
        words = torch.stack(words_of_subsequences(3, subsequence, 4 + block))
        mine = call // 4 == block
        drawn = uniform_of(words.gather(0, (call % 4).unsqueeze(0))[0])
        drawn = torch.where(drawn == 1, 0, drawn)
        assert torch.equal(drawn[mine], native[mine])
    assert nullary_word(numel - 1, 4, grid) == (4, 2, 1)


def test_another_offset_is_seen(generator, device):
    whole = torch.empty(SHAPE, device=device)
    whole.uniform_()
    generator.set_offset(20)
    local = torch.empty(SHAPE, device=device)
    view = (((0, 0, 0), SHAPE), local)
    assert replay_fill(aten.uniform_.default, [view], shape=SHAPE, dtype=local.dtype, device=device)
    assert not torch.equal(local, whole)


# ------------------------------------------------------------------------------------------------- dropout


def check_dropout(generator, device, whole, mesh_shape, placements, *, layout=None, is_dense=True):
    start, shape = generator.get_offset(), tuple(whole.shape)
    expected = aten.native_dropout(whole, 0.1, True)
    after = generator.get_offset()
    for coord in itertools.product(*map(range, mesh_shape)):
        find = views_of(shape, mesh_shape, coord, placements)
        local = torch.empty(local_shape(shape, mesh_shape, coord, placements), dtype=whole.dtype, device=device)
        for box, view in find(local):
            view.copy_(whole[slices(box)])
        found = torch.empty_like(local), torch.empty_like(local, dtype=torch.bool)
        generator.set_offset(start)
        options = {"shape": shape, "layout": layout, "is_dense": is_dense, "p": 0.1}
        assert replay_native_dropout(local, *found, find, **options)
        assert generator.get_offset() == after
        for result, target in zip(found, expected, strict=True):
            assert all(torch.equal(view, target[slices(box)]) for box, view in find(result)), (shape, coord)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_of_sizes_around_the_rounds_of_the_loop(generator, device, dtype):
    threads = CUDA.grid(device).most_threads
    for base, rest in itertools.product((threads, 4 * threads, 8 * threads, 17 * threads), (1, 2, 4, 8, 16)):
        whole = torch.randn(base + rest, device=device, dtype=dtype)
        check_dropout(generator, device, whole, (3,), (Shard(0),))


@pytest.mark.parametrize("mesh_shape, placements", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout_with_every_placement(generator, device, dtype, mesh_shape, placements):
    check_dropout(generator, device, torch.randn(SHAPE, device=device).to(dtype), mesh_shape, placements)


def test_dropout_of_other_strides(generator, device):
    columns = torch.randn(1201, 1401, device=device).t()
    check_dropout(generator, device, columns, (3,), (Shard(0),), layout=(1, 0))
    columns = torch.randn(1200, 1400, device=device).t()
    check_dropout(generator, device, columns, (3,), (Shard(0),), layout=(1, 0))
    gaps = torch.randn(1200, 1400, device=device)[:, :1396]
    check_dropout(generator, device, gaps, (3,), (Shard(1),), is_dense=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_dropout_reads_as_the_address_allows(generator, device, dtype, shift):
    numel = 16 * (CUDA.grid(device).most_threads + 1)
    whole = torch.randn(numel + shift, device=device, dtype=dtype)[shift:]
    _, widest = _selftest.dropout_vector(CUDA, aten.native_dropout.default, 16, dtype, device)
    vector = vector_size(numel, dtype.itemsize, whole.data_ptr(), widest)
    assert dropout_rounds(vector, CUDA.grid(device)).window <= numel
    generator.set_offset(16)
    expected = aten.native_dropout(whole, 0.4, True)
    generator.set_offset(16)
    found = torch.empty_like(whole), torch.empty_like(whole, dtype=torch.bool)
    view = (((0,), (numel,)), whole.clone(), *found)
    dropout_part(CUDA, [view], shape=(numel,), device=device, p=0.4, vector=vector, widest=widest)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------- bernoulli(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("mesh_shape, placements", LAYOUTS[:5], ids=name_of)
def test_bernoulli_with_probabilities(generator, device, dtype, mesh_shape, placements):
    p = torch.rand(SHAPE, device=device)
    generator.set_offset(16)
    whole = torch.empty(SHAPE, dtype=dtype, device=device)
    whole.bernoulli_(p)
    after = generator.get_offset()
    for coord in itertools.product(*map(range, mesh_shape)):
        find = views_of(SHAPE, mesh_shape, coord, placements)
        local = torch.empty(local_shape(SHAPE, mesh_shape, coord, placements), device=device)
        out = torch.empty_like(local, dtype=dtype)
        for box, view in find(local):
            view.copy_(p[slices(box)])
        generator.set_offset(16)
        assert replay_bernoulli(local, out, find, shape=SHAPE, least=1)
        assert generator.get_offset() == after
        assert all(torch.equal(view, whole[slices(box)]) for box, view in find(out))


# ------------------------------------------------------------------------------------------------- limits


def test_nothing_is_replayed_during_the_capture_of_a_graph(generator, device):
    local, whole = torch.empty(SHAPE, device=device), torch.empty(SHAPE, device=device)
    view = (((0, 0, 0), SHAPE), local)
    graph = torch.cuda.CUDAGraph()
    options = {"shape": SHAPE, "dtype": local.dtype, "device": device}
    with torch.cuda.graph(graph):
        assert not replay_fill(aten.uniform_.default, [view], **options)
        whole.uniform_()
    start = generator.get_offset()
    graph.replay()
    generator.set_offset(start)
    assert replay_fill(aten.uniform_.default, [view], **options)
    assert torch.equal(local, whole)


def test_a_generator_of_the_cpu_is_refused_as_natively(device):
    local = torch.empty(SHAPE, device=device)
    options = {"shape": SHAPE, "dtype": local.dtype, "device": device, "generator": torch.Generator()}
    assert not replay_fill(aten.uniform_.default, [(((0, 0, 0), SHAPE), local)], **options)


def needs_gigabytes(size):
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < size:
        pytest.skip(f"needs {size} GiB of device memory, {free:.1f} are free")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_more_than_two_gigabytes(generator, device, dtype):
    """The fill is split into halves, which draw one after the other."""
    needs_gigabytes(6)
    shape = (2**31 // dtype.itemsize // 1000 + 7, 1000)
    check_fill(generator, device, aten.uniform_.default, shape, (5,), (Shard(0),), dtype=dtype, args=())
    check_fill(generator, device, aten.uniform_.default, shape, (8,), (Shard(1),), dtype=dtype, args=())


def test_more_than_2_31_elements(generator, device):
    needs_gigabytes(16)
    shape = (2**31 // 4096 + 3, 4096)
    for op, args in ((aten.normal_.default, (0.0, 1.0)), (aten.uniform_.default, ())):
        check_fill(generator, device, op, shape, (7,), (Shard(0),), dtype=torch.bfloat16, args=args)


def test_operators_on_dtensors(tmp_path, device):
    import torch.distributed as dist

    draws = {
        "normal_": lambda x: x.normal_(),
        "rand_like": torch.rand_like,
        "dropout": torch.nn.functional.dropout,
        "bernoulli": lambda x: torch.bernoulli(x.detach().clamp(0, 1)),
    }
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        plain = torch.full((3000, 6001), 0.3, device=device)
        sharded = distribute_tensor(plain.clone(), mesh, [Shard(0)])
        for name, draw in draws.items():
            torch.manual_seed(5)
            expected, follow_up = draw(plain), torch.rand(3, device=device)
            torch.manual_seed(5)
            assert torch.equal(draw(sharded).to_local(), expected), name
            assert torch.equal(torch.rand(3, device=device), follow_up), name
    finally:
        dist.destroy_process_group()
