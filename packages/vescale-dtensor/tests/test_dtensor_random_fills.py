"""Random fills of a sharded tensor are the shards of what one device draws, and leave its generator state.

The expected shard is cut from a plain tensor that the same operator filled (see conftest.py).
"""

import itertools

import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

FILLS = {
    "uniform_": (lambda x, **k: x.uniform_(-0.3, 1.7, **k), FLOATS),
    "normal_": (lambda x, **k: x.normal_(0.1, 0.02, **k), FLOATS),
    "bernoulli_": (lambda x, **k: x.bernoulli_(0.3, **k), (*FLOATS, torch.int64, torch.bool)),
    "exponential_": (lambda x, **k: x.exponential_(1.5, **k), FLOATS),
    "geometric_": (lambda x, **k: x.geometric_(0.4, **k), (*FLOATS, torch.int64)),
    "log_normal_": (lambda x, **k: x.log_normal_(0.2, 0.5, **k), FLOATS),
    "cauchy_": (lambda x, **k: x.cauchy_(0.0, 2.0, **k), FLOATS),
    "random_": (lambda x, **k: x.random_(**k), (torch.float32, torch.int64, torch.int32)),
    "random_ below": (lambda x, **k: x.random_(100, **k), (torch.float32, torch.int64)),
    "random_ 2**27": (lambda x, **k: x.random_(-5, 2**27, **k), (torch.int64,)),
    "random_ 2**28": (lambda x, **k: x.random_(0, 2**28, **k), (torch.int64,)),
    "random_ 2**33": (lambda x, **k: x.random_(3, 2**33, **k), (torch.int64,)),
}

LIKES = {
    "rand_like": lambda x, **k: torch.rand_like(x, **k),
    "randn_like": lambda x, **k: torch.randn_like(x, **k),
    "randn_like float64": lambda x, **k: torch.randn_like(x, dtype=torch.float64, **k),
    "randint_like": lambda x, **k: torch.randint_like(x, 7, **k),
    "randint_like low": lambda x, **k: torch.randint_like(x, -3, 7, **k),
    "randint_like int64": lambda x, **k: torch.randint_like(x, 2**30, dtype=torch.int64, **k),
    "bernoulli": lambda x, **k: torch.bernoulli(x, **k),
}

SHAPES = [
    (),
    (1,),
    (15,),
    (16,),
    (17,),
    (255,),
    (256,),
    (257,),
    (5, 3),
    (17, 15),
    (1, 16),
    (3, 0),
    (2, 3, 4),
    (4, 1, 5),
]

S0, S1, R = Shard(0), Shard(1), Replicate()
MESHES = {  # world size -> meshes and what to place on them
    2: {(2,): [(S0,), (S1,), (R,)]},
    3: {(3,): [(S0,), (S1,)], (1, 3): [(S1, S0), (R, S1)]},
    4: {(4,): [(S0,), (S1,)], (2, 2): [(S0, S1), (S1, S0), (S0, S0), (S1, S1), (R, S0), (S1, R)]},
}


def layouts(world, ndim):
    """All (mesh, placements) of this world for tensors with `ndim` dims. The meshes are made once."""
    for mesh, placements in meshes(world):
        if all(not isinstance(p, Shard) or p.dim < ndim for p in placements):
            yield mesh, placements


def meshes(world, made={}):  # noqa: B006 - one per process
    for sizes, many in MESHES[world].items():
        if sizes not in made:
            made[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        yield from ((made[sizes], placements) for placements in many)


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_fills_in_place(world, assert_drawn_alike):
    @ranks(world)
    def on_every_rank():
        for draw, dtypes in FILLS.values():
            for dtype, shape in zip(itertools.cycle(dtypes), SHAPES[world % 2 :], strict=False):
                for mesh, placements in layouts(world, len(shape)):
                    assert_drawn_alike(draw, torch.zeros(shape, dtype=dtype), mesh, placements)

    on_every_rank()


@ranks(3)
def test_new_tensors_like_a_sharded_one(assert_drawn_alike):
    for draw, dtype, shape in itertools.product(LIKES.values(), FLOATS[::2], SHAPES[1::2]):
        for mesh, placements in layouts(3, len(shape)):
            assert_drawn_alike(draw, torch.full(shape, 0.4, dtype=dtype), mesh, placements)


@ranks(4)
def test_memory_order_decides_as_on_one_device(assert_drawn_alike):
    """A transposed tensor is filled along its memory, `normal_` by another algorithm than a contiguous one."""
    whole = torch.zeros(7, 5, 6)
    for permuted in (whole.transpose(0, 1), whole.permute(2, 0, 1), torch.zeros(7, 1, 6).transpose(0, 2)):
        for mesh, placements in layouts(4, 3):
            for name in ("uniform_", "normal_", "bernoulli_", "random_ below"):
                draw, _ = FILLS[name]
                # clone() keeps the memory order of a dense tensor
                assert_drawn_alike(draw, permuted, mesh, placements)
            for name in ("rand_like", "randn_like"):
                assert_drawn_alike(LIKES[name], permuted, mesh, placements)


@ranks(2)
def test_a_generator_of_ones_own(shard, shard_of):
    """It advances as on one device, and the default generator stays where it is."""
    for mesh, placements in layouts(2, 2):
        for name in ("uniform_", "normal_", "bernoulli_", "random_ below"):
            draw, _ = FILLS[name]
            ours, theirs = (torch.Generator().manual_seed(5) for _ in range(2))
            default = torch.get_rng_state()
            tensor = draw(shard(torch.zeros(5, 7), mesh, placements), generator=ours)
            expected = draw(torch.zeros(5, 7), generator=theirs)
            assert torch.equal(tensor.to_local(), shard_of(expected, mesh, placements))
            assert torch.equal(ours.get_state(), theirs.get_state())
            assert torch.equal(torch.get_rng_state(), default)
        generator = torch.Generator().manual_seed(5)
        probabilities = shard(torch.full((5, 7), 0.3), mesh, placements)
        drawn = torch.bernoulli(probabilities, generator=generator)
        expected = torch.bernoulli(torch.full((5, 7), 0.3), generator=generator.manual_seed(5))
        assert torch.equal(drawn.to_local(), shard_of(expected, mesh, placements))


@ranks(2)
def test_many_pieces(assert_drawn_alike):
    """A tensor of more elements than are drawn at a time."""
    mesh, placements = next(layouts(2, 2))
    for name in ("uniform_", "normal_", "bernoulli_"):
        assert_drawn_alike(FILLS[name][0], torch.zeros(3, 2**19 + 5), mesh, placements)


@ranks(2)
def test_without_the_rules_shards_repeat(assert_drawn_alike):
    """Stock behaviour on a CPU mesh, so that the tests above are seen to fail without the rules."""
    mesh, placements = next(layouts(2, 2))
    with disabled("random"):
        for name in ("uniform_", "normal_", "exponential_"):
            with pytest.raises(AssertionError):
                assert_drawn_alike(FILLS[name][0], torch.zeros(6, 5), mesh, placements)
        with pytest.raises(AssertionError):
            assert_drawn_alike(LIKES["bernoulli"], torch.full((6, 5), 0.4), mesh, placements)
    assert_drawn_alike(FILLS["uniform_"][0], torch.zeros(6, 5), mesh, placements)
