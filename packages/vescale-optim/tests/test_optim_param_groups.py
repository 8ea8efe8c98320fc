"""Parameter groups, schedulers and changed hyperparameters work as with a torch optimizer."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def wrapped(zero):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return build() if zero is None else DDP(build(), mesh["dp"], zero=zero, bucket_bytes=100)


def groups_of(model):
    """Decay matrices only, and stop the last bias."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for fqn, p in named.items() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": (p for fqn, p in named.items() if p.ndim < 2 and fqn != "2.bias"), "weight_decay": 0.0},
        {"params": named["2.bias"], "lr": 0.0},
    ]


def train(model, optimizer, scheduler):
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def with_scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1, 0.0], total_steps=10)


@pytest.mark.parametrize("zero", [None, 0, 1, 2])
@ranks(2)
def test_groups_and_a_scheduler(zero):
    reference = build()
    plain = torch.optim.AdamW(groups_of(reference), lr=0.1)
    expected = train(reference, plain, with_scheduler(plain))
    model = wrapped(zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, param_groups=groups_of(model), lr=0.1)
    actual = train(model, optimizer, with_scheduler(optimizer))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert torch.equal(actual["2.bias"], build()[2].bias)
    for fqn, value in expected.items():
        torch.testing.assert_close(actual[fqn], value, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_a_scheduler_resumes_from_saved_groups():
    model = wrapped(1)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, param_groups=groups_of(model), lr=0.1)
    scheduler = with_scheduler(optimizer)
    train(model, optimizer, scheduler)
    other = DistributedOptimizer(torch.optim.AdamW, model=model, param_groups=groups_of(model), lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    resumed = torch.optim.lr_scheduler.OneCycleLR(other, max_lr=[0.2, 0.1, 0.0], total_steps=10, last_epoch=2)
    assert resumed.get_last_lr() == pytest.approx(scheduler.get_last_lr())


@pytest.mark.parametrize("zero", [0, 2])
@ranks(2)
def test_a_tensor_learning_rate_survives_its_state_dict(zero):
    lr = torch.tensor(0.25)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=wrapped(zero), lr=lr)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == 0.25
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.5


@ranks(2)
def test_named_parameters_may_be_given():
    model = wrapped(1)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, param_groups=[{"params": model.named_parameters()}])
    assert len(optimizer.param_groups[0]["params"]) == 6


@pytest.mark.parametrize("zero", [None, 1])
@ranks(2)
def test_a_closure_and_hooks(zero):
    model = wrapped(zero)
    calls = []
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, dtype=torch.float64)).square().mean()
        loss.backward()
        calls.append("closure")
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    assert calls == ["closure", "after"] * 2


def test_groups_that_do_not_hold_each_parameter_once():
    model = build()
    first, *rest = model.parameters()

    def make(groups):
        return DistributedOptimizer(torch.optim.SGD, model=model, param_groups=groups, lr=0.1)

    with pytest.raises(ValueError, match=r"in no param group: \['0.weight'\]; list them, or freeze them"):
        make([{"params": rest}])
    with pytest.raises(ValueError, match=r"in param groups more than once: \['0.weight'\]"):
        make([{"params": [first]}, {"params": [first, *rest]}])
    with pytest.raises(ValueError, match=r"in param groups more than once: \['0.weight'\]"):
        make([{"params": [first, first, *rest]}])
    with pytest.raises(
        ValueError, match=r"param group 1 has parameters that are not the model's, of shapes \[\(7,\)\]"
    ):
        make([{"params": [first, *rest]}, {"params": [nn.Parameter(torch.zeros(7))]}])


def test_frozen_parameters_may_be_listed():
    model = build()
    model[0].requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, param_groups=[{"params": list(model.parameters())}])
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_no_groups_later():
    optimizer = DistributedOptimizer(torch.optim.SGD, model=build())
    with pytest.raises(
        NotImplementedError, match=r"add_param_group would change the layout .* with param_groups=\[...\]"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "SparseAdam"])
def test_optimizers_that_are_not_elementwise(name):
    class Derived(getattr(torch.optim, name)):
        pass

    for optimizer_class in (getattr(torch.optim, name), Derived):
        with pytest.raises(
            ValueError, match=rf"{name} is not element-wise: .*torch.optim.{name} itself with DDP\(zero=0\)"
        ):
            DistributedOptimizer(optimizer_class, model=build())


def test_something_that_is_no_optimizer_class():
    for wrong in ("AdamW", nn.Linear, torch.optim.lr_scheduler.StepLR):
        with pytest.raises(TypeError, match=r"must be a class such as torch.optim.AdamW, or an optimizer, got "):
            DistributedOptimizer(wrong, model=build())


def test_a_model_without_trainable_parameters():
    with pytest.raises(ValueError, match="Sequential has no trainable parameter; freeze fewer"):
        DistributedOptimizer(torch.optim.SGD, model=build().requires_grad_(False))


@ranks(1)
def test_a_ddp_hidden_in_a_module():
    outer = nn.Sequential(DDP(build(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))))
    with pytest.raises(ValueError, match="the module holds a DDP at '0'; pass the DDP itself as model="):
        DistributedOptimizer(torch.optim.SGD, model=outer)


@ranks(1)
def test_parameters_replaced_after_wrapping():
    model = DDP(build(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), zero=1)
    model.module[0].weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"'0.weight' is not the parameter that DDP wrapped: it was replaced"):
        DistributedOptimizer(torch.optim.SGD, model=model)
