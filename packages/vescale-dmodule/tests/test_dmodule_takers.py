"""Who says so on a parameter gets its local gradients as they are, once each, and nothing is reduced here."""

import gc
import weakref

import torch
from torch import nn
from torch.distributed.tensor import Partial

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, debug, init_device_mesh
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
    """Takes the gradients of one parameter, and keeps them."""

    def __init__(self, parameter):
        self.arrived, self.taken, self.more = [], [], None
        handle = parameter.register_post_accumulate_grad_hook(self.arrive)
        self.own = frozenset([handle.id])
        self.known = set(self.own)
        parameter._vescale_takes_gradients = self

    def arrive(self, parameter):
        self.arrived.append((parameter.grad.to_local().clone(), parameter.grad.placements, self.more and self.more()))
        parameter.grad = None

    def take(self, local, placements, *, more=False):
        self.taken.append((local.clone(), placements, more))


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
    local, placements, more = gradient
    assert not more
    whole = type(parameter).from_local(local, parameter.device_mesh, placements, run_check=False).full_tensor()
    torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-13)


@ranks(2)
def test_local_gradients_are_handed_over():
    mesh, expected = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), expected_gradients()
    for mode in ("eager", "static"):
        model, keepers = build(mesh, mode)
        for _ in range(2):
            loss = loss_of(model)
            with debug.comm_log() as log:
                loss.backward()
            assert len(log.only(operator="all_reduce")) == 0  # the input of `up` is reduce-scattered
            for name, keeper in keepers.items():
                gradients = keeper.taken if mode == "static" else keeper.arrived
                others = keeper.arrived if mode == "static" else keeper.taken
                assert (len(gradients), len(others)) == (1, 0), (mode, name)
                assert (tuple(gradients[0][1]) == (P,)) == (name in PARTIAL), (mode, name)
                check(model.get_parameter(name), gradients.pop(), expected[name])
                assert model.get_parameter(name).grad is None


@ranks(2)
def test_a_hook_that_nobody_knows_sees_a_reduced_gradient():
    mesh, expected = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), expected_gradients()
    for comes in ("before", "after the forward"):
        model, keepers = build(mesh, "static")
        seen, name = [], "norm.weight"
        loss_of(model).backward()
        for keeper in keepers.values():
            keeper.taken.clear()
        loss = None if comes == "before" else loss_of(model)
        handle = model.get_parameter(name).register_hook(lambda gradient, seen=seen: seen.append(gradient))
        (loss_of(model) if loss is None else loss).backward()
        assert [gradient.placements for gradient in seen] == [(R,)]
        torch.testing.assert_close(seen[0].full_tensor(), expected[name])
        assert [len(keepers[each].taken) for each in (name, "norm.bias")] == [0, 1]
        check(model.get_parameter(name), keepers[name].arrived.pop(), expected[name])
        handle.remove()
        loss_of(model).backward()
        assert [len(keepers[each].taken) for each in (name, "norm.bias")] == [1, 2]


@ranks(2)
def test_who_takes_hears_of_more():
    """The caller's own code uses a parameter, too: gradients come in two ways."""
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
        (_, _, taken_more), (_, _, arrived_more) = keeper.taken.pop(), keeper.arrived.pop()
        assert (taken_more, arrived_more) == (not outside_first, outside_first)
        keepers["norm.bias"].taken.pop()


@ranks(2)
def test_somebody_who_leaves_or_comes():
    mesh, expected = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), expected_gradients()
    torch.manual_seed(0)
    model = parallelize_module(Net().double(), mesh, PLAN, mode="static")
    loss_of(model).backward()
    model.zero_grad()
    keepers = {name: Keeper(parameter) for name, parameter in model.named_parameters()}  # after the first call
    loss_of(model).backward()
    for name, keeper in keepers.items():
        check(model.get_parameter(name), keeper.taken.pop(), expected[name])
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks.clear()
        parameter._backward_hooks.clear()
    set_mode(model, "static")
    loss_of(model).backward()
    for name, parameter in model.named_parameters():
        assert not keepers[name].taken
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-11, atol=1e-13)


@ranks(2)
def test_nothing_is_kept_alive():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, keepers = build(mesh, "static")
    loss_of(model).backward()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, keepers
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 6
