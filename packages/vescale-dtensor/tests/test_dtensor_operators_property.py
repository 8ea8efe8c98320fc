"""Any operator of a list, on tensors of any shape, in any placements on any mesh, gives what one device gives.

Every rank draws the same examples, as they follow from the test's source alone.
"""

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from vescale.dtensor import DeviceMesh, DTensor, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
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


def draw_examples(meshes, draw_placements, number):
    """Return for each function this many of (name, function, shape, mesh, placements of each operand)."""
    examples = []

    @settings(max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.data())
    def each(data):
        for name, function in {**UNARY, **BINARY}.items():
            shape = torch.Size(data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
            mesh = meshes[data.draw(st.integers(0, len(meshes) - 1))]
            num_operands = 1 if name in UNARY else 2
            placements = [draw_placements(data.draw, shape, mesh.shape) for _ in range(num_operands)]
            examples.append((name, function, shape, mesh, placements))

    each()
    return examples


def check(name, function, shape, mesh, placements):
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for _ in placements]
    expected = run(function, [value.clone().requires_grad_() for value in values])
    pairs = zip(values, placements, strict=True)
    sharded = [distribute_tensor(v, mesh, p, src_data_rank=None).requires_grad_() for v, p in pairs]
    for actual, one in zip(run(function, sharded), expected, strict=True):
        where = f"{name} {tuple(shape)} {mesh} {placements}"
        torch.testing.assert_close(actual, one, rtol=1e-10, atol=1e-10, msg=lambda m, where=where: f"{where}: {m}")


@pytest.mark.parametrize("number", [4, pytest.param(20, marks=pytest.mark.thorough)])
@ranks(8, timeout=180)
def test_equal_one_device(number, meshes_of_1_to_8_ranks, draw_placements):
    meshes = [mesh for mesh in meshes_of_1_to_8_ranks() if mesh.ndim < 3]  # torch searches long on more axes
    examples = draw_examples(meshes, draw_placements, number)
    assert {mesh.size() for _, _, _, mesh, _ in examples} == {1, 2, 3, 4, 5, 6, 7, 8}
    for name, function, shape, mesh, placements in examples:
        if mesh.get_coordinate() is not None:
            check(name, function, shape, mesh, placements)


def fails(name, function, mesh, dim):
    """Return whether stock torch gives another result for two shards of an uneven matrix, or none."""
    placements = [[Shard(dim)]] * (1 if name in UNARY else 2)
    try:
        with disabled("operators"):
            check(name, function, torch.Size((3, 5)), mesh, placements)
    except (AssertionError, RuntimeError):
        return True
    return False


@ranks(2)
def test_stock_torch_fails():
    """On one rank it passes all, so the examples are fine."""
    one, two = DeviceMesh("cpu", [dist.get_rank()]), init_device_mesh("cpu", (2,))
    functions = {**UNARY, **BINARY}
    assert not any(fails(name, function, one, dim) for name, function in functions.items() for dim in (0, 1))
    failed = {name for name, function in functions.items() for dim in (0, 1) if fails(name, function, two, dim)}
    assert failed == {"flatten", "transpose and reshape", "mse_loss", "huber_loss"}
