"""An optimizer that exists gives a DistributedOptimizer its class, groups, hyperparameters and state."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import ranks


class Lion(torch.optim.Optimizer):
    """A user's optimizer with an argument that is an attribute, and not among the defaults."""

    def __init__(self, params, lr=0.01, beta=0.9, *, slow=False):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.slow = slow

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 1 - group["beta"])
                    param.sub_(momentum.sign(), alpha=group["lr"] / (2 if self.slow else 1))


class Forgetful(Lion):
    def __init__(self, params, secret):
        super().__init__(params, lr=secret)


#: Optimizers with hyperparameters that are not their defaults.
OPTIMIZERS = (
    lambda groups: torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.95), amsgrad=True),
    lambda groups: torch.optim.AdamW(groups, lr=0.02, fused=True),
    lambda groups: torch.optim.Adam(groups, lr=0.02, eps=1e-3),
    lambda groups: torch.optim.NAdam(groups, lr=0.02, momentum_decay=0.01),
    lambda groups: torch.optim.RAdam(groups, lr=0.02),
    lambda groups: torch.optim.Adamax(groups, lr=0.02),
    lambda groups: torch.optim.Adadelta(groups, rho=0.8),
    lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.3),
    lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    lambda groups: torch.optim.Rprop(groups, lr=0.01, step_sizes=(1e-5, 1.0)),
    lambda groups: torch.optim.ASGD(groups, lr=0.05, alpha=0.7),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    lambda groups: Lion(groups, slow=True),
    lambda groups: Muon(groups, lr=0.02, momentum=0.8, adamw_lr=0.01, adamw_betas=(0.7, 0.9)),
)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)).double()
    model[2].requires_grad_(False)
    return model


def groups_of(model):
    """Parameters, frozen ones, too, in another order than the model's, and a group with settings of its own."""
    *most, last = model.named_parameters()
    return [{"params": most[::-1]}, {"params": [last], "lr": 0.005}]


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2, timeout=180)
def test_training_goes_on_as_with_the_optimizer_itself():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for number, make in enumerate(OPTIMIZERS):
        zero = (number % 3) + 1 if number else 0
        for before in (0, 2):
            plain = build()
            alone = make(groups_of(plain))
            train(plain, alone, range(before))
            module = copy.deepcopy(plain)
            instance = make(groups_of(module))
            instance.load_state_dict(alone.state_dict())
            model = DDP(module, mesh["dp"], zero=zero, bucket_bytes=200)
            optimizer = DistributedOptimizer(instance, model=model, clip_grad_norm=1e6)
            train(plain, alone, range(before, 4))
            train(model, optimizer, range(before, 4))
            assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in alone.param_groups]
            with model.unsharded():
                for (fqn, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, msg=f"{type(alone)} {fqn}")


def test_state_is_taken_over():
    """The comparison above sees state that is left behind."""
    plain = build()
    alone = torch.optim.AdamW(groups_of(plain), lr=0.02)
    train(plain, alone, range(2))
    module = copy.deepcopy(plain)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=module, param_groups=groups_of(module), lr=0.02)
    train(plain, alone, range(2, 4))
    train(module, optimizer, range(2, 4))
    assert not torch.allclose(module[0].weight, plain[0].weight, rtol=1e-6)


def test_a_full_state_dict_belongs_to_the_order_of_the_groups():
    model, other = build().requires_grad_(), build().requires_grad_()
    first = DistributedOptimizer(torch.optim.Adam(reversed(list(model.parameters()))), model=model)
    train(model, first, range(2))
    second = DistributedOptimizer(torch.optim.Adam(reversed(list(other.parameters()))), model=other)
    second.load_full_state_dict(first.full_state_dict())
    for ours, theirs in zip(first.pieces, second.pieces, strict=True):
        assert torch.equal(first.state[ours.tensor]["exp_avg"], second.state[theirs.tensor]["exp_avg"])


def test_masters_have_the_state_of_narrow_parameters():
    model = build().bfloat16()
    instance = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    instance.step()
    wide = {p: instance.state[p]["exp_avg"].float() for p in instance.state}
    optimizer = DistributedOptimizer(instance, model=model, master_dtype=torch.float32)
    for piece in optimizer.pieces:
        assert torch.equal(optimizer.state[piece.tensor]["exp_avg"], wide[piece.param].view(piece.tensor.shape))


def test_refusals():
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]

    def refused(error, text, optimizer, **settings):
        with pytest.raises(error, match=text):
            DistributedOptimizer(optimizer, model=model, **settings)

    refused(ValueError, "param group 0 has parameters that are not the model's", torch.optim.SGD(build().parameters()))
    refused(ValueError, "trainable parameters are in no param group: .'0.weight'", torch.optim.SGD(trainable[1:]))
    refused(ValueError, "LBFGS is not element-wise", torch.optim.LBFGS(trainable))
    refused(TypeError, r"\['lr'\] cannot be given with an optimizer that exists", torch.optim.SGD(trainable), lr=0.1)
    refused(TypeError, r"\['param_groups'\] cannot", torch.optim.SGD(trainable), param_groups=groups_of(model))
    refused(ValueError, r"the arguments \['secret'\] of Forgetful cannot be known", Forgetful(trainable, 1))
    scheduled = torch.optim.SGD(trainable)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    refused(ValueError, "construct the scheduler for the DistributedOptimizer", scheduled)
    hooked = torch.optim.SGD(trainable)
    hooked.register_step_post_hook(lambda *_: None)
    refused(ValueError, r"this SGD has hooks .*step post-hooks.*; register them with the Dist", hooked)
    refused(TypeError, "was given to another one", DistributedOptimizer(torch.optim.SGD, model=model))
