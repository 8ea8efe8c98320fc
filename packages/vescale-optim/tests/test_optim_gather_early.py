"""Gathers complete early where a read of a parameter cannot be seen, or where waiting costs more than it gains."""

import atexit
import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

EYE = torch.eye(6, dtype=torch.float64)


def layers(last=nn.Linear):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), last(6, 6)).double()


def wrapped(module=None, **settings):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(module or layers(), mesh["dp"], **{"zero": 2, "bucket_bytes": 400, **settings})
    return model, DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)


def train(model, optimizer, called=None):
    (model if called is None else called)(EYE).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def waiting(model):
    """Return the layers whose values are on their way."""
    names = [fqn for fqn, param in model.named_parameters() if type(param).__name__.startswith("InFlight")]
    return sorted({int(fqn.split(".")[-2]) for fqn in names})


class Extension(nn.Linear):
    """A layer that reads its weight as a C++ extension does: not by a function that asks the tensor's class."""

    def forward(self, x):
        return x @ torch.asarray(self.weight, copy=True).t()


class Claimed(Extension):
    """The same, in the disguise of a layer of torch, which reads its weight by functions of torch."""


Claimed.__module__ = "torch.nn.modules.linear"


def first_outputs_after_a_gather(module):
    model, _ = wrapped(module)
    for slot in model.slots().values():
        slot.value_part.fill_(1.0)
    model.gather_parameters()
    return model, model.module[2](EYE)


@ranks(2)
def test_modules_that_are_not_of_torch_wait_before_their_forward(late_gathers):
    late_gathers(pytest.MonkeyPatch())
    model, out = first_outputs_after_a_gather(layers(Extension))
    assert waiting(model) == [0, 1]  # not for those of others
    assert (out == 1).all()
    model, out = first_outputs_after_a_gather(layers(Claimed))
    assert waiting(model) == [0, 1, 2]
    assert not (out == 1).all()
    model.wait_for_parameters()


@ranks(2)
def test_transforms_wait_when_the_module_is_called(late_gathers):
    late_gathers(pytest.MonkeyPatch())
    model, _ = wrapped()
    for slot in model.slots().values():
        slot.value_part.fill_(1.0)
    model.gather_parameters()
    params = dict(model.module.named_parameters())
    grads = torch.func.grad(lambda params: functional_call(model.module, params, EYE).sum())(params)
    expected = torch.autograd.grad(model.module(EYE).sum(), list(params.values()))
    assert all(torch.equal(a, b) for a, b in zip(grads.values(), expected, strict=True))


@ranks(2)
def test_a_tensor_that_shares_memory_makes_step_wait_for_its_bucket():
    model, optimizer = wrapped()
    for _ in range(2):
        train(model, optimizer)
        assert waiting(model) == [0, 1, 2]
        model(EYE)
    alias = model.module[1].weight.detach()
    train(model, optimizer)
    assert waiting(model) == [0, 2]
    other = torch.empty(2, *alias.shape, dtype=alias.dtype)
    dist.all_gather(list(other), alias)
    assert torch.equal(other[0], other[1])
    del alias
    train(model, optimizer)
    assert waiting(model) == [0, 1, 2]
    model(EYE)
    kept = model.state_dict()
    train(model, optimizer)
    assert waiting(model) == []
    del kept


@ranks(2)
def test_masters_and_new_optimizers_do_not_count_as_shared_memory():
    for settings in ({}, {"master_dtype": torch.float64}):
        model, optimizer = wrapped(layers().float())
        for _ in range(2):
            optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, **settings)
            gc.collect()
            model(EYE.float()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert waiting(model) == [0, 1, 2]
            model(EYE.float())


@ranks(2)
def test_steps_that_do_not_overlap():
    for settings in ({"overlap": False}, {"zero": 0}):
        model, optimizer = wrapped(**settings)
        train(model, optimizer)
        assert waiting(model) == []


def compiled(function):
    """Return the compiled function, and a list with an entry for each graph that has been compiled."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend), graphs


@ranks(2, timeout=180)
def test_compiled_modules_see_plain_parameters():
    plain, optimizer = wrapped()
    for _ in range(3):
        train(plain, optimizer)
    parts = layers()
    parts[1] = torch.compile(parts[1], backend="eager")
    own = layers()
    own.compile(backend="eager")
    for module, outside in (
        (torch.compile(layers(), backend="eager"), False),
        (parts, False),
        (own, False),
        (None, True),
    ):
        model, optimizer = wrapped(module)
        called = torch.compile(model, backend="eager") if outside else None
        for _ in range(3):
            train(model, optimizer, called)
            assert waiting(model) == []
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@ranks(2, timeout=180)
def test_a_compiled_function_gets_plain_parameters_and_is_compiled_once():
    for first_call_waits in (True, False):
        model, optimizer = wrapped()
        scale, graphs = compiled(lambda x, weight: x * weight)
        if not first_call_waits:
            scale(EYE, model.module[0].weight)
        for step in range(3):
            train(model, optimizer)
            assert waiting(model) == ([0, 1, 2] if step == 0 else [])
            assert torch.equal(scale(EYE, model.module[0].weight), EYE * model.module[0].weight)
        assert len(graphs) <= 2 - first_call_waits


@ranks(2)
def test_a_fork_and_the_deletion_of_the_model_wait():
    model, optimizer = wrapped()
    train(model, optimizer)
    child = os.fork()
    if child == 0:
        os._exit(0 if waiting(model) == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(model, optimizer)
    module = model.module
    assert waiting(module) == [0, 1, 2]
    del model, optimizer
    gc.collect()
    assert waiting(module) == []
    module(EYE)


@ranks(2)
def test_the_end_of_a_program_waits():
    """A rank that reads nothing after its last step may end first, and what others read comes from it, too."""
    at_exit = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atexit, "register", at_exit.append)
        model, optimizer = wrapped()
    train(model, optimizer)
    assert waiting(model) == [0, 1, 2]
    for function in at_exit:
        function()
    assert waiting(model) == []
