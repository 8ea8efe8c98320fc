"""Our own packages keep the protocols of docs/protocols.md, and each check finds what breaks it."""

import contextlib
import importlib.metadata

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import InterleavedShard, Replicate, Shard, distribute_tensor, init_device_mesh, random
from vescale.optim import DDP, DistributedOptimizer
from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks
from vescale_testing.protocols import (
    check_absent_fqns,
    check_accumulation_hook,
    check_boxes,
    check_draws,
    check_execution,
    check_hook,
    check_memory,
    check_reducer,
    check_rehearsal,
    check_stand_ins,
    check_units,
)


@ranks(2)
def test_sharded_tensors_and_optimizer_states_have_boxes():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    check_boxes(distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [InterleavedShard(0, 2)]))

    model = DDP(nn.Linear(5, 3), mesh, zero=2)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()["state"]
    assert states
    for state in states.values():
        check_boxes(state["exp_avg"])


@ranks(2)
def test_a_stub_lists_the_names_of_what_it_replaces():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    PipelineEngine(model, mesh, PipelinePlan(num_microbatches=2), loss_fn=nn.functional.mse_loss)
    stubs = [part for part in model.modules() if hasattr(part, "absent_fqns")]
    assert len(stubs) == 1
    check_absent_fqns(stubs[0])
    assert "weight" in stubs[0].absent_fqns
    check_units(model)
    assert len(model._vescale_units) == 1


@ranks(2)
def test_a_parallelized_module_says_how_it_runs():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(4, 4))
    plan = {"parameter": {r"0\..*": [Shard(0)]}, "forward": {r"0\.output": [{"tp": Replicate()}]}}
    check_execution(parallelize_module(model, mesh, plan, mode="static"))
    model(torch.ones(2, 4))
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    check_stand_ins(model[0].weight)
    assert model[0].weight._vescale_gradients.leaves()


@ranks(1)
def test_a_rehearsal_is_found_and_finds_what_mixes_rows():
    (found,) = importlib.metadata.entry_points(group="vescale.pipe", name="rehearsal")
    check_rehearsal(found.load())


@ranks(2)
def test_hooks_and_memory_of_zero_3():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), mesh, zero=3)
    tables = ("_forward_pre_hooks", "_forward_hooks")
    hooks = [hook for part in model.module.modules() for table in tables for hook in vars(part)[table].values()]
    assert hooks
    for hook in hooks:
        check_hook(hook)
    for parameter in model.module.parameters():
        check_memory(parameter)
        for hook in parameter._backward_hooks.values():
            check_accumulation_hook(hook)
    assert dist.get_world_size() == 2


@ranks(2)
def test_gradients_are_reduced_before_the_backward_that_brings_them():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for zero in (0, 2):
        model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), mesh, zero=zero)
        parameters = list(model.parameters())
        check_reducer(parameters[0]._vescale_gradients.receiver.reducer, parameters)


class Boxes:
    def __init__(self, shape, *boxes):
        self.__global_shape__, self.boxes = shape, boxes

    def __boxes__(self):
        return self.boxes


@pytest.mark.parametrize("stream", ["torch", "philox"])
def test_parts_of_a_batch_draw_what_the_batch_draws(stream):
    (entry,) = importlib.metadata.entry_points(group="vescale.pipe", name="draws")
    with random.stream(stream, seed=3):
        check_draws(entry.load())


def test_parts_that_draw_alike_are_found():
    (entry,) = importlib.metadata.entry_points(group="vescale.pipe", name="draws")
    kind = type("Alike", (entry.load(),), {"part": staticmethod(lambda *_: contextlib.nullcontext())})
    with pytest.raises(AssertionError, match="part: expected"):
        check_draws(kind)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "object has no __global_shape__"),
        (Boxes((4,), ((3,), torch.ones(2))), "leaves the global shape"),
        (Boxes((4, 1), ((3,), torch.ones(1))), "expected 2 dims"),
        (Boxes((4,), ((0,), torch.ones(2)), ((1,), torch.ones(2))), "overlap"),
    ],
)
def test_boxes_that_are_wrong_are_found(value, message):
    with pytest.raises(AssertionError, match=message):
        check_boxes(value)


def test_stand_ins_and_units_that_are_wrong_are_found():
    parameter, model = nn.Parameter(torch.ones(3)), nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    leaf = torch.ones(2, requires_grad=True)
    parameter._vescale_gradients = type("Other", (), {"leaves": lambda _: [(leaf, lambda gradient: gradient)]})()
    with pytest.raises(AssertionError, match=r"expected torch\.Size"):
        check_stand_ins(parameter)
    for units, message in (
        (("0", "0.0"), "0.0 is inside 0"),
        (("1",), "the model has no"),
        (["0"], "expected a tuple"),
    ):
        model._vescale_units = units
        with pytest.raises(AssertionError, match=message):
            check_units(model)


class Hasty:
    """Sets gradients without waiting for a backward."""

    def begin(self, groups):
        self.parameters = [parameter for group in groups for parameter in group]
        return self

    def add(self, sums):
        for parameter, gradient in sums:
            parameter.grad = gradient

    def finish(self):
        return []

    def close(self):
        pass

    def deliver(self, *_means_and_factor):
        pass


class Careless(Hasty):
    """Forgets the factor."""

    def add(self, sums):
        self.sums = {**getattr(self, "sums", {}), **dict(sums)}

    def deliver(self, *_means_and_factor):
        for parameter in self.parameters:
            parameter.grad = self.sums[parameter].detach()


@pytest.mark.parametrize(("kind", "message"), [(Hasty, "expected gradients to wait"), (Careless, "expected 1.5")])
def test_reducers_that_are_wrong_are_found(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_reducer(kind(), [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])


def test_boxes_that_are_copies_are_found():
    alive = []  # keeps every copy, so that no address comes again

    class Copies(Boxes):
        def __boxes__(self):
            alive.append([(offsets, view.clone()) for offsets, view in self.boxes])
            return alive[-1]

    with pytest.raises(AssertionError, match="expected views, got copies"):
        check_boxes(Copies((4,), ((0,), torch.ones(2))))


def test_other_objects_that_are_wrong_are_found():
    module = nn.Linear(1, 1)
    module.absent_fqns = ("weight",)
    with pytest.raises(AssertionError, match=r"holds \['weight'\] itself"):
        check_absent_fqns(module)
    module._vescale_execution = type("Execution", (), {"modes": {"": "fast"}, "any_rank": None})()
    with pytest.raises(AssertionError, match="own mode under ''"):
        check_execution(module)
    with pytest.raises(AssertionError, match="has no _vescale_in_graph"):
        check_hook(print)
    with pytest.raises(AssertionError, match="has no _vescale_accumulates"):
        check_accumulation_hook(print)
    twice = type("Twice", (), {"_vescale_accumulates": True, "__call__": lambda _, gradient: 2 * gradient})
    with pytest.raises(AssertionError, match="expected None for another gradient"):
        check_accumulation_hook(twice())
    module.weight._vescale_memory = type("Memory", (), {"frees": True, "share": print})()
    with pytest.raises(AssertionError, match="expected None in a copy"):
        check_memory(module.weight)
