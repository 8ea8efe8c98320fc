"""A Python number beside a DTensor of 16 bits counts as on one device: it is not rounded to 16 bits first."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale.dtensor._torch import dispatch
from vescale_testing import ranks

NUMBER = 0.1  # 0.10009765625 in bfloat16
DTYPES = (torch.bfloat16, torch.float16)
FUNCTIONS = {
    "mul": lambda x: x * NUMBER,
    "mul_": lambda x: x.clone().mul_(NUMBER),
    "add": lambda x: x + NUMBER,
    "rsub": lambda x: NUMBER - x,
    "div": lambda x: x / NUMBER,
    "pow": lambda x: x.abs() ** NUMBER,
    "rpow": lambda x: NUMBER**x,
    "addcmul": lambda x: torch.addcmul(x, x, x, value=NUMBER),
    "lerp": lambda x: torch.lerp(x, 2 * x, NUMBER),
}


def values(dtype):
    return torch.linspace(-2, 2, 64).to(dtype)


def operators():
    """Return the pointwise operators of one tensor, or several, and numbers, in place and out of place."""
    found = []
    for op in dispatch.operators():
        arguments = [argument for argument in dispatch.schema(op).arguments if not argument.has_default_value()]
        kinds = [str(argument.type) for argument in arguments]
        is_known = {"Tensor", "number"} >= set(kinds) and "number" in kinds and kinds[0] == "Tensor"
        returns = [str(result.type) for result in dispatch.schema(op).returns]
        if op.namespace == "aten" and torch.Tag.pointwise in op.tags and is_known and returns == ["Tensor"]:
            found.append((op, kinds))
    return found


def call(op, kinds, x):
    return op(*(x.clone() if kind == "Tensor" else NUMBER for kind in kinds))


@ranks(2)
def test_operators_of_numbers():
    mesh, tried = init_device_mesh("cpu", (2,)), set()
    for (op, kinds), dtype in ((each, dtype) for each in operators() for dtype in DTYPES):
        x = values(dtype).abs()
        try:
            expected = call(op, kinds, x)
        except (RuntimeError, NotImplementedError):
            continue  # not of floating-point numbers
        for placement in (Shard(0), Replicate()):
            actual = call(op, kinds, distribute_tensor(x, mesh, [placement]))
            assert torch.equal(actual.full_tensor(), expected) or expected.isnan().any(), (op, dtype, placement)
        tried.add(str(op))
    assert {"aten.mul.Scalar", "aten.mul_.Scalar", "aten.add.Scalar", "aten.pow.Tensor_Scalar"} <= tried


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,))
        for dtype in DTYPES:
            found = []
            for x in (values(dtype), distribute_tensor(values(dtype), mesh, [Shard(0)])):
                leaf = x.detach().requires_grad_()
                result = FUNCTIONS[name](leaf)
                result.sum().backward()
                found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (result.detach(), leaf.grad)])
            for actual, expected in zip(*found, strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    on_every_rank()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_rounded_first_gives_other_values(dtype):
    x = values(dtype)
    assert not torch.equal(x * NUMBER, x * torch.tensor(NUMBER, dtype=dtype).item())
