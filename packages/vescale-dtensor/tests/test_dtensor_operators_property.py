"""Any operator of a list, on tensors of any shape, in any placements on any mesh, gives what one device gives.

Every rank draws the same examples, as they follow from the test's source alone.
"""

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from vescale.dtensor import DTensor, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

SIZES = (1, 2, 3, 4, 5, 7, 8)

UNARY = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax of dim 0": lambda x: x.log_softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "mean": lambda x: x.mean(),
    "sum of dim 0": lambda x: x.sum(0),
    "amax": lambda x: x.amax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(-1).values,
    "flatten": lambda x: x.flatten(),
    "transpose and reshape": lambda x: x.transpose(0, -1).reshape(-1),
    "select": lambda x: x[0] * x.select(-1, -1).sum(),
    "slice": lambda x: x[1:],
    "split": lambda x: torch.cat([part * i for i, part in enumerate(x.split(2, -1))], -1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "norm": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp(0),
    "trapezoid": lambda x: torch.trapezoid(x),
    "roll and flip": lambda x: x.roll(1, 0).flip(-1),
    "triu": lambda x: x.triu() if x.ndim > 1 else x,
}
BINARY = {
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "huber_loss": lambda x, y: F.huber_loss(x, y),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "matmul": lambda x, y: x @ y.transpose(-1, -2) if x.ndim > 1 else x @ y,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "cat": lambda x, y: torch.cat([x, y], 0),
    "stack": lambda x, y: torch.stack([x, y], -1),
}
MESHES = ((4,), (2, 2), (1, 4), (4, 1))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(function, tensors):
    """Return the result and the gradients of its sum with fixed weights."""
    result = function(*tensors)
    weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    if isinstance(result, DTensor):
        weight = distribute_tensor(weight, result.device_mesh, [Replicate()] * result.device_mesh.ndim)
    (result * weight).sum().backward()
    return [whole(result), *(whole(tensor.grad) for tensor in tensors)]


def check(data, meshes):
    functions = data.draw(st.sampled_from([UNARY, BINARY]))
    name = data.draw(st.sampled_from(sorted(functions)))
    shape = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    mesh = meshes[data.draw(st.integers(0, len(meshes) - 1))]
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    number = 1 if functions is UNARY else 2
    placements = [[data.draw(st.sampled_from(choices)) for _ in range(mesh.ndim)] for _ in range(number)]
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for _ in placements]
    expected = run(functions[name], [value.clone().requires_grad_() for value in values])
    sharded = [distribute_tensor(v, mesh, p).requires_grad_() for v, p in zip(values, placements, strict=True)]
    for actual, one in zip(run(functions[name], sharded), expected, strict=True):
        torch.testing.assert_close(actual, one, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}{shape}{placements}: {m}")


def examples(number):
    meshes = [init_device_mesh("cpu", sizes) for sizes in MESHES]

    @settings(max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.data())
    def each(data):
        check(data, meshes)

    each()


@ranks(4)
def test_equal_one_device():
    examples(80)


@ranks(1)
def test_stock_torch_on_one_rank():
    """The examples themselves are fine: where nothing is cut, stock torch passes them."""
    mesh = init_device_mesh("cpu", (1,))

    @settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.data())
    def each(data):
        check(data, [mesh])

    with disabled("operators"):
        each()


@ranks(4)
def test_stock_torch_fails_an_example():
    mesh = init_device_mesh("cpu", (4,))
    values = [torch.linspace(-1, 1, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)]
    expected = run(BINARY["mse_loss"], [value.clone().requires_grad_() for value in values])
    with disabled("operators"):
        stock = run(BINARY["mse_loss"], [distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in values])
    assert not torch.allclose(stock[1], expected[1])
    ours = run(BINARY["mse_loss"], [distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in values])
    torch.testing.assert_close(ours, expected)
