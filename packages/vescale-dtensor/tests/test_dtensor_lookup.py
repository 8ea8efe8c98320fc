"""`gather` along a sharded dim: its result can be used like any other, several times, with gradients of one device."""

import itertools

import pytest
import torch

from vescale.dtensor import Partial, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import RankFailure, ranks

FUNCTIONS = {
    "log-probabilities of the targets": lambda x, t: x.log_softmax(-1).gather(-1, t).squeeze(-1),
    "a loss": lambda x, t: -x.log_softmax(-1).gather(-1, t).squeeze(-1).mean(),
    "used twice": lambda x, t: (lambda chosen: chosen.exp() + chosen * 2)(x.gather(-1, t)),
    "gathered again": lambda x, t: x.gather(1, t).gather(1, torch.zeros_like(t)).flatten(),
    "a clipped ratio": lambda x, t: (x.gather(1, t) - x.detach().gather(1, t)).exp().clamp(0.9, 1.1).sum(),
    "compared": lambda x, t: x.gather(-1, t) > 0,
}


def operands(classes):
    torch.manual_seed(5)
    logits = torch.randn(4, classes, dtype=torch.float64, requires_grad=True)
    return [logits, torch.randint(classes, (4, 1))]


@pytest.mark.parametrize("classes", [8, 5])
def test_equal_one_device(classes, assert_equals_one_device):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        for name, function in FUNCTIONS.items():
            assert assert_equals_one_device(function, operands(classes), mesh) == 12, name

    on_every_rank()


@ranks(4)
def test_two_mesh_axes_and_integers():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, index = torch.arange(20).view(4, 5) - 7, torch.tensor([[4], [0], [2], [4]])
    single = [Replicate(), Shard(0), Shard(1)]
    for of_x, of_index in itertools.product(itertools.product(single, repeat=2), repeat=2):
        for values in (x, x > 0, x.double()):
            chosen = distribute_tensor(values, mesh, of_x).gather(1, distribute_tensor(index, mesh, of_index))
            assert all(type(p) in (Replicate, Shard, Partial) for p in chosen.placements)
            assert torch.equal(chosen.full_tensor(), values.gather(1, index))
            assert torch.equal(chosen.squeeze(1).full_tensor(), values.gather(1, index).squeeze(1))


@ranks(2)
def test_an_index_out_of_range_is_refused_on_every_rank():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for size in (4, 1):  # one column: the second rank holds none
        x = distribute_tensor(torch.ones(2, size), mesh, [Shard(1)])
        with pytest.raises(RuntimeError, match="out of bounds"):
            x.gather(1, distribute_tensor(torch.tensor([[0], [size]]), mesh, [Replicate()]))


def test_stock_torch_fails_at_the_second_use():
    @ranks(2, timeout=20)
    def used_twice():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, index = operands(8)
        with disabled("operators"):
            chosen = distribute_tensor(x, mesh, [Shard(1)]).gather(1, distribute_tensor(index, mesh, [Replicate()]))
            chosen.squeeze(1).full_tensor()

    with pytest.raises(RankFailure):
        used_twice()
