"""The norm of ordered reduction: accurate, and the same bits for every order and distribution of the elements."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim._norm import exact as _exact_norm
from vescale.optim._norm.counting import Counting, Share
from vescale.optim._norm.exact import exact_norm
from vescale.optim._ranks.axis import Axis
from vescale_testing import run_ranks


def values(dtype=torch.float64, spread=20):
    """Return 10,000 numbers of very different size, with both signs."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(10_000, generator=generator, dtype=torch.float64)
    return (numbers * 10 ** (torch.rand(10_000, generator=generator, dtype=torch.float64) * spread - spread / 2)).to(
        dtype
    )


def norm_of(tensors, norm_type=2.0):
    return exact_norm([tensors], norm_type, Counting([Share()]), torch.device("cpu"))


def cuts(numbers):
    yield [numbers]
    yield [numbers.flip(0)]
    yield [numbers.view(100, 100).T]
    yield list(numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))].split(7))
    table = numbers[1:].view(3, 3333)
    yield [numbers[:0], numbers[0], table[:, :1111], *table[:, 1111:]]


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [2**22, 1000])
def test_any_order_and_any_cut(monkeypatch, norm_type, dtype, chunk):
    monkeypatch.setattr(_exact_norm, "_CHUNK", chunk)
    numbers = values(dtype, spread=8)
    powers = numbers.double().abs() ** norm_type
    expected = math.fsum(powers.tolist()) ** (1 / norm_type)
    for tensors in cuts(numbers):
        norm = norm_of(tensors, norm_type)
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(expected, rel=1e-14)
        assert norm.item() == norm_of([numbers], norm_type).item()


def test_the_usual_sum_depends_on_the_order():
    found = {
        torch.stack([t.double().square().sum() for t in tensors]).sum().item() for tensors in cuts(values(spread=2))
    }
    assert len(found) > 1
    assert len({norm_of(tensors).item() for tensors in cuts(values(spread=2))}) == 1


@pytest.mark.parametrize("factor", [1e-300, 1e-150, 1e-30, 1.0, 1e30, 1e150, 1e290])
def test_any_size(factor):
    numbers = values(spread=2) * factor
    expected = math.hypot(*numbers.tolist())
    assert norm_of([numbers]).item() == pytest.approx(expected, rel=1e-14)


def test_special_values():
    assert norm_of([]).item() == 0
    assert norm_of([torch.zeros(3), torch.empty(0)]).item() == 0
    assert norm_of([torch.tensor([1.0, math.inf]), torch.ones(2)]).item() == math.inf
    assert norm_of([torch.tensor([1.0, -math.inf])]).item() == math.inf
    assert math.isnan(norm_of([torch.tensor([1.0, math.nan])]))
    assert math.isnan(norm_of([torch.tensor([math.inf]), torch.tensor([math.nan])]))
    assert norm_of([torch.tensor([3.0]), torch.tensor(4.0)]).item() == 5


def on_ranks():
    """Return norms where ranks hold parts, other tensors, replicas or nothing, added at once, before or after that."""
    numbers = values()
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis.of(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), role="test")
    mine = numbers.tensor_split(size)[rank]
    replicated = numbers[:10]
    special = numbers.clone()
    special[-1] = math.nan
    part, replica = Share(), Share(counts=rank == size - 1)
    at_once, before, after = (
        Counting([part], axis),
        Counting([Share(before={axis.ranks: axis})]),
        Counting([part], after=[axis]),
    )

    def norm(parts, counting, norm_type=2.0):
        return exact_norm(parts, norm_type, counting, torch.device("cpu")).item()

    return [
        norm([[mine]], at_once),
        norm([[mine]], before),
        norm([[mine]], after),
        norm([[numbers] if rank == size - 1 else []], at_once),
        norm([[mine], [replicated]], Counting([part, replica], axis)),
        norm([[mine], [replicated]], Counting([*before.shares, part])),
        norm([[special.tensor_split(size)[rank]]], at_once),
        norm([[mine / 0 if rank else mine]], at_once, 1.0),
        norm([[mine], [replicated]], Counting([part, part], axis)),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_distribution_over_ranks(world_size):
    numbers = values()
    whole, both = norm_of([numbers]).item(), norm_of([numbers, numbers[:10]]).item()
    infinite = norm_of([numbers], 1.0).item() if world_size == 1 else math.inf
    for norms in run_ranks(on_ranks, world_size):
        assert norms[:6] == [whole] * 4 + [both] * 2
        assert math.isnan(norms[6])
        assert norms[7] == infinite
        assert (norms[8] == both) == (world_size == 1)  # replicas that all count
