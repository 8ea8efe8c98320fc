"""`grad_dtype` and `reduce_dtype`: every rounding, and no other, is one that a single process can repeat."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

MICROS = 3
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

#: dtype of the parameters, `grad_dtype`, `reduce_dtype`
DTYPES = [
    (F32, None, None),
    (F32, None, BF16),
    (F32, BF16, None),
    (F32, F64, F16),
    (BF16, None, None),
    (BF16, None, F32),
    (BF16, F32, None),
    (BF16, F32, BF16),
    (BF16, F16, BF16),
]


def build(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).to(dtype)


def loss_of(model, index, coord, dtype):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * index + coord)).to(dtype)
    return model(x).square().mean()


def expected_gradients(size, dtype, grad_dtype, reduce_dtype, *, no_sync):
    """Return the gradients of a step, with the roundings that the docstring of `DDP` lists."""
    keep = grad_dtype or dtype
    wire = reduce_dtype or keep
    model = build(dtype)
    local = [
        [torch.autograd.grad(loss_of(model, index, coord, dtype), list(model.parameters())) for index in range(MICROS)]
        for coord in range(size)
    ]

    def mean(addends):
        if size == 1:
            return addends[0]
        total = addends[0].to(wire)
        for other in addends[1:]:
            total = total + other.to(wire)
        return (total.to(torch.promote_types(wire, keep)) / size).to(keep)

    def added(tensors):
        total = tensors[0].to(keep)
        for tensor in tensors[1:]:
            total = total + tensor.to(keep)
        return total

    gradients = {}
    for position, (fqn, _) in enumerate(model.named_parameters()):
        each = [[grads[position].to(keep) for grads in of_rank] for of_rank in local]
        if no_sync:
            gradients[fqn] = mean([added(of_rank) for of_rank in each])
        else:
            gradients[fqn] = added([mean([of_rank[index] for of_rank in each]) for index in range(MICROS)])
    return gradients


def actual_gradients(model, dtype, *, no_sync):
    for index in range(MICROS):
        model._reducer.synchronizes = not no_sync or index == MICROS - 1
        loss_of(model, index, dist.get_rank(), dtype).backward()
    return {
        fqn: (slot.param.grad.view(-1) if not model.zero else slot.grad_part, slot.part if model.zero else (0, None))
        for fqn, slot in model.slots().items()
    }


def check(reduction):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    for dtype, grad_dtype, reduce_dtype in DTYPES:
        for zero in (0, 1, 2, 3):
            for no_sync in (True, False):
                dtypes = {"grad_dtype": grad_dtype, "reduce_dtype": reduce_dtype}
                model = DDP(build(dtype), mesh["dp"], zero=zero, bucket_bytes=100, reduction=reduction, **dtypes)
                actual = actual_gradients(model, dtype, no_sync=no_sync)
                expected = expected_gradients(size, dtype, grad_dtype, reduce_dtype, no_sync=no_sync)
                for fqn, (grad, (start, stop)) in actual.items():
                    where = f"{fqn}, {dtype}, {dtypes}, zero={zero}, no_sync={no_sync}"
                    assert grad.dtype == (grad_dtype or dtype), where
                    assert torch.equal(grad, expected[fqn].view(-1)[start:stop]), where
                    assert model.get_parameter(f"module.{fqn}").grad.dtype == (grad_dtype or dtype)


@ranks(1)
def test_one_rank():
    check("backend")


@ranks(2)
def test_two_ranks_by_the_backend():
    check("backend")


@ranks(3)
def test_three_ranks_in_order():
    check("ordered")


def test_each_rounding_is_seen():
    """The references differ where dtypes do, so that a forgotten rounding cannot pass."""
    for dtype, grad_dtype, reduce_dtype in DTYPES:
        if (grad_dtype, reduce_dtype) == (None, None):
            continue
        for no_sync in (True, False):
            found = expected_gradients(3, dtype, grad_dtype, reduce_dtype, no_sync=no_sync)
            plain = expected_gradients(3, dtype, None, None, no_sync=no_sync)
            assert any(not torch.equal(found[fqn].double(), plain[fqn].double()) for fqn in found)


@ranks(2)
def test_a_tensor_parallel_parameter():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for zero in (0, 1, 2):
        module = nn.Linear(4, 4, bias=False).bfloat16()
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(0)]))
        model = DDP(module, mesh["dp"], zero=zero, grad_dtype=F32)
        for _ in range(2):
            (module.weight * 3).sum().backward()
        assert module.weight.grad.dtype == F32
        part = next(iter(model.slots().values())).grad_part if zero else module.weight.grad.to_local()
        assert torch.equal(part.view(-1), torch.full((8,), 6.0))


@ranks(2)
def test_an_optimizer_steps_on_wide_gradients_of_narrow_parameters():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    results = []
    for zero in (0, 1, 2):
        model = DDP(build(BF16), mesh["dp"], zero=zero, grad_dtype=F32, reduction="ordered")
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=0.1)
        for step in range(3):
            loss_of(model, step, dist.get_rank(), BF16).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({fqn: p.detach().clone() for fqn, p in model.named_parameters()})
    for fqn, start in build(BF16).named_parameters():
        assert results[0][fqn].dtype == BF16
        assert not torch.equal(results[0][fqn], start)
        for other in results[1:]:
            torch.testing.assert_close(other[fqn], results[0][fqn], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", ["grad_dtype", "reduce_dtype"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, "float32"])
def test_other_dtypes(name, dtype):
    kind = "parameter" if name == "grad_dtype" else "kept gradient"
    expected = rf"{name} must be a floating-point dtype such as torch.float32, or None for that of the {kind}, got "
    with pytest.raises(ValueError, match=expected + repr(dtype)):
        DDP(nn.Linear(1, 1), None, **{name: dtype})


def test_an_unknown_reduction():
    with pytest.raises(ValueError, match='reduction must be "backend" or "ordered", got \'tree\''):
        DDP(nn.Linear(1, 1), None, reduction="tree")


@ranks(1)
def test_gradients_of_another_dtype_that_are_there_already():
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    expected = "'weight' has a gradient of dtype torch.float32 already, and DDP is to keep gradients in torch.float64; "
    with pytest.raises(ValueError, match=expected + r"call zero_grad\(\) before wrapping"):
        DDP(module, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), grad_dtype=F64)


@ranks(2)
def test_settings_that_differ_between_ranks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    reduction = ("backend", "ordered")[dist.get_rank()]
    with pytest.raises(ValueError, match=r"rank 0 has .*reduction='backend'.*rank 1 has .*reduction='ordered'"):
        DDP(nn.Linear(2, 2), mesh, reduction=reduction)
