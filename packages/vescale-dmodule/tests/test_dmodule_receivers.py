"""An attached receiver gets the local gradients of a parameter, partial or full, and nothing is reduced here."""

import gc
import weakref

import torch
from torch import nn
from torch.distributed.tensor import Partial

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, debug, init_device_mesh
from vescale.dtensor.extension import attach_gradient_receiver, detach_gradient_receiver, gets_several_gradients
from vescale_testing import ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": S0}, r"down\.weight": {"tp": S1}},
    "forward": {"input": [{"tp": S1}], r"up\.input": [{"tp": R}], r"down\.output": [{"tp": S1}], "output": [{"tp": R}]},
}
PARTIAL = {"norm.weight", "norm.bias"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Keeper:
    """Keeps the gradients of one parameter."""

    def __init__(self, parameter):
        self.parameter, self.received, self.several = parameter, [], []
        attach_gradient_receiver(parameter, self)

    def receive(self, local, placements):
        self.received.append((local.clone(), tuple(placements)))
        self.several.append(gets_several_gradients(self.parameter))


def build(mesh, mode):
    torch.manual_seed(0)
    model = parallelize_module(Net().double(), mesh, PLAN, mode=mode)
    return model, {name: Keeper(parameter) for name, parameter in model.named_parameters()}


def batch():
    return torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss_of(model):
    return model(batch()).square().sum()


def expected_gradients():
    torch.manual_seed(0)
    model = Net().double()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check(parameter, gradient, expected):
    local, placements = gradient
    full = type(parameter).from_local(local, parameter.device_mesh, placements, run_check=False).full_tensor()
    torch.testing.assert_close(full, expected, rtol=1e-11, atol=1e-13)


@ranks(2)
def test_local_gradients_are_received():
    mesh, expected = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), expected_gradients()
    for mode in ("eager", "static"):
        model, keepers = build(mesh, mode)
        for _ in range(2):
            loss = loss_of(model)
            with debug.comm_log() as log:
                loss.backward()
            assert len(log.only(operator="all_reduce")) == 0  # the input of `up` is reduce-scattered
            for name, keeper in keepers.items():
                (gradient,) = keeper.received
                assert (gradient[1] == (P,)) == (name in PARTIAL), (mode, name)
                check(model.get_parameter(name), gradient, expected[name])
                assert model.get_parameter(name).grad is None
                keeper.received.clear()


@ranks(2)
def test_a_hook_of_a_user_sees_a_reduced_gradient():
    mesh, expected = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), expected_gradients()
    for comes in ("before", "after the forward"):
        model, keepers = build(mesh, "static")
        seen, name = [], "norm.weight"
        loss_of(model).backward()
        for keeper in keepers.values():
            keeper.received.clear()
        loss = None if comes == "before" else loss_of(model)
        handle = model.get_parameter(name).register_hook(lambda gradient, seen=seen: seen.append(gradient))
        (loss_of(model) if loss is None else loss).backward()
        assert [gradient.placements for gradient in seen] == [(R,)]
        torch.testing.assert_close(seen[0].full_tensor(), expected[name])
        assert [keepers[each].received[-1][1] for each in (name, "norm.bias")] == [(R,), (P,)]
        check(model.get_parameter(name), keepers[name].received.pop(), expected[name])
        handle.remove()
        loss_of(model).backward()
        assert [keepers[each].received[-1][1] for each in (name, "norm.bias")] == [(P,), (P,)]


@ranks(2)
def test_a_receiver_can_ask_for_several_gradients():
    """The caller's own code uses a parameter, too: gradients arrive in two ways."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, keepers = build(mesh, "static")
    keeper, weight = keepers["norm.weight"], model.norm.weight
    for outside_first in (False, True):
        if outside_first:  # autograd runs first what came last
            loss = loss_of(model)
            loss = loss + weight.sum().full_tensor()
        else:
            loss = weight.sum().full_tensor()
            loss = loss + loss_of(model)
        loss.backward()
        assert [placements for _, placements in keeper.received] == [(R,), (P,)][:: 1 if outside_first else -1]
        assert keeper.several == [True, True]
        assert keepers["norm.bias"].several == [False]
        for each in keepers.values():
            each.received.clear()
            each.several.clear()


@ranks(2)
def test_a_receiver_that_is_attached_or_detached_later():
    mesh, expected = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), expected_gradients()
    torch.manual_seed(0)
    model = parallelize_module(Net().double(), mesh, PLAN, mode="static")
    loss_of(model).backward()
    model.zero_grad()
    keepers = {name: Keeper(parameter) for name, parameter in model.named_parameters()}  # after the first call
    loss_of(model).backward()
    for name, keeper in keepers.items():
        check(model.get_parameter(name), keeper.received.pop(), expected[name])
    for parameter in model.parameters():
        detach_gradient_receiver(parameter)
    for attaches_again in (False, True):
        if attaches_again:
            set_mode(model, "static")
        loss_of(model).backward()
        for name, parameter in model.named_parameters():
            assert not keepers[name].received
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-11, atol=1e-13)
            parameter.grad = None


@ranks(2)
def test_nothing_is_kept_alive():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, keepers = build(mesh, "static")
    loss_of(model).backward()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, keepers
    gc.collect()  # local parameters, whose hooks hold the nodes that hold the parameters
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 6
