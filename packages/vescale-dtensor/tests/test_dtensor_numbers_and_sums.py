"""A number beside partial sums is added once, whatever was added before, also in place.

Stock DTensor's cache takes a number and a tensor without dims for the same call. After `partial + tensor` it lets every
rank add the whole number of `partial + number`; the other way round it fails.
"""

import itertools

import pytest
import torch

from vescale.dtensor import DTensor, Partial, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

NUMBER = 1.3


def forms(mesh):
    plain = torch.tensor(NUMBER, dtype=torch.float64)
    return {"number": NUMBER, "plain tensor": plain, "DTensor": distribute_tensor(plain, mesh, [Replicate()])}


OPERATORS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: y - x,
    "add with alpha": lambda x, y: torch.add(x, y, alpha=3),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x.abs() ** y,
    "maximum": lambda x, y: torch.maximum(x, torch.as_tensor(y)) if not isinstance(y, float) else x.clamp(min=y),
    "where": lambda x, y: torch.where(x > 0, x, y),
}


def partial_sum(whole, mesh):
    share = torch.arange(1.0, mesh.size() + 1, dtype=whole.dtype)
    return DTensor.from_local(whole * (share / share.sum())[mesh.get_local_rank()], mesh, [Partial()])


def differences(mesh, operator, order, shape):
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for form in order:
        result = operator(partial_sum(whole, mesh), forms(mesh)[form])
        expected = operator(whole, NUMBER if form == "number" else torch.tensor(NUMBER, dtype=torch.float64))
        yield (result.full_tensor() - expected).abs().max()


@ranks(2)
def test_in_every_order():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    # a new shape for every order: the cache must not know it
    for size, order in enumerate(itertools.permutations(forms(mesh)), start=3):
        for name, operator in OPERATORS.items():
            assert max(differences(mesh, operator, order, (size, 5))) < 1e-14, (name, order)


IN_PLACE = {
    "number": lambda x: x.add_(NUMBER),
    "a mean": lambda x: x.sub_(x.mean()),
    "a sum, twice": lambda x: x.add_(x.sum(), alpha=2).div_(x.sum()),
    "an element": lambda x: x.mul_(x[0, 0] * 2).add_(x[-1, -1] + 1),
    "rows": lambda x: x[1:].sub_(x.mean()),
}


@ranks(2)
def test_in_place():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for name, write in IN_PLACE.items():
        whole = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x = partial_sum(whole, mesh)
        write(x)
        unwritten = whole.clone()
        write(whole)
        torch.testing.assert_close(x.full_tensor(), whole, rtol=1e-12, atol=1e-12, msg=name)
        assert not torch.equal(unwritten, whole), name


REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "product": lambda x: x.prod(0),
    "largest": lambda x: x.amax(0),
    "norm": lambda x: x.norm(dim=0),
}


@ranks(4)
def test_in_place_of_a_view_of_what_was_reduced():
    whole = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
        for name, reduce in REDUCTIONS.items():
            reduced = reduce(distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim))
            expected = reduce(whole)
            for x in (reduced, expected):
                x[1:].mul_(-2)
                x[0].add_(1)
                x.view(3, 1)[2].sub_(0.5)
            torch.testing.assert_close(reduced.full_tensor(), expected, rtol=1e-12, atol=0, msg=f"{name} {mesh}")


@ranks(3)
def test_in_place_of_a_view_of_factors():
    """What is written becomes a factor of one rank; those of the others are 1."""
    mesh = init_device_mesh("cpu", (3,))
    for factor in (torch.tensor([[2.0, -1.5], [0.5, 3.0]]), torch.tensor([[2, -1], [5, 3]])):
        x, whole = DTensor.from_local(factor, mesh, [Partial("product")]), factor**3
        for each in (x, whole):
            each[1:].add_(4)
        assert x.placements == (Partial("product"),)
        assert torch.equal(x.full_tensor(), whole)


@ranks(2)
def test_stock_torch_adds_it_on_every_rank():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with disabled("operators"):
        _, wrong = differences(mesh, OPERATORS["add"], ("plain tensor", "number"), (3, 7))
        assert wrong == pytest.approx(NUMBER)
        with pytest.raises(AttributeError):
            list(differences(mesh, OPERATORS["add"], ("number", "plain tensor"), (4, 7)))
