"""Operators are known by what their schema says, not by their names, which say otherwise for some."""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

PLACEMENTS = ((Replicate(),), (Shard(0),), (Shard(1),))

SHIFTS = {
    "left": lambda x: x << 1,
    "right": lambda x: x >> 1,
    "left by a tensor": lambda x: x << x,
    "of a number": lambda x: x.__lshift__(2),
    "in place": lambda x: x.clone().__ilshift__(1),
}

OF_SEVERAL_RESULTS = {
    "max": lambda x, out: torch.max(x, 0, out=out),
    "min": lambda x, out: torch.min(x, -1, out=out),
    "median": lambda x, out: torch.median(x, 1, out=out),
    "mode": lambda x, out: torch.mode(x, 0, out=out),
    "kthvalue": lambda x, out: torch.kthvalue(x, 2, 0, out=out),
    "sort": lambda x, out: torch.sort(x, 1, out=out),
    "stable sort": lambda x, out: torch.sort(x, stable=True, dim=0, out=out),
    "topk": lambda x, out: torch.topk(x, 2, 0, out=out),
}


@ranks(2)
def test_shifts_are_no_writes(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(12).view(4, 3)
    for placements in PLACEMENTS:
        for name, shift in SHIFTS.items():
            x = shard(whole, mesh, placements)
            assert torch.equal(shift(x).full_tensor(), shift(whole)), (name, placements)
            assert torch.equal(x.full_tensor(), whole), (name, placements)


@ranks(2)
def test_stock_returns_the_operand_of_a_shift(shard):
    x = shard(torch.arange(4), init_device_mesh("cpu", (2,)), (Shard(0),))
    with disabled("operators"):
        assert torch.equal((x << 1).full_tensor(), torch.arange(4))


@ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_every_given_result_is_written(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()
    for name, function in OF_SEVERAL_RESULTS.items():
        expected = function(whole, (torch.empty(0).double(), torch.empty(0, dtype=torch.int64)))
        for placements in PLACEMENTS:
            x = shard(whole, mesh, placements)
            fits = [p if not isinstance(p, Shard) or p.dim < expected[0].ndim else Replicate() for p in placements]
            out = tuple(shard(torch.zeros_like(each), mesh, fits) for each in expected)
            returned = function(x, out)
            for given, got, wanted in zip(out, returned, expected, strict=True):
                assert got is given, name
                assert torch.equal(given.full_tensor(), wanted), (name, placements)
