"""Any random operator, on any shape, in any placements, on meshes of 1 to 8 ranks, draws what one device draws.

The parts that the ranks hold are those of the tensor that one device draws, bit for bit, and the generator ends in the
same state on every rank, those outside the mesh included. Every rank draws the same examples, as they follow from the
test's source alone.
"""

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn

from vescale.dtensor import (
    DTensor,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedOperator,
    UnsupportedPlacement,
    disabled,
    distribute_tensor,
    init_device_mesh,
)
from vescale.dtensor.extension import local_views
from vescale_testing import ranks


def probabilities(x):
    """Rows of a matrix."""
    return x.sigmoid() if x.ndim < 3 else x.reshape(-1, x.shape[-1]).sigmoid()


def empty_like(x):
    return torch.empty_like(x, dtype=torch.int64)


IN_PLACE = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "random_": lambda x: x.random_(),
    "random_ up to": lambda x: x.random_(1000),
    "random_ from to": lambda x: x.random_(-5, 1000),
    "init.uniform_": lambda x: nn.init.uniform_(x, -2, 3),
    "init.normal_": lambda x: nn.init.normal_(x, 1, 2),
}
NEW = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "rand out": lambda x: torch.rand(x.shape, out=torch.empty_like(x)),
    "randn out": lambda x: torch.randn(x.shape, out=torch.empty_like(x)),
    "randint out": lambda x: torch.randint(3, 50, x.shape, out=empty_like(x)),
    "randperm out": lambda x: torch.randperm(x.shape[0], out=empty_like(x[(slice(None), *[0] * (x.ndim - 1))])),
}
ELEMENTS = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(x.sigmoid()),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.exp()),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
}
FEATURES = {
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x),
    "init.kaiming_normal_": lambda x: nn.init.kaiming_normal_(x),
    "init.xavier_uniform_": lambda x: nn.init.xavier_uniform_(x),
    "init.xavier_normal_": lambda x: nn.init.xavier_normal_(x),
    "dropout1d": lambda x: F.dropout1d(x.flatten(0, -3) if x.ndim > 3 else x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "multinomial": lambda x: torch.multinomial(probabilities(x), 1),
    "multinomial with replacement": lambda x: torch.multinomial(probabilities(x), 3, replacement=True),
}
LOOPS = {  # draw until all values fit, which is not known outside the mesh
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x),
    "init.trunc_normal_ of a tail": lambda x: nn.init.trunc_normal_(x, 0, 1, 1.5, 2.5),
}
GATHERED = {  # depend on the values of the whole tensor
    "rrelu": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(x.abs().ceil(), x.sigmoid()),
    "init.orthogonal_": lambda x: nn.init.orthogonal_(x),
    "attention dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}
ROUNDED = {"init.orthogonal_", "attention dropout"}  # their sums may run in another order
NOT_RAGGED = {*FEATURES, *LOOPS, *GATHERED, "randperm out"}
DRAWS = {**IN_PLACE, **NEW, **ELEMENTS, **FEATURES, **LOOPS, **GATHERED}
SIZES = (1, 2, 3, 5, 7, 11, 13, 16)


def held_alike(actual, expected, *, exact):
    """Return whether this rank's boxes of a tensor are those of the whole one; sums are reduced first."""
    whole_axes = [Replicate() if p.is_partial() else p for p in actual.placements]
    actual = actual.redistribute(placements=whole_axes)
    views = local_views(actual.to_local(), actual.shape, actual.device_mesh, actual.placements)
    pairs = [(view, expected[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]) for box, view in views]
    same = torch.equal if exact else (lambda a, b: torch.allclose(a, b, rtol=1e-12, atol=1e-12))
    return actual.shape == expected.shape and all(same(view, part) for view, part in pairs)


def equals_one_device(name, sharded, whole):
    """Return whether a draw gives this rank its parts of what one device draws, and leaves the same state."""
    torch.manual_seed(3)
    expected = DRAWS[name](whole.clone())
    state = torch.get_rng_state()
    torch.manual_seed(3)
    actual = DRAWS[name](sharded)
    assert isinstance(actual, DTensor)
    same = held_alike(actual, expected, exact=name not in ROUNDED)
    return same and torch.equal(torch.get_rng_state(), state)


def ramp(shape):
    return torch.linspace(-2, 2, shape.numel(), dtype=torch.float64).view(shape)


def draw_examples(meshes, draw_placements, number):
    """Return for each operator this many of (name, shape, mesh, placements)."""
    examples = []

    @settings(max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.data())
    def each(data):
        for name in DRAWS:
            least = 2 if name in FEATURES or name in GATHERED else 1
            shape = torch.Size(data.draw(st.lists(st.sampled_from(SIZES), min_size=least, max_size=3)))
            # on more axes torch searches long for the sharding of the operators beside the draws
            usable = meshes if name in IN_PLACE else [mesh for mesh in meshes if mesh.ndim < 3]
            mesh = usable[data.draw(st.integers(0, len(usable) - 1))]
            examples.append((name, shape, mesh, draw_placements(data.draw, shape, mesh.shape, ragged=True)))

    each()
    return examples


@pytest.mark.parametrize("number", [4, pytest.param(20, marks=pytest.mark.thorough)])
@ranks(8, timeout=400)
def test_draws_are_those_of_one_device(number, meshes_of_1_to_8_ranks, draw_placements):
    examples = draw_examples(meshes_of_1_to_8_ranks(), draw_placements, number)
    assert {mesh.size() for _, _, mesh, _ in examples} == {1, 2, 3, 4, 5, 6, 7, 8}
    refused = set()
    for name, shape, mesh, placements in examples:
        sharded = distribute_tensor(ramp(shape), mesh, placements, src_data_rank=None)
        try:
            assert equals_one_device(name, sharded, ramp(shape)), (name, shape, mesh, placements)
        except (UnsupportedOperator, UnsupportedPlacement):
            if mesh.get_coordinate() is not None or not (name in GATHERED or name in LOOPS):
                assert any(isinstance(p, RaggedShard) for p in placements), (name, shape, mesh, placements)
                refused.add(name)
    assert refused <= NOT_RAGGED


@ranks(2)
def test_stock_torch_differs():
    """Each of them, on even shards of one dim or the other: other values, another state, or an error.

    Whole features are dropped by a mask that is replicated, which stock torch draws like one device.
    """
    mesh, whole = init_device_mesh("cpu", (2,)), ramp(torch.Size((12, 8, 4)))
    alike = []
    for name in DRAWS:
        same = []
        for placement in (Shard(0), Shard(1)):
            shards = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            try:
                with disabled():
                    same.append(equals_one_device(name, shards, whole))
            except (AssertionError, NotImplementedError, RuntimeError):
                same.append(False)
        both = torch.tensor(float(all(same)))
        dist.all_reduce(both)
        if both == 2:
            alike.append(name)
    assert alike == ["dropout1d", "dropout2d", "feature_alpha_dropout"]
