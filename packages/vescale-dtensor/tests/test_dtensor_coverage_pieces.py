"""The operator sweep's own sharding: cutting, putting together, and the choice of placements."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "coverage"))
combos, pieces = importlib.import_module("combos"), importlib.import_module("pieces")
sys.path.pop(0)

combinations, options, parse = combos.combinations, combos.options, combos.parse
Mismatch, assemble, close, part = pieces.Mismatch, pieces.assemble, pieces.close, pieces.part

MESHES = [(4,), (2, 2)]


def parts(whole, mesh_shape, placements):
    return [part(whole, mesh_shape, coord, placements, 3) for coord in itertools.product(*map(range, mesh_shape))]


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("shape", [(), (1,), (8,), (5, 3), (0, 4), (2, 6, 3)])
def test_parts_put_together_are_the_whole(mesh_shape, shape):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    texts = options(whole, len(mesh_shape))
    assert len(texts) == (2 + len(shape)) ** len(mesh_shape)
    for text in texts:
        placements = parse(text)
        assert torch.equal(assemble(parts(whole, mesh_shape, placements), shape, mesh_shape, placements), whole), text


def test_shards_are_those_of_torch_chunk():
    whole = torch.arange(10).view(5, 2)
    assert [list(held.shape) for held in parts(whole, (4,), [Shard(0)])] == [[2, 2], [2, 2], [1, 2], [0, 2]]
    assert torch.equal(parts(whole, (2, 2), [Shard(0), Shard(1)])[1], whole[:3, 1:])
    assert torch.equal(parts(whole, (2, 2), [Shard(0), Shard(0)])[1], whole[2:3])


def test_partial_parts_are_no_copies_and_no_halves():
    whole = torch.ones(6, dtype=torch.float64)
    held = parts(whole, (4,), [Partial()])
    assert torch.equal(sum(held), whole)
    assert all(not torch.equal(held[i], held[j]) for i in range(4) for j in range(i))


def test_what_does_not_fit_is_a_mismatch():
    whole = torch.randn(6, 4).double()
    held = parts(whole, (4,), [Shard(0)])
    swapped = assemble([held[1], held[0], *held[2:]], whole.shape, (4,), [Shard(0)])
    assert not close(swapped, whole, 1e-8)
    with pytest.raises(Mismatch, match=r"rank 3 holds \(2, 4\) where"):
        assemble([held[0]] * 4, whole.shape, (4,), [Shard(0)])
    with pytest.raises(Mismatch, match=r"replicas differ: the rank at \(3,\)"):
        assemble([whole] * 3 + [whole + 1e-6], whole.shape, (4,), [Replicate()])


def test_close_is_strict_about_nan_infinity_and_integers():
    inf, nan = float("inf"), float("nan")
    value = torch.tensor([1.0, nan, inf], dtype=torch.float64)
    assert close(value, value.clone(), 0.0)
    assert close(value + 1e-12, value, 1e-10)
    for other in ([1.0, nan, -inf], [1.0, 0.0, inf], [nan, nan, inf], [1.001, nan, inf]):
        assert not close(torch.tensor(other, dtype=torch.float64), value, 1e-8)
    assert not close(torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0)


def test_combinations_cover_every_pair_and_do_not_change():
    tensors = [torch.empty(2, 3), torch.empty(4, 5, 6), torch.empty(7, dtype=torch.int64)]
    choices = [options(tensor, 1) for tensor in tensors]
    assert choices[2] == ["R", "S0"]
    chosen = combinations(choices, cap=38, seed="x")
    assert len(chosen) <= 38 < 4 * 5 * 2
    assert chosen == combinations(choices, cap=38, seed="x")
    assert len(set(chosen)) == len(chosen)
    for i, j in itertools.combinations(range(3), 2):
        assert {(row[i], row[j]) for row in chosen} == set(itertools.product(choices[i], choices[j]))
    assert set(combinations(choices[:2], cap=40, seed="x")) == set(itertools.product(*choices[:2]))
