"""In the stream "philox" shards hold the elements that one device draws in the same stream, whatever the placements."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dtensor import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedRandomOperator,
    deferred_init,
    init_device_mesh,
    materialize,
    random,
)
from vescale.dtensor.extension import local_shape, local_views
from vescale_testing import ranks

S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

FILLS = {
    "uniform_": (lambda x: x.uniform_(-0.3, 1.7), FLOATS),
    "uniform_ of the unit interval": (lambda x: x.uniform_(), FLOATS),
    "normal_": (lambda x: x.normal_(0.1, 0.02), FLOATS),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), (*FLOATS, torch.int64, torch.bool)),
    "exponential_": (lambda x: x.exponential_(1.5), FLOATS),
    "geometric_": (lambda x: x.geometric_(0.4), (*FLOATS, torch.int64)),
    "log_normal_": (lambda x: x.log_normal_(0.2, 0.5), FLOATS),
    "cauchy_": (lambda x: x.cauchy_(0.0, 2.0), FLOATS),
    "random_": (lambda x: x.random_(), (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)),
    "random_ below": (lambda x: x.random_(100), (torch.float32, torch.int64, torch.int32, torch.uint8)),
    "random_ of 2**33": (lambda x: x.random_(3, 2**33), (torch.int64,)),
    "random_ of all int64": (lambda x: x.random_(-(2**63), None), (torch.int64,)),
    "random_ of most int64": (lambda x: x.random_(-(2**62), 2**63 - 1), (torch.int64,)),
}

OTHERS = {
    "rand_like": torch.rand_like,
    "randn_like float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randint_like low": lambda x: torch.randint_like(x, -3, 7, dtype=torch.int64),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "normal of tensors": lambda x: torch.normal(x, x + 1),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a std": lambda x: torch.normal(2.0, x),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout mask": lambda x: torch.native_dropout(x, 0.3, True)[1],
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
}

SHAPES = [(), (1,), (17,), (5, 3), (3, 0), (2, 5, 7)]
LAYOUTS = {
    (4,): [(S0,), (S1,), (S2,), (R,)],
    (2, 2): [(S0, S1), (S1, S0), (S0, S0), (S1, S1), (R, S0), (S2, R)],
    (1, 4): [(S1, S0), (S0, S0)],
}


def draw_twice(draw, tensor, seed=5):
    """Two draws, to see that the stream goes on alike."""
    with random.stream("philox", seed=seed):
        return draw(tensor), torch.rand(5)


def assert_same(draw, whole, mesh, placements, shard, *, where):
    """`draw` of the sharded tensor holds what `draw` of the whole one has at the same places, and spends as much."""
    expected, after = draw_twice(draw, whole.clone())
    actual, follow_up = draw_twice(draw, shard(whole, mesh, placements))
    assert torch.equal(follow_up, after), where
    assert isinstance(actual, DTensor), where
    assert actual.dtype == expected.dtype, where
    local = actual.to_local()
    num = 0
    for box, view in local_views(local, tuple(expected.shape), mesh, actual.placements):
        index = tuple(slice(o, o + s) for o, s in zip(*box, strict=True))
        assert torch.equal(view, expected[index]), where
        num += view.numel()
    assert num == local.numel(), where


def whole_of(shape, dtype):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def layouts(ndim):
    for sizes, many in LAYOUTS.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        for placements in many:
            if all(not isinstance(p, Shard) or p.dim < ndim for p in placements):
                yield mesh, placements


def in_turns(ndim):
    """All layouts, one after the other, again and again: each operator meets some, all operators together all."""
    return itertools.cycle(list(layouts(ndim)))


@ranks(4)
def test_fills(shard):
    for shape in SHAPES:
        layout = in_turns(len(shape))
        for name, (draw, dtypes) in FILLS.items():
            for dtype in dtypes if shape in ((5, 3), (17,)) else dtypes[:1] * 3:
                mesh, placements = next(layout)
                whole = torch.zeros(shape, dtype=dtype)
                assert_same(draw, whole, mesh, placements, shard, where=(name, shape, placements, dtype))


@ranks(4)
def test_new_tensors_and_masks(shard):
    for shape, dtype in [((17,), torch.float64), ((5, 3), torch.bfloat16), ((3, 2, 5), torch.float32)]:
        layout = in_turns(len(shape))
        for name, draw in OTHERS.items():
            if name in ("dropout1d", "feature_alpha_dropout") and len(shape) < 3:
                continue
            if name.startswith(("normal of", "bernoulli_ of")) and dtype == torch.bfloat16:
                continue
            for _ in range(2):
                mesh, placements = next(layout)
                assert_same(draw, whole_of(shape, dtype), mesh, placements, shard, where=(name, shape, placements))


@ranks(2)
def test_initializers(shard):
    mesh = init_device_mesh("cpu", (2,))
    for init in (nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.trunc_normal_):
        assert_same(init, torch.zeros(6, 5), mesh, (S1,), shard, where=init.__name__)


def test_nothing_is_spent_on_the_meta_device():
    """As in the stock stream."""
    with random.stream("philox", seed=5):
        expected = torch.rand(5)
    with random.stream("philox", seed=5):
        assert torch.empty(2**40, device="meta").normal_().is_meta
        assert torch.rand(2**40, device="meta").is_meta
        F.dropout(torch.empty(2**40, device="meta"))
        assert torch.equal(torch.rand(5), expected)


def test_a_deferred_module_gets_the_parameters_of_the_eager_one():
    with random.stream("philox", seed=5):
        eager = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.rand(2)
    with random.stream("philox", seed=5):
        module = materialize(deferred_init(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))))
        assert torch.equal(torch.rand(2), eager[1])
    for actual, expected in zip(module.parameters(), eager[0].parameters(), strict=True):
        assert torch.equal(actual, expected)


@ranks(4)
def test_strides_do_not_matter(shard):
    contiguous = torch.zeros(6, 5, 4)
    expected, _ = draw_twice(FILLS["normal_"][0], contiguous)
    transposed = torch.zeros(4, 5, 6).transpose(0, 2)
    assert torch.equal(draw_twice(FILLS["normal_"][0], transposed)[0], expected)
    assert torch.equal(draw_twice(FILLS["normal_"][0], torch.zeros(6, 9, 4)[:, 2:7])[0], expected)
    for mesh, placements in layouts(3):
        assert_same(FILLS["normal_"][0], transposed, mesh, placements, shard, where=placements)


@ranks(4)
def test_interleaved_and_ragged_shards():
    """Their shards are several boxes of the global tensor."""
    cases = [
        ((4,), (16, 3), (InterleavedShard(0, 2),)),
        ((4,), (5, 6), (RaggedShard((0, 1), (1, 0, 3, 2)),)),
        ((2, 2), (12, 4), (InterleavedShard(0, 3), S0)),
        ((2, 2), (6, 8), (RaggedShard((0,), (1, 2)), S1)),
    ]
    for sizes, shape, placements in cases:
        mesh = init_device_mesh("cpu", sizes)
        for name in ("uniform_", "normal_", "bernoulli_", "random_ below"):
            draw = FILLS[name][0]
            expected, _ = draw_twice(draw, torch.zeros(shape))
            sharded = _zeros(shape, mesh, placements)
            actual, _ = draw_twice(draw, sharded)
            pieces = local_views(actual.to_local(), shape, mesh, placements)
            assert sum(view.numel() for _, view in pieces) == actual.to_local().numel()
            for box, view in pieces:
                index = tuple(slice(o, o + s) for o, s in zip(*box, strict=True))
                assert torch.equal(view, expected[index]), (name, placements)


def _zeros(shape, mesh, placements):
    local = torch.zeros(local_shape(shape, tuple(mesh.shape), tuple(mesh.get_coordinate()), placements))
    size = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **size)


@ranks(2)
def test_masks_do_not_depend_on_operator_or_dtype():
    with_p = {}
    for dtype in FLOATS:
        for name, draw in {
            "bernoulli_": lambda x: x.bernoulli_(0.25),
            "bernoulli": torch.bernoulli,
            "native_dropout": lambda x: torch.native_dropout(x, 0.75, True)[1],
            "dropout": lambda x: F.dropout(x, 0.75),
        }.items():
            with_p[name, dtype] = draw_twice(draw, torch.full((1000,), 0.25, dtype=dtype))[0] != 0
    first = with_p["bernoulli_", torch.float32]
    assert all(torch.equal(mask, first) for mask in with_p.values())
    assert torch.equal(draw_twice(torch.rand_like, torch.zeros(1000))[0] < 0.25, first)
    assert 150 < int(first.sum()) < 350


@ranks(2)
def test_inference_mode_sees_through_composite_operators(shard):
    mesh = init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        for name in ("dropout", "alpha_dropout", "rrelu"):
            assert_same(OTHERS[name], whole_of((4, 6), torch.float32), mesh, (S1,), shard, where=name)


@ranks(2)
def test_partial_tensors_are_refused_and_spend_nothing():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    with random.stream("philox", seed=0):
        expected = torch.rand(3)
    with random.stream("philox", seed=0):
        with pytest.raises(UnsupportedRandomOperator, match=r"placements \(Partial.*redistribute to Shard"):
            partial.normal_()
        assert torch.equal(torch.rand(3), expected)


@ranks(2)
def test_in_the_stock_stream_strides_and_masks_do_differ():
    """What this stream does not have to care about, and the other stream does not have."""
    torch.manual_seed(0)
    contiguous = torch.zeros(6, 4).normal_()
    torch.manual_seed(0)
    assert not torch.equal(torch.zeros(4, 6).t().normal_(), contiguous)
    torch.manual_seed(0)
    low = torch.zeros(1000).bernoulli_(0.5)
    torch.manual_seed(0)
    assert not torch.equal(torch.rand(1000) < 0.5, low.bool())
    expected, _ = draw_twice(lambda x: x.normal_(), torch.zeros(6, 4))
    assert not torch.equal(expected, contiguous)
