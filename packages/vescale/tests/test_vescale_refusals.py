"""What `parallelize` refuses, and how: before anything is communicated, with the way out."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testing import ranks


def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("plan", "model", "optimizer_fn", "error", "message"),
    [
        (
            {"dp": 1},
            build(),
            torch.optim.SGD,
            TypeError,
            "expected a vescale.Plan as plan, got dict; pass vescale",
        ),
        (
            vescale.Plan(),
            [build()],
            torch.optim.SGD,
            TypeError,
            "expected an nn.Module as model, got list; pass the plain module",
        ),
        (
            vescale.Plan(),
            build(),
            "adamw",
            TypeError,
            "expected a torch.optim class, functools.partial of one, or a function from parameters to an optimizer as",
        ),
        (
            vescale.Plan(),
            build(),
            torch.optim.SGD(build().parameters()),
            TypeError,
            "as optimizer_fn, got an instance of SGD; pass functools.partial(torch.optim.AdamW, lr=3e-4)",
        ),
        (
            vescale.Plan(),
            build(),
            nn.Linear,
            TypeError,
            "as optimizer_fn, got <class 'torch.nn.modules.linear.Linear'>; pass functools",
        ),
        (
            vescale.Plan(recompute=3),
            build(),
            torch.optim.SGD,
            ValueError,
            "expected a model with 3 blocks or more, in an nn.ModuleList or nn.Sequential, for Plan(recompute=3)",
        ),
        (
            vescale.Plan(recompute=["2"]),
            build(),
            torch.optim.SGD,
            ValueError,
            "in Plan(recompute=...), got '2', which matches no module; the nearest names are",
        ),
        (
            vescale.Plan(zero=3, units=["layer"]),
            build(),
            torch.optim.SGD,
            ValueError,
            "expected names of modules, or regular expressions for full names, in Plan(units=...), got 'layer', which",
        ),
        (
            vescale.Plan(zero=1, granularity={"0.weights": "rows"}),
            build(),
            torch.optim.SGD,
            ValueError,
            "in Plan(granularity=...), got '0.weights', which matches no parameter; the nearest names are ['0.weight'",
        ),
        (
            vescale.Plan(recompute=["blocks", r"blocks\.0"]),
            nn.ModuleDict({"blocks": build()}),
            torch.optim.SGD,
            ValueError,
            "expected modules that are not inside of each other for Plan(recompute=...), got 'blocks.0' in 'blocks'",
        ),
        (
            vescale.Plan(recompute=["blocks"]),
            nn.ModuleDict({"blocks": nn.ModuleList(build())}),
            torch.optim.SGD,
            ValueError,
            "expected modules with a forward for Plan(recompute=...), got the list 'blocks'; name its elements",
        ),
        (
            vescale.Plan(pp=4, num_microbatches=4),
            build(),
            torch.optim.SGD,
            ValueError,
            "4 pipeline stages",
        ),
        (
            vescale.Plan(tp=2, sequence_parallel=True),
            nn.Sequential(nn.Flatten(0, 1), *build()),
            torch.optim.SGD,
            ValueError,
            "for sequence_parallel=True, got a Sequential with activations that cannot (no sum over ranks of shape",
        ),
        (
            vescale.Plan(tp=2, etp=2),
            build(),
            torch.optim.SGD,
            ValueError,
            "expected etp=1 for Sequential, which has no ready plan, got 2: a derived plan leaves the matrices of an",
        ),
        (vescale.Plan(module_plan="mixtrl"), build(), torch.optim.SGD, ValueError, "got the name 'mixtrl'; pass"),
        (
            vescale.Plan(dp=2),
            build(),
            torch.optim.SGD,
            ValueError,
            "expected dp * tp * pp = 2 * 1 * 1 = 2 processes, got 1; start 2 (torchrun",
        ),
    ],
)
def test_bad_arguments_are_refused_without_a_process_group(monkeypatch, plan, model, optimizer_fn, error, message):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(error, match=re.escape(message)):
        vescale.parallelize(plan, model, optimizer_fn)
    assert not dist.is_initialized()


@ranks(1)
def test_a_function_that_makes_no_optimizer():
    with pytest.raises(TypeError, match=r"expected a function that returns an optimizer as optimizer_fn, got .* list;"):
        vescale.parallelize(vescale.Plan(), build(), lambda params: params)


def test_two_norms_to_clip_by_are_refused():
    with pytest.raises(
        ValueError, match=r"got clip_grad_norm=2\.0 and Plan\(clip_grad_norm=1\.0\); leave the argument"
    ):
        vescale.parallelize(vescale.Plan(clip_grad_norm=1), build(), torch.optim.SGD, clip_grad_norm=2.0)


def test_two_module_plans_are_refused():
    with pytest.raises(ValueError, match=r"got the argument and Plan\(module_plan='llama'\); leave one of them out"):
        vescale.parallelize(vescale.Plan(module_plan="llama"), build(), torch.optim.SGD, module_plan={})


@ranks(1)
def test_another_random_stream_than_the_plans_is_refused():
    with vescale.dtensor.random.stream("philox"):
        with pytest.raises(ValueError, match=r"the plan's random stream 'torch', got 'philox', which is in force; use"):
            vescale.parallelize(vescale.Plan(), build(), torch.optim.SGD)
        vescale.parallelize(vescale.Plan(random_stream="philox"), build(), torch.optim.SGD)


def test_name_of_a_ready_plan_belongs_into_the_plan():
    with pytest.raises(
        TypeError, match=r"expected a dict of sections as module_plan, got 'llama'; .* Plan\(module_plan"
    ):
        vescale.parallelize(vescale.Plan(), build(), torch.optim.SGD, module_plan="llama")


@ranks(1)
def test_parallel_model_is_not_parallelized_again():
    model, _ = vescale.parallelize(vescale.Plan(), build(), torch.optim.SGD)
    with pytest.raises(TypeError, match="expected a plain module, got ParallelModel; pass the plain module"):
        vescale.parallelize(vescale.Plan(), model, torch.optim.SGD)


@ranks(2)
def test_mesh_of_another_shape_is_refused():
    mesh = vescale.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    with pytest.raises(
        ValueError, match=r"expected a mesh with the axes .*'dp': 2.*, got \{'pp': 1, 'dp': 1, 'tp': 2\}"
    ):
        vescale.parallelize(vescale.Plan(dp=2), build(), torch.optim.SGD, mesh=mesh)
    unnamed = vescale.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"expected a mesh with the axes .*, got axes without names"):
        vescale.parallelize(vescale.Plan(dp=2), build(), torch.optim.SGD, mesh=unnamed)


@ranks(1)
def test_mesh_on_another_device_is_refused():
    mesh = vescale.init_device_mesh("meta", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    with pytest.raises(ValueError, match=r"expected a mesh on the plan's device 'cpu', got 'meta'; leave mesh out"):
        vescale.parallelize(vescale.Plan(), build(), torch.optim.SGD, mesh=mesh)


@ranks(2)
def test_wrong_world_is_refused_on_every_rank():
    with pytest.raises(ValueError, match=r"expected dp \* tp \* pp = 2 \* 2 \* 2 = 8 processes, got 2; start 8"):
        vescale.parallelize(vescale.Plan(dp=2, tp=2, pp=2), build(), torch.optim.SGD, module_plan={})


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan")])
def test_a_clip_value_that_is_no_norm_is_refused_before_anything_is_built(value):
    with pytest.raises(ValueError, match=r"^parallelize: clip_grad_norm: expected a positive number, got .*; pass a"):
        vescale.parallelize(vescale.Plan(), build(), torch.optim.SGD, clip_grad_norm=value)
    assert not dist.is_initialized()


def test_errors_name_what_the_caller_has_written():
    with pytest.raises(ValueError, match=r"Plan\(module_plan='llama'\)") as error:
        vescale.parallelize(vescale.Plan(module_plan="mixtrl"), build(), torch.optim.SGD)
    assert "family=" not in str(error.value)  # an argument of plan_for, which parallelize does not have
    with pytest.raises(vescale.pipe.SplitError, match=r"with split=.* in the plan") as error:
        vescale.pipe.split_units(nn.Linear(2, 2), vescale.pipe.PipelinePlan(), 2)
    assert "PipelinePlan" not in str(error.value)  # parallelize takes vescale.Plan
