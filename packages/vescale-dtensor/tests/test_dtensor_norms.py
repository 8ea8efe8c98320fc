"""The norm of shards is one number, whatever is done with it: norms of parts are no partial sums."""

import pytest
import torch

from vescale.dtensor import Shard, UnsupportedOperator, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks, torch_is_before

USES = {
    "summed": lambda norm: norm.sum(),
    "mean": lambda norm: norm.mean(),
    "norm of norms": lambda norm: norm.norm(),
    "divided by its sum": lambda norm: norm / norm.sum(),
    "stacked": lambda norm: torch.stack([norm, 2 * norm]).sum(0),
    "product": lambda norm: torch.outer(norm, norm),
    "covariance": lambda norm: norm.cov(),
    "negated in place": lambda norm: norm.clone().neg_(),
    "clamped in place": lambda norm: norm.clone().clamp_(max=1).sub_(3),
    "written in a view": lambda norm: norm.clone()[1:].mul_(-2),
}
NORMS = {
    "2": lambda x: x.norm(dim=0),
    "1": lambda x: x.norm(1, 1),
    "3": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "largest": lambda x: x.norm(float("inf"), 0),
}


@pytest.mark.parametrize("norm", NORMS)
def test_equal_one_device(norm, assert_equals_one_device):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,))
        operand = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        for use in USES.values():
            assert assert_equals_one_device(lambda x, use=use: use(NORMS[norm](x)), [operand], mesh) == 4

    on_every_rank()


@ranks(2)
def test_lists_of_norms():
    whole = [torch.arange(1.0, 9).view(4, 2), torch.ones(3, 3)]
    mesh = init_device_mesh("cpu", (2,))
    norms = torch._foreach_norm([distribute_tensor(x, mesh, [Shard(0)]) for x in whole])
    expected = torch._foreach_norm(whole)
    torch.testing.assert_close((norms[0] + norms[1]).full_tensor(), expected[0] + expected[1])
    torch.testing.assert_close(torch.stack(norms).norm().full_tensor(), torch.stack(expected).norm())
    torch.testing.assert_close(torch.stack(norms).sum().full_tensor(), torch.stack(expected).sum())
    with pytest.raises(UnsupportedOperator, match="norms of parts, which have no sign: use the form that returns"):
        norms[0].neg_()


@ranks(2)
def test_stock_torch_adds_norms_of_parts():
    x = distribute_tensor(torch.tensor([[3.0, 0], [0, 4]]), init_device_mesh("cpu", (2,)), [Shard(0)])
    with disabled("operators"):
        assert x.norm(dim=0).sum().full_tensor() == (5 if torch_is_before("2.14") else 7)
    assert x.norm(dim=0).sum().full_tensor() == 7
