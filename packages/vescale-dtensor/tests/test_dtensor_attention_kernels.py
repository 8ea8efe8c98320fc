"""Fused attention kernels of other devices get operands whose heads were cut where the kernel can pair them.

The kernels need a device that is not here; what is tested is what reaches stock torch's rule for them.
"""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, UnsupportedRandomOperator, distribute_tensor, init_device_mesh
from vescale.dtensor._operators import attention as _attention
from vescale_testing import ranks

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def placements_that_arrive(monkeypatch, mesh, num_heads, num_key_heads, placement):
    arrived = []
    monkeypatch.setattr(_attention._torch, "stock_dispatch", lambda _op, args, _kwargs: arrived.extend(args[:3]))
    query = distribute_tensor(torch.randn(2, num_heads, 3, 4), mesh, [placement])
    key, value = (distribute_tensor(torch.randn(2, num_key_heads, 3, 4), mesh, [placement]) for _ in range(2))
    _attention.run_fused(FLASH, (query, key, value, 0.0, True), {})
    return [tensor.placements[0] for tensor in arrived]


@ranks(2)
def test_heads_that_do_not_divide_are_gathered():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.MonkeyPatch.context() as patch:
        assert placements_that_arrive(patch, mesh, 12, 4, Shard(1)) == [Shard(1)] * 3
        assert placements_that_arrive(patch, mesh, 12, 3, Shard(1)) == [Replicate()] * 3
        assert placements_that_arrive(patch, mesh, 3, 3, Shard(1)) == [Replicate()] * 3
        assert placements_that_arrive(patch, mesh, 3, 3, Shard(0)) == [Shard(0)] * 3


@ranks(2)
def test_dropout_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    operand = distribute_tensor(torch.randn(2, 4, 3, 4), mesh, [Shard(1)])
    with pytest.raises(UnsupportedRandomOperator, match=r"flash_attention.*SDPBackend.MATH"):
        _attention.run_fused(FLASH, (operand, operand, operand, 0.1, True), {})
