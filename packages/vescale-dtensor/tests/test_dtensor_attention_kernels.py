"""Fused attention kernels of other devices get operands whose heads were cut where the kernel can pair them.

The kernels need a device that is not here. A kernel for the CPU stands in for one: it reports the shards that it gets.
"""

import pytest
import torch

from vescale.dtensor import Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks

KERNEL = "_scaled_dot_product_flash_attention"


class ReachedKernelError(Exception):
    """Ends the operator where the kernel would begin."""


@pytest.fixture
def shapes_in_the_kernel():
    """`shapes_in_the_kernel(query, key, value)`: the shapes of the local tensors with which the kernel is called."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(query, key, value, *_args, **_kwargs):
        raise ReachedKernelError(*(tuple(operand.shape) for operand in (query, key, value)))

    library.impl(KERNEL, kernel, "CPU")

    def call(*operands):
        with pytest.raises(ReachedKernelError) as called:
            getattr(torch.ops.aten, KERNEL)(*operands, 0.0, True)
        return called.value.args

    yield call
    library._destroy()


@ranks(2)
def test_heads_that_do_not_divide_are_gathered(shapes_in_the_kernel):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def shapes(num_heads, num_key_heads, placement):
        query = distribute_tensor(torch.randn(2, num_heads, 3, 4), mesh, [placement])
        key, value = (distribute_tensor(torch.randn(2, num_key_heads, 3, 4), mesh, [placement]) for _ in range(2))
        return shapes_in_the_kernel(query, key, value)

    assert shapes(12, 4, Shard(1)) == ((2, 6, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
    assert shapes(12, 3, Shard(1)) == ((2, 12, 3, 4), (2, 3, 3, 4), (2, 3, 3, 4))
    assert shapes(3, 3, Shard(1)) == ((2, 3, 3, 4),) * 3
    assert shapes(3, 3, Shard(0)) == ((1, 3, 3, 4),) * 3
