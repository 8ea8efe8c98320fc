"""Every element-wise optimizer of torch, in all its variants, and a user's own: on ranks as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks, run_ranks


class Lion(torch.optim.Optimizer):
    """A user's optimizer, with a number per parameter that is no tensor."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                beta1, beta2 = group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(mean.lerp(param.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                mean.lerp_(param.grad, 1 - beta2)


OPTIM = torch.optim
CLASSES = {
    OPTIM.AdamW: [{}, {"amsgrad": True, "maximize": True}, {"fused": True}],
    OPTIM.Adam: [{"weight_decay": 0.1}, {"fused": True}],
    OPTIM.SGD: [{}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True, "fused": True}],
    OPTIM.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"fused": True}],
    OPTIM.RMSprop: [{"centered": True, "momentum": 0.5}],
    OPTIM.NAdam: [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    OPTIM.RAdam: [{"weight_decay": 0.1}],
    OPTIM.Adadelta: [{"rho": 0.8}],
    OPTIM.Adamax: [{"weight_decay": 0.1}],
    OPTIM.Rprop: [{}],
    OPTIM.ASGD: [{"t0": 1, "weight_decay": 0.1}],
    Lion: [{"weight_decay": 0.1}],
}
HAS_NO_FOREACH = (Lion,)


def cases():
    for optimizer_class, variants in CLASSES.items():
        for settings in variants:
            yield optimizer_class, {"lr": 0.01, **settings}
        if optimizer_class not in HAS_NO_FOREACH:
            yield optimizer_class, {"lr": 0.01, **variants[0], "foreach": True}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2)).double()


def train(model, optimizer, coord=0, size=1):
    for step in range(3):
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x.chunk(size)[coord]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def on_ranks(stages):
    coord, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    results = []
    for optimizer_class, settings in cases():
        for zero in stages:
            model = DDP(build(), mesh["dp"], zero=zero, bucket_bytes=200, find_unused_parameters=False)
            optimizer = DistributedOptimizer(optimizer_class, model=model, **settings)
            results.append(train(model, optimizer, coord, size))
    return results


@pytest.mark.parametrize("world_size, stages", [(2, (0, 1)), (3, (2,))])
def test_every_optimizer(world_size, stages):
    models = [build() for _ in cases()]
    expected = [
        train(model, optimizer_class(model.parameters(), **settings))
        for model, (optimizer_class, settings) in zip(models, cases(), strict=True)
    ]
    for results in run_ranks(on_ranks, world_size, stages):
        for index, actual in enumerate(results):
            for fqn, value in expected[index // len(stages)].items():
                torch.testing.assert_close(actual[fqn], value, rtol=1e-12, atol=1e-14)


def test_every_optimizer_of_torch_is_either_here_or_refused():
    of_torch = {
        value for value in vars(OPTIM).values() if isinstance(value, type) and issubclass(value, OPTIM.Optimizer)
    } - {OPTIM.Optimizer}
    refused = {OPTIM.Adafactor, OPTIM.LBFGS, OPTIM.SparseAdam}
    assert of_torch - refused - {OPTIM.Muon} == set(CLASSES) - {Lion}


@ranks(2)
def test_state_is_there_before_the_first_step_and_right():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for optimizer_class, settings in cases():
        if settings.get("dampening") or settings.get("foreach") or settings.get("fused"):
            continue
        trained = []
        for asks in (False, True):
            model = DDP(build(), mesh["dp"], zero=1, find_unused_parameters=False)
            optimizer = DistributedOptimizer(optimizer_class, model=model, **settings)
            if asks:
                optimizer.load_state_dict(optimizer.state_dict())
            trained.append(train(model, optimizer, dist.get_rank(), 2))
        for fqn, value in trained[0].items():
            assert torch.equal(trained[1][fqn], value)
