"""Inference mode shows operators whole; they communicate no more than outside it, and give the same values."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import Shard, init_device_mesh
from vescale_testing import ranks

OPERATORS = {
    "matmul": lambda x: torch.matmul(x, x.transpose(2, 3)),
    "linear": lambda x: F.linear(x, x[0, 0]),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=2),
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "flatten": lambda x: x.flatten(2),
}


@ranks(2)
def test_the_same_communication_as_outside(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.rand(4, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    for name, operator in OPERATORS.items():
        x = shard(whole, mesh, (Shard(1),))
        with CommDebugMode() as outside:
            expected = operator(x)
        with torch.inference_mode(), CommDebugMode() as inside:
            actual = operator(x + 0)  # a view of a tensor from outside is an error of stock DTensor
        assert actual.placements == expected.placements, name
        assert inside.get_comm_counts() == outside.get_comm_counts(), name
        assert torch.equal(actual.to_local(), expected.to_local()), name
        torch.testing.assert_close(actual.full_tensor(), operator(whole))
