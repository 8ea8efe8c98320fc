"""Any random operator, on any shape, in any placements, on meshes of 1 to 8 ranks, draws what one device draws.

Every rank draws the same examples, as they follow from the test's source alone. Ragged and strided placements, of the
draws in place, are in `test_dtensor_random_pieces`.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn

from vescale.dtensor import InterleavedShard, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

IN_PLACE = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "random_": lambda x: x.random_(0, 1000),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x),
}
OTHER = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(x.sigmoid()),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: torch.poisson(x.abs()),
    "multinomial": lambda x: torch.multinomial((x if x.ndim < 3 else x.select(0, 0)).sigmoid(), 1),
}
DRAWS = {**IN_PLACE, **OTHER}
SIZES = (1, 2, 3, 5, 7, 11, 13, 16)
MESHES = {1: ((1,),), 3: ((3,), (1, 3)), 6: ((6,), (2, 3), (3, 2)), 8: ((8,), (2, 4), (2, 2, 2), (2, 1, 2, 2))}


def placement(data, shape):
    """One placement for one axis."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    divisors = [k for k in (2, 3) if shape[dim] % k == 0]
    choices = [Replicate(), Shard(dim), *(InterleavedShard(dim, k) for k in divisors)]
    return choices[data.draw(st.integers(0, len(choices) - 1))]


def differs(name, data, meshes):
    """Tell whether an example draws other values, or leaves another state, than on one device."""
    shape = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    mesh = meshes[data.draw(st.integers(0, len(meshes) - 1))]
    placements = [placement(data, shape) for _ in range(mesh.ndim)]
    interleaved = [p for p in placements if isinstance(p, InterleavedShard)]
    if interleaved:  # beside other cuts its parts may not divide
        placements = [interleaved[0], *[Replicate()] * (mesh.ndim - 1)]
    whole = torch.linspace(-2, 2, math.prod(shape)).view(shape)
    sharded = distribute_tensor(whole, mesh, placements)
    torch.manual_seed(3)
    expected = DRAWS[name](whole.clone())
    state = torch.get_rng_state()
    torch.manual_seed(3)
    actual = DRAWS[name](sharded)
    same = torch.equal(actual.full_tensor(), expected) and torch.equal(torch.get_rng_state(), state)
    return None if same else (name, shape, placements)


def examples(world, number):
    """Return the examples that differ, of this many for each operator."""
    meshes, found = [init_device_mesh("cpu", sizes) for sizes in MESHES[world]], []

    def check(name):
        @settings(
            max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck
        )
        @given(st.data())
        def each(data):
            found.append(differs(name, data, meshes))

        each()

    for name in DRAWS:
        check(name)
    assert len(found) >= len(DRAWS)
    return [example for example in found if example is not None]


@pytest.mark.parametrize("world", MESHES)
def test_draws_are_those_of_one_device(world):
    @ranks(world)
    def on_every_rank():
        assert examples(world, 4) == []

    on_every_rank()


@ranks(3)
def test_stock_torch_differs():
    with disabled("random"):
        mesh = init_device_mesh("cpu", (3,))
        for name in ("uniform_", "normal_", "exponential_", "dropout"):
            whole = torch.linspace(-2, 2, 91).view(13, 7)
            torch.manual_seed(3)
            expected = DRAWS[name](whole.clone())
            torch.manual_seed(3)
            assert not torch.equal(DRAWS[name](distribute_tensor(whole, mesh, [Shard(0)])).full_tensor(), expected), (
                name
            )
