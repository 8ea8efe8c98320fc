"""Placements are values, and tensors placed so can be made, copied and stored."""

import copy
import io
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.dtensor import InterleavedShard, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks


@pytest.mark.parametrize("placement", [InterleavedShard(1, 3), RaggedShard((0, 1), (2, 0, 5)), RaggedShard([0], [1])])
def test_values(placement):
    same = eval(repr(placement))
    assert same == placement
    assert hash(same) == hash(placement)
    assert type(same) is type(placement)
    for other in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert other == placement
        assert repr(other) == repr(placement) == str(placement)
    assert placement != Shard(0)
    assert not placement.is_replicate()
    assert not placement.is_partial()
    assert not placement.is_shard()


def test_unequal_values():
    assert RaggedShard((0,), (1, 2)) != RaggedShard((0,), (2, 1))
    assert RaggedShard((0,), (1, 2)) != RaggedShard((0, 1), (1, 2))
    assert InterleavedShard(0, 2) != InterleavedShard(0, 3)
    assert InterleavedShard(0, 2) == _StridedShard(0, split_factor=2)  # the same layout, so that torch's rules hold
    assert InterleavedShard(0, 2).k == 2


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RaggedShard((1,), (1, 1)), r"expects the leading dims.*got dims=\(1,\)"),
        (lambda: RaggedShard((), (1, 1)), "expects the leading dims"),
        (lambda: RaggedShard((0,), (1, -1)), "numbers of units >= 0 with a positive sum"),
        (lambda: RaggedShard((0,), (0, 0)), "numbers of units >= 0 with a positive sum"),
        (lambda: RaggedShard((0,), ()), "numbers of units >= 0 with a positive sum"),
        (lambda: InterleavedShard(0, 0), "positive number of parts, got k=0"),
        (lambda: InterleavedShard(-1, 3), "dim counted from the front, got dim=-1"),
    ],
)
def test_what_is_no_placement(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@ranks(2)
def test_tensors_are_made_copied_and_stored():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(6, 4)
    for placement in (RaggedShard((0, 1), (1, 5)), InterleavedShard(0, 3)):
        tensor = torch.nn.Parameter(distribute_tensor(whole, mesh, [placement]))
        assert repr(placement) in repr(tensor)
        twin = copy.deepcopy(tensor)
        stored = io.BytesIO()
        torch.save(tensor, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=True)
        for other in (twin, loaded):
            assert isinstance(other, torch.nn.Parameter)
            assert other.placements == (placement,)
            assert torch.equal(other.detach().full_tensor(), whole)
            assert other.to_local().untyped_storage().data_ptr() != tensor.to_local().untyped_storage().data_ptr()
        again = DTensor.from_local(tensor.to_local(), mesh, [placement], shape=whole.shape, stride=whole.stride())
        assert torch.equal(again.full_tensor(), whole)


@ranks(2)
def test_the_global_shape_of_a_ragged_shard_must_be_given():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"cannot derive the global shape.*RaggedShard.*pass shape= and stride="):
        DTensor.from_local(torch.zeros(2), mesh, [RaggedShard((0,), (1, 1))])
    assert DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]).shape == (4,)


@ranks(2)
def test_modules_move_and_convert_their_ragged_parameters():
    mesh = init_device_mesh("cpu", (2,))
    linear = torch.nn.Linear(4, 6)
    whole = linear.weight.detach().clone()
    linear.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 2))]))
    linear.bias = torch.nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Replicate()]))
    linear.to(torch.float64).requires_grad_(False)
    assert torch.equal(linear.weight.full_tensor(), whole.double())
    assert linear.weight.placements == (RaggedShard((0,), (1, 2)),)
    linear.load_state_dict({name: tensor * 2 for name, tensor in linear.state_dict().items()})
    assert torch.equal(linear.weight.full_tensor(), 2 * whole.double())
