"""Operators on ragged tensors give what they give on one device, bit for bit where nothing is added up."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from vescale.dtensor import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedPlacement,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks

LAYOUTS = [
    (RaggedShard((0,), (1, 3)), Replicate()),
    (RaggedShard((0, 1), (2, 2)), Shard(1)),
    (Shard(0), RaggedShard((0, 1), (4, 0))),
    (RaggedShard((0,), (0, 2)), InterleavedShard(1, 2)),
]

POINTWISE = {
    "number": lambda x, y: x * 2 + 1 - y / 3,
    "functions": lambda x, y: torch.where(x > 0, torch.exp(y).sqrt(), torch.sigmoid(x)),
    "three operands": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "maximum": lambda x, y: torch.max(x, y).clamp(min=0.1),
    "dtypes": lambda x, y: (x.to(torch.bfloat16) + y.bfloat16()).to(x.dtype),
    "copies": lambda x, y: torch.empty_like(x).copy_(y.clone()).detach(),
    "fills": lambda x, y: torch.zeros_like(x) + torch.ones_like(y) * torch.full_like(x, 3),
    "in place": lambda x, y: x.clone().mul_(2).add_(y, alpha=-1).addcdiv_(y, y.abs() + 1).clamp_(max=1),
    "scalar tensor": lambda x, y: x * torch.tensor(0.25) + y,
    "same shape": lambda x, y: x.view(8, 4).view_as(y),
}


def pair():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(2)]


@ranks(4)
def test_pointwise_operators():
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = pair()
    for placements in LAYOUTS:
        dx, dy = (distribute_tensor(t, mesh, placements) for t in (x, y))
        for name, function in POINTWISE.items():
            for _ in range(2):  # the second time from torch's cache
                result = function(dx, dy)
                assert result.placements == placements, (name, placements)
                assert torch.equal(result.full_tensor(), function(x, y)), (name, placements)


@ranks(4)
def test_replicated_operands_are_cut_to_fit():
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = pair()
    for placements in LAYOUTS:
        dx = distribute_tensor(x, mesh, placements)
        for other in (y, y[0], y[:, :1], torch.tensor(3.0)):
            whole = DTensor.from_local(other, mesh, [Replicate()] * 2)
            assert torch.equal((dx * whole).full_tensor(), x * other)
            assert torch.equal(dx.clone().sub_(whole).full_tensor(), x - other)


@ranks(4)
def test_foreach_operators():
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = pair()
    tensors = [distribute_tensor(x, mesh, placements) for placements in LAYOUTS]
    others = [distribute_tensor(y, mesh, placements) for placements in LAYOUTS]
    for result in torch._foreach_addcmul(tensors, others, others, value=2):
        assert torch.equal(result.full_tensor(), torch.addcmul(x, y, y, value=2))
    torch._foreach_lerp_(tensors, others, 0.5)
    torch._foreach_mul_(tensors, 3.0)
    for tensor in tensors:
        assert torch.equal(tensor.full_tensor(), torch.lerp(x, y, 0.5) * 3.0)
    for norm in torch._foreach_norm([*tensors, distribute_tensor(x, mesh, [Shard(0), Shard(1)])][:4]):
        torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(torch.lerp(x, y, 0.5) * 3.0))


@ranks(4)
def test_reductions():
    mesh = init_device_mesh("cpu", (2, 2))
    x, _ = pair()
    functions = [
        torch.sum,
        torch.mean,
        lambda t: t.sum(dim=(0, 1), dtype=torch.float64),
        lambda t: t.mean(dim=(0, -1)),
        torch.amax,
        torch.min,
        torch.linalg.vector_norm,
        lambda t: torch.linalg.vector_norm(t, float("inf")),
        lambda t: torch.linalg.vector_norm(t, 1),
        lambda t: torch.linalg.vector_norm(t, 3),
    ]
    for placements in LAYOUTS:
        for function in functions:
            result = function(distribute_tensor(x, mesh, placements))
            assert result.shape == ()
            torch.testing.assert_close(result.full_tensor(), function(x), rtol=1e-12, atol=1e-12)
    integers = torch.arange(32).reshape(8, 4)
    assert distribute_tensor(integers, mesh, LAYOUTS[3]).max().full_tensor() == 31


@ranks(4)
def test_the_mean_counts_elements_not_ranks():
    mesh = init_device_mesh("cpu", (4,))
    x = torch.arange(8.0)
    tensor = distribute_tensor(x, mesh, [RaggedShard((0,), (1, 0, 5, 2))])
    assert tensor.mean().full_tensor() == x.mean()
    means = tensor.to_local().nan_to_num().mean() if tensor.to_local().numel() else torch.zeros(())
    assert DTensor.from_local(means, mesh, [Partial("avg")]).full_tensor() != x.mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True, amsgrad=True),
        lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    ],
    ids=["sgd", "sgd foreach", "adamw", "adamw foreach", "adamw fused", "sgd fused"],
)
def test_optimizers_step_bit_for_bit(make):
    @ranks(4)
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        plain = [torch.nn.Parameter(t) for t in (*pair(), *pair())]
        sharded = [
            torch.nn.Parameter(distribute_tensor(p.detach(), mesh, layout))
            for p, layout in zip(plain, LAYOUTS, strict=True)
        ]
        optimizers = make(plain), make(sharded)
        for step in range(3):
            for p, d in zip(plain, sharded, strict=True):
                p.grad = torch.sin(p.detach() + step)
                d.grad = distribute_tensor(p.grad, mesh, d.placements)
            for optimizer in optimizers:
                optimizer.step()
        for p, d in zip(plain, sharded, strict=True):
            assert torch.equal(d.detach().full_tensor(), p.detach())
        state = copy.deepcopy(optimizers[1].state_dict())
        optimizers[1].load_state_dict(state)

    check()


@ranks(4)
def test_gradients_of_pointwise_operators_and_clipping():
    mesh = init_device_mesh("cpu", (2, 2))
    x, y = pair()
    x.requires_grad_()
    ((x.exp() * y).sin()).sum().backward()
    expected = x.grad.clone()
    total = torch.nn.utils.clip_grad_norm_([x], 0.5)
    for placements in LAYOUTS:
        d = distribute_tensor(x.detach(), mesh, placements).requires_grad_()
        (d.exp() * distribute_tensor(y, mesh, placements)).sin().sum().backward()
        assert d.grad.placements == placements
        torch.testing.assert_close(d.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        norm = torch.nn.utils.clip_grad_norm_([d], 0.5)
        torch.testing.assert_close(norm.full_tensor(), total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(d.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-10)


@ranks(4)
def test_unreduced_operands():
    mesh = init_device_mesh("cpu", (2, 2))
    placements = (RaggedShard((0,), (1, 3)), Partial())
    x, _ = pair()
    whole = x.to(torch.float64)
    local = distribute_tensor(whole, mesh, [placements[0], Replicate()]).to_local()
    d = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
    assert torch.equal((d + d).mul(0.5).redistribute(placements=[Replicate()] * 2).to_local(), 2 * whole)
    torch.testing.assert_close(d.sum().full_tensor(), 2 * whole.sum())
    for wrong in (torch.exp, lambda t: t + 1, lambda t: t * t, torch.linalg.vector_norm, torch.ones_like):
        with pytest.raises(UnsupportedPlacement, match="Partial"):
            wrong(d)


@ranks(4)
def test_what_ragged_tensors_cannot_do_is_refused_everywhere_before_anything_is_sent():
    mesh = init_device_mesh("cpu", (2, 2))
    x, _ = pair()
    d = distribute_tensor(x, mesh, (RaggedShard((0,), (1, 3)), Replicate()))
    other = distribute_tensor(x, mesh, (RaggedShard((0,), (3, 1)), Replicate()))
    shard = distribute_tensor(x, mesh, (Shard(0), Replicate()))
    cases = [
        (lambda: d @ d.t(), "neither pointwise nor a reduction"),
        (lambda: d.view(-1), "neither pointwise nor a reduction"),
        (lambda: d[0], "neither pointwise nor a reduction"),
        (lambda: torch.softmax(d, 0), "neither pointwise nor a reduction"),
        (lambda: torch.cat([d, d]), "neither pointwise nor a reduction"),
        (lambda: d.sum(0), "reduces dims"),
        (lambda: d + other, "ranks lack elements"),
        (lambda: d + shard, "ranks lack elements"),
        (lambda: shard.add_(d), "it writes to has other placements"),
        (lambda: torch._foreach_add([d], [other]), "ranks lack elements"),
    ]
    for wrong, reason in cases:
        text = r"aten\..*RaggedShard\(dims=\(0,\), local_units=\(., .\)\).*DeviceMesh.*" + reason
        with pytest.raises(UnsupportedPlacement, match=text + r".*x\.redistribute\(placements=") as error:
            with torch.no_grad():
                wrong()
        assert isinstance(error.value, NotImplementedError)


@ranks(2)
def test_inference_mode():
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(8, 4)
    with torch.inference_mode():
        d = distribute_tensor(x, mesh, [RaggedShard((0,), (1, 3))])
        assert torch.equal((d.contiguous().to(torch.float64) + 1).square().full_tensor(), (x.double() + 1).square())
        torch.testing.assert_close(torch.linalg.norm(d).full_tensor(), torch.linalg.norm(x))
        with pytest.raises(UnsupportedPlacement, match="neither pointwise nor a reduction"):
            d.reshape(-1)
