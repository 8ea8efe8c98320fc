"""Every other random operator equals one device: samplers, tensors of parameters, functional forms and `out`.

Compared are the global result, the memory order of the result, and the state of the generator.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vescale.dtensor import DeviceMesh, DTensor, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

aten = torch.ops.aten
S0, S1, R = Shard(0), Shard(1), Replicate()


def parameters(shape, dtype=torch.float64):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


ELEMENTS = {
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(-1.0, x),
    "normal of both": lambda x: torch.normal(x, x + 1),
    "normal of means and one deviation": lambda x: torch.normal(x, torch.tensor(0.5, dtype=x.dtype)),
    "normal of means in a row and deviations in a column": lambda x: torch.normal(x[:1], x[:, :1]),
    "bernoulli_(row)": lambda x: torch.empty_like(x).bernoulli_(x[0]),
    "bernoulli(p)": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_(tensor)": lambda x: torch.empty_like(x).bernoulli_(x),
    "bernoulli_(scalar tensor)": lambda x: x.clone().bernoulli_(torch.tensor(0.5)),
    "bernoulli.Tensor": lambda x: aten.bernoulli.Tensor(x, x),
    "native_dropout without training": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "native_dropout of everything": lambda x: torch.native_dropout(x, 1.0, True)[0],
}

SAMPLERS = {
    "multinomial of one": lambda x: torch.multinomial(x, 1),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial with replacement": lambda x: torch.multinomial(x, 9, replacement=True),
    "poisson": lambda x: torch.poisson(5 * x),
    "binomial": lambda x: torch.binomial((10 * x).floor(), x),
    "gamma": lambda x: torch._standard_gamma(x + 0.1),
    "dirichlet": lambda x: torch._sample_dirichlet(x + 0.1),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu in place": lambda x: F.rrelu_(x - 0.5, training=True),
    "rrelu without training": lambda x: F.rrelu(x - 0.5),
}

FUNCTIONAL = {
    "uniform": lambda x: aten.uniform(x, -1.0, 2.0),
    "normal_functional": lambda x: aten.normal_functional(x, 1.0, 2.0),
    "exponential": lambda x: aten.exponential(x, 2.0),
    "geometric": lambda x: aten.geometric(x, 0.3),
    "log_normal": lambda x: aten.log_normal(x),
    "cauchy": lambda x: aten.cauchy(x),
    "random": lambda x: aten.random(x),
    "random.to": lambda x: aten.random.to(x, 9),
    "random.from": lambda x: getattr(aten.random, "from")(x, 3, 9),
    "randint_like of a tensor": lambda x: torch.randint_like(x, torch.tensor(9)),
}

OUT = {
    "uniform": lambda x, o: aten.uniform.out(x, out=o),
    "normal": lambda x, o: aten.normal.out(x, out=o),
    "exponential": lambda x, o: aten.exponential.out(x, out=o),
    "random.to": lambda x, o: aten.random.to_out(x, 9, out=o),
    "bernoulli.float": lambda x, o: aten.bernoulli.float_out(x, 0.3, out=o),
    "bernoulli": lambda x, o: torch.bernoulli(x, out=o),
    "bernoulli.Tensor": lambda x, o: aten.bernoulli.Tensor_out(x, x, out=o),
    "rand_like": lambda x, o: aten.rand_like.out(x, out=o),
    "randint_like": lambda x, o: aten.randint_like.out(x, 9, out=o),
    "rand": lambda _, o: torch.rand(o.shape, out=o),
    "randn": lambda _, o: torch.randn(o.shape, out=o),
    "randint": lambda _, o: torch.randint(2, 9, o.shape, out=o),
    "normal.size": lambda _, o: torch.normal(1.0, 2.0, o.shape, out=o),
    "normal of means": lambda x, o: torch.normal(x, 2.0, out=o),
    "normal of both": lambda x, o: torch.normal(x, x, out=o),
    "poisson": lambda x, o: aten.poisson.out(x, out=o),
    "native_dropout": lambda x, o: aten.native_dropout.out(x, 0.3, True, out0=o, out1=o.bool())[0],
}


@pytest.fixture
def alike(shard, shard_of):
    """`alike(draw, tensors, mesh, placements)`: the global result, its strides and the next draw equal one device."""

    def check(draw, *tensors, mesh, placements, strides=True):
        sharded = [shard(x, mesh, placements) for x in tensors]
        torch.manual_seed(7)
        torch.randn(3)  # leaves half of a pair in the generator
        expected = draw(*(x.clone() for x in tensors))
        state = torch.get_rng_state()
        torch.manual_seed(7)
        torch.randn(3)
        actual = draw(*sharded)
        assert torch.equal(torch.get_rng_state(), state), "state"
        assert isinstance(actual, DTensor)
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride() or not strides, (actual.stride(), expected.stride())
        assert not any(p.is_partial() for p in actual.placements)
        assert torch.equal(actual.to_local(), shard_of(expected, mesh, actual.placements)), "values"

    return check


def each(table, alike, shapes, meshes, dtypes=(torch.float32, torch.float64), transposed=True):
    for name, draw in table.items():
        for mesh, placements in meshes:
            for shape, dtype in zip(shapes, dtypes * len(shapes), strict=False):
                x = parameters(shape, dtype)
                for tensor in (x, x.t())[: 1 + transposed]:
                    try:
                        alike(draw, tensor, mesh=mesh, placements=placements)
                    except AssertionError as error:
                        raise AssertionError((name, shape, dtype, placements)) from error


@ranks(4)
def test_parameters_in_tensors(alike):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = [(mesh, p) for p in [(S0, S1), (S1, S0), (S0, S0), (R, S1)]]
    each(ELEMENTS, alike, [(5, 7), (3, 4), (17, 9)], meshes)


@ranks(3)
def test_samplers(alike):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    each(SAMPLERS, alike, [(5, 7), (4, 9)], [(mesh, (p,)) for p in (S0, S1, R)])
    for name in ("multinomial of one", "multinomial", "multinomial with replacement"):
        alike(SAMPLERS[name], parameters((11,)), mesh=mesh, placements=(S0,))


@ranks(2)
def test_functional_forms(alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    each(FUNCTIONAL, alike, [(5, 7), (3, 4)], [(mesh, (p,)) for p in (S0, S1)], dtypes=(torch.float32, torch.float64))


@ranks(2)
def test_results_in_a_given_tensor(alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for name, draw in OUT.items():
        for placements in [(S0,), (S1,)]:
            for x, out in [(parameters((5, 7)), torch.zeros(5, 7)), (parameters((7, 5)).t(), torch.zeros(5, 7))]:
                for given in (out.to(x.dtype), torch.zeros(7, 5, dtype=x.dtype).t()):
                    try:
                        alike(draw, x, given, mesh=mesh, placements=placements)
                    except AssertionError as error:
                        raise AssertionError((name, placements)) from error
    alike(lambda o: torch.randperm(23, out=o), torch.zeros(23, dtype=torch.int64), mesh=mesh, placements=(S0,))


@ranks(2)
def test_distributions(alike):
    """What `torch.distributions` draws from sharded parameters."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for draw in (
        lambda x: torch.distributions.Normal(x, x + 1, validate_args=False).sample(),
        lambda x: torch.distributions.Bernoulli(x, validate_args=False).sample(),
        lambda x: torch.distributions.Poisson(x, validate_args=False).sample(),
        lambda x: torch.distributions.Gamma(x, x, validate_args=False).sample(),
    ):
        for placements in [(S0,), (S1,)]:
            alike(draw, parameters((4, 6)), mesh=mesh, placements=placements, strides=False)


@ranks(2)
def test_gradients_of_rrelu_pass_the_same_noise(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for order in (lambda x: x, lambda x: x.t()):  # torch's noise is contiguous, whatever the order of x
        whole = (parameters((5, 6)) - 0.5).requires_grad_()
        sharded = shard(whole, mesh, (S1,))
        for x in (whole, sharded):
            torch.manual_seed(2)
            F.rrelu(order(x), training=True).square().sum().backward()
        assert torch.equal(sharded.grad.full_tensor(), whole.grad)


@ranks(3)
def test_a_rank_outside_the_mesh_advances_alike():
    part = DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))
    for draw in (
        lambda x: torch.bernoulli(x),
        lambda x: torch.native_dropout(x, 0.3, True)[0],
        lambda x: torch.normal(x, x),
        lambda x: torch.multinomial(x, 2),
        lambda x: torch.multinomial(x, 2, replacement=True),
        lambda x: x.exponential_(),
        torch.randn_like,
    ):
        whole = parameters((6, 4))
        place = {0: slice(0, 3), 2: slice(3, 6)}.get(dist.get_rank(), slice(0, 0))
        local = whole[place].clone()
        tensor = DTensor.from_local(local, part, [S0], run_check=False, shape=(6, 4), stride=(4, 1))
        torch.manual_seed(3)
        drawn = draw(tensor)
        torch.manual_seed(3), draw(whole)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        expected = draw(parameters((6, 4)))
        assert dist.get_rank() == 1 or torch.equal(drawn.to_local(), expected[place])
        torch.manual_seed(3), draw(DTensor.from_local(local, part, [S0], run_check=False, shape=(6, 4), stride=(4, 1)))
        assert torch.equal(torch.get_rng_state(), state)


@ranks(2)
def test_stock_shards_repeat(alike):
    """Without the rules the two halves are equal; an operator that stock torch refuses proves nothing."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for draw in (
        FUNCTIONAL["normal_functional"],
        ELEMENTS["bernoulli_(scalar tensor)"],
        SAMPLERS["multinomial of one"],
    ):
        x = parameters((6, 8))
        alike(draw, x, mesh=mesh, placements=(S0,), strides=False)
        with disabled(), pytest.raises((AssertionError, NotImplementedError)):
            alike(draw, x, mesh=mesh, placements=(S0,), strides=False)
