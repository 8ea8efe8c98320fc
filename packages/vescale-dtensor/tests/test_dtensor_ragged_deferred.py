"""Deferred modules materialize in ragged, interleaved and strided placements, bit for bit as constructed eagerly."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.dtensor import (
    InterleavedShard,
    RaggedShard,
    Replicate,
    Shard,
    deferred_init,
    distribute_tensor,
    init_device_mesh,
    materialize,
)
from vescale_testing import ranks


class Model(nn.Module):
    """Draws of several kinds, arithmetic on them, a filled row, a matrix that must be whole, a buffer."""

    def __init__(self):
        super().__init__()
        self.merged = nn.Linear(4, 24)
        self.table = nn.Embedding(16, 4, padding_idx=3)
        self.odd = nn.Parameter(torch.randn(12, 3).mul_(0.02))
        self.truncated = nn.Parameter(torch.empty(8, 6, dtype=torch.float64))
        nn.init.trunc_normal_(self.truncated, std=0.5)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(8, 8)))
        self.register_buffer("steps", torch.arange(24).reshape(8, 3))
        self.cube = nn.Parameter(torch.rand(4, 2, 6))


LAYOUTS = [
    [InterleavedShard(0, 2), Replicate()],
    [_StridedShard(0, split_factor=2), Shard(0)],
    [RaggedShard((0,), (1, 3)), Replicate()],
    [RaggedShard((0,), (1, 1)), InterleavedShard(1, 1)],
    [Shard(0), RaggedShard((0,), (0, 2))],
    [InterleavedShard(0, 4), Shard(0)],
]


@ranks(4)
def test_every_layout_of_every_tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    eager = Model()
    state = torch.get_rng_state()
    for layout in LAYOUTS:
        torch.manual_seed(3)
        model = materialize(deferred_init(Model), mesh, lambda _, tensor: layout if tensor.dim() > 1 else None)  # noqa: B023
        assert torch.equal(torch.get_rng_state(), state)
        for (name, expected), (_, actual) in zip(eager.state_dict().items(), model.state_dict().items(), strict=True):
            if expected.dim() == 1:
                assert torch.equal(actual, expected)
                continue
            assert isinstance(actual, DTensor)
            assert actual.placements == tuple(layout)
            part = distribute_tensor(expected, mesh, layout, src_data_rank=None).to_local()
            assert torch.equal(actual.to_local(), part), (name, layout)


@ranks(4)
def test_flat_ragged_shards():
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    eager = Model()
    units = {
        "merged.weight": (1, 7, 0, 8),
        "table.weight": (0, 0, 16, 0),
        "cube": (5, 1, 1, 1),
        "merged.bias": (1, 0, 2, 0),
    }
    plan = {
        "merged.weight": [RaggedShard((0, 1), units["merged.weight"])],
        "table.weight": [RaggedShard((0,), units["table.weight"])],
        "cube": [RaggedShard((0, 1, 2), units["cube"])],
        "merged.bias": [RaggedShard((0,), units["merged.bias"])],
    }
    torch.manual_seed(3)
    model = materialize(deferred_init(Model), mesh, plan)
    rank = mesh.get_local_rank()
    for name, placements in plan.items():
        flat = dict(eager.named_parameters())[name].detach().flatten(0, len(placements[0].dims) - 1)
        unit = len(flat) // sum(units[name])
        expected = flat.split([count * unit for count in units[name]])[rank]
        actual = dict(model.named_parameters())[name]
        assert isinstance(actual, nn.Parameter)
        assert actual.shape == dict(eager.named_parameters())[name].shape
        assert torch.equal(actual.to_local(), expected)
    assert torch.equal(model.odd, eager.odd)


@ranks(2)
def test_a_shard_that_draws_for_itself_differs():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = materialize(deferred_init(nn.Linear, 4, 6), mesh, {"weight": [InterleavedShard(0, 3)]})
    torch.manual_seed(3)
    own = nn.Linear(4, 3).weight
    assert model.weight.to_local().shape == own.shape
    assert not torch.equal(model.weight.to_local(), own) or mesh.get_local_rank() == 0
    assert not torch.equal(model.weight.to_local(), nn.Linear(4, 3).weight)


@ranks(2)
def test_real_tensors_are_cut_alike():
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Linear(4, 6)
    whole = linear.weight.detach().clone()
    materialize(linear, mesh, {"weight": [RaggedShard((0, 1), (1, 5))]})
    assert torch.equal(linear.weight.full_tensor(), whole)


@ranks(2)
def test_what_does_not_fit_names_the_parameter():
    mesh = init_device_mesh("cpu", (2,))
    module = deferred_init(nn.Linear, 4, 7)
    with pytest.raises(ValueError, match=r"'weight': RaggedShard.*7 is not divisible by 3"):
        materialize(module, mesh, {"weight": [RaggedShard((0,), (1, 2))]})
    with pytest.raises(ValueError, match=r"'bias': InterleavedShard.*dim made of 3 equal parts"):
        materialize(module, mesh, {"bias": [InterleavedShard(0, 3)]})
