"""Initializers of `torch.nn.init` give a sharded parameter the values that they give on one device."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

S0, S1, R = Shard(0), Shard(1), Replicate()

INITIALIZERS = {
    "uniform_": nn.init.uniform_,
    "normal_": lambda x: nn.init.normal_(x, 0.0, 0.02),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, -0.5, 0.5),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "constants": lambda x: nn.init.ones_(nn.init.zeros_(x)),
}


@pytest.mark.parametrize("world", [3, 4])
def test_initializers(world, assert_drawn_alike):
    @ranks(world)
    def on_every_rank():
        sizes, layouts = ((3,), [(S0,), (S1,)]) if world == 3 else ((2, 2), [(S0, S1), (S0, S0), (R, S1)])
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        for draw in INITIALIZERS.values():
            for shape in [(17, 15), (2, 3)]:
                for dtype in (torch.float32, torch.float64):
                    for placements in layouts:
                        assert_drawn_alike(draw, torch.zeros(shape, dtype=dtype), mesh, placements)

    on_every_rank()


@ranks(2)
def test_a_module_resets_its_parameters(shard, shard_of):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for make, placements in [
        (lambda: nn.Linear(6, 5), {"weight": (S0,), "bias": (S0,)}),
        (lambda: nn.Linear(6, 5), {"weight": (S1,), "bias": (R,)}),
        (lambda: nn.Embedding(9, 4), {"weight": (S0,)}),
        (lambda: nn.LayerNorm(4), {"weight": (R,), "bias": (R,)}),
    ]:
        torch.manual_seed(4)
        reference = make()
        sharded = make()
        for name, parameter in list(sharded.named_parameters()):
            setattr(sharded, name, nn.Parameter(shard(torch.zeros_like(parameter), mesh, placements[name])))
        torch.manual_seed(4)
        sharded.reset_parameters()
        for name, parameter in reference.named_parameters():
            actual = getattr(sharded, name)
            assert torch.equal(actual.to_local(), shard_of(parameter, mesh, actual.placements)), (make, name)


@ranks(2)
def test_orthogonal_factorises_a_new_tensor(assert_drawn_alike):
    """More rows than columns, and fewer, for which it transposes that tensor in place."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placements in [(S0,), (S1,), (R,)]:
        for shape in [(6, 4), (4, 6), (3, 5, 2)]:
            assert_drawn_alike(nn.init.orthogonal_, torch.zeros(shape), mesh, placements)


@ranks(2)
def test_sparse_zeroes_the_elements_that_a_permutation_names(assert_drawn_alike):
    """The permutations are plain tensors, the same on all ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placements in [(S0,), (S1,), (R,)]:
        with implicit_replication():
            assert_drawn_alike(lambda x: nn.init.sparse_(x, 0.3), torch.zeros(6, 5), mesh, placements)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        assert_drawn_alike(lambda x: nn.init.sparse_(x, 0.3), torch.zeros(6, 5), mesh, (S0,))


@ranks(2)
def test_without_the_rules_halves_repeat(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with disabled(), pytest.raises(AssertionError):
        assert_drawn_alike(INITIALIZERS["kaiming_uniform_"], torch.zeros(6, 4), mesh, (S0,))
