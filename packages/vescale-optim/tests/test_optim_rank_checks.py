"""Ranks that should agree and do not: the same error on every rank, before the first wrong parameter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.dtensor import check_ranks
from vescale.optim import DDP, DistributedOptimizer, clip_grad_norm_
from vescale_testing import halved, ranks


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def wrapped(*, p=0.0, **settings):
    torch.manual_seed(0)
    return DDP(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.Linear(4, 4)), mesh_of(dist.get_world_size()), **settings
    )


def last(value, other):
    """Return `other` on the last rank, `value` on all others."""
    return other if dist.get_rank() == dist.get_world_size() - 1 else value


# ------------------------------------------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@ranks(4)
def test_learning_rates_that_differ_at_construction(zero):
    expected = (
        r"^'lr' of param group 0 must be equal on all ranks: expected 0.1 as on ranks 0, 1, 2, got 0.2 on rank 3; "
    )
    with pytest.raises(ValueError, match=expected):
        DistributedOptimizer(torch.optim.SGD, model=wrapped(zero=zero), lr=last(0.1, 0.2))


@pytest.mark.parametrize(
    "arguments, other, expected",
    [
        (
            {"clip_grad_norm": 1.0},
            {"clip_grad_norm": 2.0},
            "clip_grad_norm .* expected 1.0 as on rank 0, got 2.0 on rank 1",
        ),
        ({"clip_grad_norm": 1.0}, {}, "clip_grad_norm must be .* expected 1.0 as on rank 0, got None on rank 1"),
        ({"master_dtype": torch.float64}, {}, "master_dtype must be equal"),
        ({"momentum": 0.9}, {"momentum": 0.8}, "'momentum' of param group 0 must be equal"),
    ],
)
@ranks(2)
def test_arguments_that_differ(arguments, other, expected):
    with pytest.raises(ValueError, match=expected):
        DistributedOptimizer(torch.optim.SGD, model=wrapped(), lr=0.1, **last(arguments, other))


@ranks(2)
def test_classes_and_groups_that_differ():
    with pytest.raises(
        ValueError, match=r"class of the optimizer must be equal.*expected SGD as on rank 0, got Adagrad"
    ):
        DistributedOptimizer(last(torch.optim.SGD, torch.optim.Adagrad), model=wrapped(), lr=0.1)
    model = wrapped()
    params = list(model.parameters())
    groups = [{"params": params[: last(1, 2)]}, {"params": params[last(1, 2) :]}]
    with pytest.raises(ValueError, match="the parameters of param group 0 must be equal on all ranks"):
        DistributedOptimizer(torch.optim.SGD, model=model, param_groups=groups, lr=0.1)


@halved
@pytest.mark.parametrize("find_unused", [True, False])
@pytest.mark.parametrize("zero", [0, 2, 3])
@ranks(2)
def test_a_learning_rate_that_changes_on_one_rank(zero, find_unused):
    check_ranks(every=1)
    model = wrapped(zero=zero, find_unused_parameters=find_unused)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    for step in range(3):
        if step == 2:
            optimizer.param_groups[0]["lr"] = last(0.1, 0.05)
            with pytest.raises(
                ValueError, match=r"'lr' of param group 0 .* expected 0.1 as on rank 0, got 0.05 on rank 1"
            ):
                model(torch.ones(2, 4)).sum().backward()
            return
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1  # as a scheduler does, the same on all ranks


def tensor_parallel():
    torch.manual_seed(0)
    mesh = mesh_of(2, dist.get_world_size() // 2)
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(0)]))
    return linear, mesh


@ranks(4)
def test_ranks_of_tensor_parallelism_are_compared_too():
    linear, mesh = tensor_parallel()
    with pytest.raises(ValueError, match=r"'lr' of param group 0"):
        DistributedOptimizer(torch.optim.SGD, model=linear, lr=0.1 + mesh.get_local_rank("tp"))
    model = DDP(linear, mesh["dp"], per_rank=True)
    with pytest.raises(ValueError, match=r"'lr' of param group 0"):
        DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1 + mesh.get_local_rank("tp"))
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    optimizer.param_groups[0]["lr"] += mesh.get_local_rank("tp")
    x = distribute_tensor(torch.ones(2, 4), mesh["tp"], [Replicate()])
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"'lr' of param group 0 must be equal on all ranks: expected 0.1 as"):
        optimizer.step()


@ranks(4)
def test_a_norm_of_clipping_that_differs():
    model = wrapped()
    model(torch.ones(2, 4)).sum().backward()
    expected = (
        "max_norm of clip_grad_norm_ must be equal on all ranks: expected 1.0 as on ranks 0, 1, 2, got 3.0 on rank 3"
    )
    with pytest.raises(ValueError, match=expected):
        clip_grad_norm_(model, last(1.0, 3.0))


@ranks(2)
def test_switched_off():
    check_ranks(every=0)
    model = wrapped()
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=last(0.1, 0.2))
    model(torch.ones(last(2, 3), 4)).sum().backward()
    optimizer.step()


# ------------------------------------------------------------------------------------------------- rows and generators


@ranks(3)
def test_rows_that_differ_where_dropout_draws():
    model = wrapped(p=0.5)
    expected = (
        r"the number of rows \(dim 0 of the first input\) .* expected 2 as on ranks 0, 1, got 3 on rank 2"
        r"; give all ranks the same number of rows"
    )
    with pytest.raises(ValueError, match=expected):
        model(torch.ones(last(2, 3), 4)).mean().backward()


@ranks(2)
def test_rows_that_differ_in_a_mean():
    model = wrapped()
    with pytest.raises(ValueError, match=r"got 3 on rank 1; .* multiply them by DDP.global_mean_scale"):
        model(torch.ones(last(2, 3), 4)).mean().backward()
    scale = model.global_mean_scale(4 * last(2, 3))
    (model(torch.ones(last(2, 3), 4)).sum() * scale).backward()


@pytest.mark.parametrize("p", [0.0, 0.5])
@ranks(2)
def test_seeds_that_differ_matter_where_something_draws(p):
    model = wrapped(p=p)
    torch.manual_seed(1337 + dist.get_rank())
    if p == 0:
        model(torch.ones(2, 4)).mean().backward()
        return
    expected = "the state of the random generator must be equal on all ranks: expected seed 1337, .* got seed 1338, "
    with pytest.raises(ValueError, match=expected):
        model(torch.ones(2, 4))
    torch.manual_seed(1337)
    model(torch.ones(2, 4)).mean().backward()
    torch.manual_seed(1337 + dist.get_rank())
    with pytest.raises(ValueError, match=expected):
        model(torch.ones(2, 4)).mean().backward()


@pytest.mark.parametrize("zero", [0, 3])
@ranks(2)
def test_equal_ranks_raise_nothing(zero):
    check_ranks(every=1)
    model = wrapped(p=0.5, zero=zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=1.0)
    for _ in range(3):
        with model.no_sync():
            model(torch.ones(2, 4)).mean().backward()
        model(torch.ones(3, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(torch.ones(last(2, 3), 4))  # an evaluation may have any rows
        model.train()


# ------------------------------------------------------------------------------------------------- a backward left out


def train_but_skip(zero, steps_anyway, clip):
    model = wrapped(zero=zero)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, clip_grad_norm=clip)
    for step in range(3):
        loss = model(torch.ones(2, 4)).mean()
        skips = step == 1 and dist.get_rank() == 1
        if not skips:
            loss.backward()
        if not skips or steps_anyway:
            optimizer.step()
        optimizer.zero_grad()


@halved
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("steps_anyway, clip", [(True, None), (True, 1.0), (False, None)])
@pytest.mark.usefixtures("quick_failures")
@ranks(2)
def test_a_rank_that_skips_a_backward(zero, steps_anyway, clip):
    what = (
        "step.. or clip_grad_norm_ without a backward" if steps_anyway else "call 2 of the module since its last back"
    )
    with pytest.raises(RuntimeError, match=f"rank 1: was waiting in .*{what}"):
        train_but_skip(zero, steps_anyway, clip)


@pytest.mark.parametrize("zero", [0, 2, 3])
@ranks(2)
def test_backwards_that_all_ranks_leave_out(zero):
    model = wrapped(zero=zero)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, clip_grad_norm=1.0)
    for _ in range(2):
        model(torch.ones(2, 4))
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 4))
        optimizer.step()
