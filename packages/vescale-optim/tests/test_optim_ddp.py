"""The wrapper: what it shows of the module, what it does at construction, and what it refuses there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.dtensor import deferred_init, is_deferred
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import halved, ranks, run_ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.title = "a model"

    def forward(self, x, *, double=False):
        return self.layer(x) * (2 if double else 1)

    def describe(self):
        return self.title


def mesh(*shape, names=("dp",)):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@ranks(1)
def test_the_module_shows_through():
    module = Model()
    model = DDP(module, mesh(1)["dp"])
    assert model.describe() == "a model"
    assert list(model.state_dict()) == list(module.state_dict()) == ["count", "mask", "layer.weight", "layer.bias"]
    assert [fqn for fqn, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert [fqn for fqn, _ in model.named_buffers()] == ["count", "mask"]
    assert model.layer is module.layer
    assert torch.equal(model(torch.ones(1, 3), double=True), module(torch.ones(1, 3)) * 2)
    model.load_state_dict({k: torch.ones_like(v) for k, v in module.state_dict().items()})
    assert module.layer.weight.sum() == 9
    model.eval()
    assert not module.training
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'missing'"):
        _ = model.missing


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@ranks(3)
def test_parameters_and_buffers_of_the_first_coord_are_taken_over(bucket_bytes, zero):
    torch.manual_seed(dist.get_rank())
    module = Model()
    module.frozen = nn.Parameter(torch.full((2,), float(dist.get_rank())), requires_grad=False)
    module.low = nn.Parameter(torch.full((), float(dist.get_rank()), dtype=torch.bfloat16))
    module.count += dist.get_rank()
    module.mask ^= dist.get_rank() == 2
    with torch.no_grad():
        module.layer.bias[0] = float("nan")
    model = DDP(module, mesh(3)["dp"], zero=zero, bucket_bytes=bucket_bytes)
    torch.manual_seed(0)
    expected = Model()
    assert torch.equal(model.layer.weight, expected.layer.weight)
    assert torch.equal(model.layer.bias[1:], expected.layer.bias[1:])
    assert model.layer.bias[0].isnan()
    assert (model.count, model.frozen.sum(), model.low) == (0, 0, 0)
    assert model.mask.tolist() == [True, False, True]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_loading_a_model_after_wrapping_reaches_the_flat_buffers(zero):
    def body():
        model = DDP(Model(), mesh(2)["dp"], zero=zero)
        model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=1.0)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model.layer.bias.detach().clone()

    for bias in run_ranks(body, 2):
        assert torch.equal(bias, torch.full((3,), -1.0))


@pytest.mark.parametrize("zero", [0, 2])
@ranks(2)
def test_a_deferred_model_is_materialized(zero):
    torch.manual_seed(0)
    module = deferred_init(Model)
    model = DDP(module, mesh(2)["dp"], zero=zero)
    assert not is_deferred(module)
    torch.manual_seed(0)
    assert torch.equal(model.layer.weight, Model().layer.weight)


@ranks(2)
def test_zero_2_holds_full_gradients_only_during_backward():
    model = DDP(Model(), mesh(2)["dp"], zero=2)
    buffers = [bucket.grads.untyped_storage() for bucket in model._reducer.buckets]
    assert [storage.nbytes() for storage in buffers] == [0]
    with model.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    assert [storage.nbytes() > 0 for storage in buffers] == [True]
    model(torch.ones(1, 3)).sum().backward()
    assert [storage.nbytes() for storage in buffers] == [0]


@ranks(2)
def test_buckets_leave_while_backward_runs():
    launched = {}
    for overlap in (True, False):
        module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        model = DDP(module, mesh(2)["dp"], bucket_bytes=80, overlap=overlap)

        def look(_grad, model=model, overlap=overlap):
            launched[overlap] = model._reducer._round.next_bucket

        module[0].weight.register_hook(look)
        model(torch.ones(1, 4)).sum().backward()
    assert launched[True] >= 3
    assert launched[False] == 0


@ranks(1)
def test_one_rank_communicates_nothing(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    monkeypatch.setattr(dist, "broadcast", None)
    for zero in (0, 1, 2):
        model = DDP(Model(), mesh(1)["dp"], zero=zero)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=1.0, clip_grad_norm=1.0)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert optimizer.grad_norm > 0


@pytest.mark.parametrize("zero", [7, -1, "2"])
def test_an_unknown_stage(zero):
    with pytest.raises(ValueError, match=f"zero must be 0, 1, 2 or 3, got {zero!r}"):
        DDP(Model(), None, zero=zero)


@ranks(4)
def test_the_axis_must_be_a_mesh_of_one_or_two_dims():
    with pytest.raises(ValueError, match=r"mesh_axis=...\) expects a 1-D DeviceMesh .*, got axes \('a', 'b', 'c'\)"):
        DDP(Model(), mesh(2, 2, 1, names=("a", "b", "c")))
    with pytest.raises(ValueError, match=r"expects a 1-D DeviceMesh .*, or a 2-D one .*, got None"):
        DDP(Model(), None)


@ranks(1)
def test_modules_that_cannot_be_reduced():
    axis = mesh(1)["dp"]
    with pytest.raises(
        ValueError, match="Model has no trainable parameter, so DDP has nothing to reduce; use it without"
    ):
        DDP(Model().requires_grad_(False), axis)
    with pytest.raises(
        ValueError, match=r"'layer.weight' has no storage \(device meta\); materialize the module before"
    ):
        DDP(Model().to("meta"), axis)
    module = Model()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'phase' has dtype torch.complex64; DDP reduces floating-point gradients"):
        DDP(module, axis)
    with pytest.raises(ValueError, match="expected an integer of 1 or more for bucket_bytes, got 0"):
        DDP(Model(), axis, bucket_bytes=0)


@ranks(3)
def test_models_that_differ_between_ranks():
    module = nn.Linear(3, 4 if dist.get_rank() == 2 else 3)
    with pytest.raises(
        ValueError, match=r"ranks 0, 1 have 'weight: \(3, 3\) .*', rank 2 has 'weight: \(4, 3\) .*axis 'dp'"
    ):
        DDP(module, mesh(3)["dp"])


@ranks(2)
def test_settings_that_differ_between_ranks():
    with pytest.raises(
        ValueError, match=r"rank 0 has 'zero=0 find_unused_parameters=True', rank 1 has 'zero=1 find_unused"
    ):
        DDP(Model(), mesh(2)["dp"], zero=dist.get_rank())


@ranks(1)
def test_a_module_is_wrapped_once():
    axis = mesh(1)["dp"]
    module = Model()
    model = DDP(module, axis)
    for again in (module, model):
        with pytest.raises(ValueError, match=r"'layer.weight' belongs to another DDP already; wrap a module once"):
            DDP(again, axis)


@ranks(1)
def test_memory_that_is_shared_without_a_tie():
    module = Model()
    module.alias = nn.Parameter(module.layer.weight.detach())
    DDP(module, mesh(1)["dp"])  # all-reduce leaves parameters where they are
    module = Model()
    module.alias = nn.Parameter(module.layer.weight.detach())
    with pytest.raises(
        ValueError, match=r"'layer.weight' and 'alias' are different tensors in the same memory; tie them"
    ):
        DDP(module, mesh(1)["dp"], zero=1)
