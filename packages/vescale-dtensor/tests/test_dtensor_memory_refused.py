"""What depends on memory that a DTensor does not have is refused, on all ranks, before anything is written."""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, UnsupportedOperator, distribute_tensor, init_device_mesh
from vescale_testing import ranks

REFUSED = r"expected `out` of the result's shape \(4, 3\), got \(|reads elements of the tensor that it writes to"
X = torch.arange(12.0).reshape(4, 3)
PLACEMENTS = [Shard(0), Shard(1), Replicate()]


@ranks(2)
def test_a_result_of_another_shape():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in PLACEMENTS:
        x = distribute_tensor(X.clone(), mesh, [placement])
        for out in (x[0], x[1:3], distribute_tensor(torch.zeros(2, 3), mesh, [placement])):
            with pytest.raises(UnsupportedOperator, match=REFUSED):
                torch.mul(x, 2, out=out)
        assert torch.equal(x.full_tensor(), X)
        out = distribute_tensor(torch.zeros(4, 3), mesh, [placement])
        assert torch.equal(torch.mul(x, 2, out=out).full_tensor(), X * 2)


@ranks(2)
def test_an_offset_in_the_memory_of_a_view():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in PLACEMENTS:
        x = distribute_tensor(X, mesh, [placement])
        assert torch.equal(x.as_strided((2, 2), (3, 1), 4).full_tensor(), X.as_strided((2, 2), (3, 1), 4))
        assert torch.equal(x[1:].as_strided((2, 2), (3, 1)).full_tensor(), X[1:].as_strided((2, 2), (3, 1)))
        with pytest.raises(UnsupportedOperator, match="an offset counts from the begin of the memory"):
            x[1:].as_strided((2, 2), (3, 1), 4)
