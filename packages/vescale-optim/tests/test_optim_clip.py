"""Clipping uses the norm of one device, over tensor parallelism, ZeRO shards and other pipeline stages at once."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.optim import DDP, clip_grad_norm_
from vescale_testing import ranks, run_ranks

NORM_TYPES = [0.5, 1.0, 2.0, 3, math.inf]
SHAPES = {"a": (5, 3), "b": (4,), "c": (), "d": (2, 3), "e": (7,)}


def gradient(name, scale=1.0):
    generator = torch.Generator().manual_seed(ord(name))
    return scale * torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def module_of(names):
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(SHAPES[name], dtype=torch.float64)))
    return module


def expected(names, max_norm, norm_type):
    """Return torch's norm and clipped gradients of all parameters together, on one device."""
    module = module_of(names)
    for name, param in module.named_parameters():
        param.grad = gradient(name)
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type=norm_type)
    return norm, {name: param.grad for name, param in module.named_parameters()}


def check(norm, grads, names, max_norm, norm_type):
    expected_norm, expected_grads = expected(names, max_norm, norm_type)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_plain_parameters(norm_type, max_norm):
    module = module_of(SHAPES)
    for name, param in module.named_parameters():
        param.grad = gradient(name)
    for given in (module, list(module.parameters()), iter(module.parameters())):
        for name, param in module.named_parameters():
            param.grad = gradient(name)
        norm = clip_grad_norm_(given, max_norm, norm_type=norm_type)
        check(norm, {n: p.grad for n, p in module.named_parameters()}, SHAPES, max_norm, norm_type)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_shards_replicas_and_other_stages(zero):
    """Stage 0 holds a (rows over tp) and b (replicated), stage 1 c, d (columns over tp) and e (uneven over tp)."""
    stages = ({"a": Shard(0), "b": Replicate()}, {"c": Replicate(), "d": Shard(1), "e": Shard(0)})

    def body():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        placements = stages[mesh.get_local_rank("pp")]
        module = module_of(placements)
        for name, param in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [placements[name]])))
        model = DDP(module, mesh["dp"], zero=zero, bucket_bytes=50)
        return [clipped(model, mesh, placements, norm_type) for norm_type in NORM_TYPES]

    for by_type in zip(NORM_TYPES, *run_ranks(body, 8), strict=True):
        norm_type, *every = by_type
        for norm, whole, _ in every:
            check(norm, whole, SHAPES, 0.5, norm_type)
        _, grads = expected(SHAPES, 0.5, norm_type)
        for name in ("a", "d", "e") if zero else ():  # over tp: the parts of the four ranks of a stage are the whole
            parts = torch.cat([shards[name] for _, _, shards in every if name in shards])
            torch.testing.assert_close(parts.sort().values, grads[name].flatten().sort().values, rtol=1e-12, atol=0)


def clipped(model, mesh, placements, norm_type):
    """Return the norm, whole gradients (ZeRO 0) and this rank's parts of them (ZeRO 1, 2) after clipping."""
    model.zero_grad()
    scale = [0.5, 1.5][mesh.get_local_rank("dp")]  # the mean over dp is 1
    losses = []
    for name, param in model.named_parameters():
        grad = distribute_tensor(gradient(name, scale), mesh["tp"], [placements[name]])
        losses.append((param.to_local() * grad.to_local()).sum())
    sum(losses).backward()
    norm = clip_grad_norm_(model, 0.5, norm_type=norm_type, norm_axes=(mesh["pp"],))
    if model.zero:
        return norm, {}, {slot.fqn: slot.grad_part.clone() for slot in model.slots().values()}
    return norm, {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}, {}


@ranks(2)
def test_without_the_axis_of_the_stages_the_norm_is_too_small():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    names = ["ab", "cde"][dist.get_rank()]
    module = module_of(names)
    for name, param in module.named_parameters():
        param.grad = gradient(name)
    whole = expected(SHAPES, 1e9, 2.0)[0]
    assert not torch.isclose(clip_grad_norm_(module, 1e9), whole)
    torch.testing.assert_close(clip_grad_norm_(module, 1e9, norm_axes=[mesh]), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(clip_grad_norm_(module, 1e9, norm_axes=mesh), whole, rtol=1e-12, atol=0)


@ranks(2)
def test_a_stage_without_parameters_or_gradients_takes_part():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    module = module_of("a" if dist.get_rank() == 0 else "")
    if dist.get_rank() == 0:
        module.a.grad = gradient("a")
    norm = clip_grad_norm_(module, 1e9, norm_axes=(mesh,))
    torch.testing.assert_close(norm.double(), gradient("a").norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_gradients_are_summed_in_float32(dtype):
    param = nn.Parameter(torch.zeros(1000, dtype=dtype))
    param.grad = torch.full((1000,), 0.1, dtype=dtype)
    expected = param.grad.double().norm().float()
    norm = clip_grad_norm_([param], 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    # every clipped element is rounded once, and the clip coefficient once more
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(param.grad.float().norm().item(), 1.0, rtol=rounding + 1e-5, atol=0)


def test_an_infinite_maximum_only_measures():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([param], math.inf) == 5
    assert param.grad.tolist() == [3, 4]


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0) == 0
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0) == 0


def test_an_empty_gradient_has_no_infinity_norm_of_its_own():
    param = nn.Parameter(torch.zeros(0, 3))
    param.grad = torch.zeros(0, 3)
    assert clip_grad_norm_([param], 1.0, norm_type=math.inf) == 0


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
def test_norm_types_that_are_not_positive(norm_type):
    with pytest.raises(ValueError, match=rf"norm_type: expected a positive number, got {float(norm_type)}; pass"):
        clip_grad_norm_([], 1.0, norm_type=norm_type)


def test_a_norm_that_is_not_finite():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(RuntimeError, match=r"gradient norm of order 2.0 is inf; to go on nevertheless pass"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([param], 1.0) == math.inf


@ranks(4)
def test_axes_that_count_already():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"], [Replicate()]))
    with pytest.raises(ValueError, match=r"norm_axes has the axis 'tp', .* counts already; give only axes whose ranks"):
        clip_grad_norm_(module, 1.0, norm_axes=(mesh["tp"],))
    with pytest.raises(ValueError, match="norm_axes has the axis 'dp'"):
        clip_grad_norm_(DDP(module, mesh["dp"]), 1.0, norm_axes=(mesh["dp"],))
    with pytest.raises(
        ValueError, match=r"norm_axes expects a 1-D DeviceMesh such as mesh\[\"dp\"\], got axes \('dp', 'tp'\)"
    ):
        clip_grad_norm_(module, 1.0, norm_axes=(mesh,))
