"""What `parallelize` refuses, and how: before anything is communicated, with the way out."""

import functools
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
            lambda m: m,
            TypeError,
            "expected a torch.optim class, or functools.partial of one",
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
            functools.partial(torch.optim.SGD, []),
            TypeError,
            "partial of one with keyword arguments",
        ),
        (
            vescale.Plan(tp=2),
            build(),
            torch.optim.SGD,
            ValueError,
            "got Sequential with model type None; pass module_plan={...} of your own, or the ready plan of a family",
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


@pytest.mark.parametrize("plan", [vescale.Plan(tp=2), vescale.Plan(module_plan="mixtrl")])
def test_errors_name_what_the_caller_has_written(plan):
    with pytest.raises(ValueError, match=r"Plan\(module_plan='llama'\)") as error:
        vescale.parallelize(plan, build(), torch.optim.SGD)
    assert "family=" not in str(error.value)  # an argument of plan_for, which parallelize does not have
    with pytest.raises(vescale.pipe.SplitError, match=r"with split=.* in the plan") as error:
        vescale.pipe.split_units(nn.Linear(2, 2), vescale.pipe.PipelinePlan(), 2)
    assert "PipelinePlan" not in str(error.value)  # parallelize takes vescale.Plan
