"""A rank that ends in the middle of a step ends all others, soon, with an error that names it and the collective."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import RankFailure, ranks, run_ranks

pytestmark = pytest.mark.usefixtures("quick_failures")


def wrapped(**settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    layers = [nn.Linear(8, 8) for _ in range(4)]
    return DDP(nn.Sequential(*layers), mesh["dp"], bucket_bytes=300, **settings)


def leave(*_):
    os._exit(7)


def step_of_which_a_rank_leaves(lost, when, settings):
    model = wrapped(**settings)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    if dist.get_rank() == lost and when == "backward":
        model.module[1].weight.register_hook(leave)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == lost and when == "step":
        time.sleep(1)  # until the others are done with the backward, too
        leave()
    optimizer.step()
    with pytest.raises(RuntimeError) as first:  # gathers of parameters are awaited where they are read
        model(torch.ones(2, 8))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape(str(first.value))):
        optimizer.step()
    assert time.monotonic() - began < 1.5  # it is known already, and no answers are awaited
    raise first.value


def errors_of(world_size, lost, when, settings):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank {lost}: left with exit status 7") as failure:
        run_ranks(step_of_which_a_rank_leaves, world_size, lost, when, settings, timeout=90)
    assert time.monotonic() - began < 60  # gloo alone waits half an hour
    assert set(failure.value.exceptions) == set(range(world_size)) - {lost}, failure.value
    return {rank: str(error) for rank, error in failure.value.exceptions.items()}


BUCKET = r"bucket \d \('\d.\w+' and \d more\)"
CASES = [
    (4, 2, "backward", {"zero": 0}, f"all-reduce of {BUCKET}"),
    (4, 0, "backward", {"zero": 2}, f"reduce-scatter of {BUCKET}"),
    (3, 1, "backward", {"zero": 0, "reduction": "ordered"}, f"all-(to-all|gather) of {BUCKET}"),
    (3, 2, "step", {"zero": 1}, f"all-gather of the parameters of {BUCKET}"),
    (2, 1, "backward", {"zero": 1, "overlap": False}, f"reduce-scatter of {BUCKET}"),
    (3, 1, "backward", {"zero": 3, "reduction": "ordered"}, "all-(to-all|gather) of"),  # which one fails first varies
]


@pytest.mark.parametrize("world_size, lost, when, settings, collective", CASES)
def test_the_others_name_the_lost_rank_and_the_collective(world_size, lost, when, settings, collective):
    check_errors(world_size, lost, when, settings, collective)


@pytest.mark.usefixtures("gathers_by_broadcasts")
def test_a_rank_that_is_lost_in_a_gather_by_broadcasts():
    check_errors(3, 2, "step", {"zero": 1}, f"all-gather of the parameters of {BUCKET}")


def check_errors(world_size, lost, when, settings, collective):
    for rank, message in errors_of(world_size, lost, when, settings).items():
        expected = (
            rf"the {collective}.* over axis 'dp' failed on rank {rank}; "
            rf"no answer from rank {lost}: ended, or hangs elsewhere\n"
        )
        assert re.match(expected, message), message


def step_of_which_the_host_of_the_store_leaves(fault):
    """Without torchrun the process of rank 0 hosts the store by which the others would tell each other."""
    first = dist.get_rank() == 0
    ports = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)] if first else [None]
    port = [ports[0].port if first else None]
    dist.broadcast_object_list(port)
    store = ports[0] or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    fault(pytest.MonkeyPatch(), "the store of failures", lambda _usual: lambda: store)
    step_of_which_a_rank_leaves(0, "backward", {})


def test_the_host_of_the_store_is_lost(fault):
    with pytest.raises(RankFailure, match="rank 0: left with exit status 7") as failure:
        run_ranks(step_of_which_the_host_of_the_store_leaves, 3, fault, timeout=40)
    assert set(failure.value.exceptions) == {1, 2}, failure.value
    for rank, error in failure.value.exceptions.items():
        host = "the store cannot be reached either: the proces"
        expected = rf"the all-reduce of (bucket \d|groups) .* failed on rank {rank}; {host}"
        assert re.match(expected, str(error)), error


@pytest.mark.parametrize("zero", [0, 2])
@ranks(2)
def test_a_slow_rank_is_waited_for(zero):
    model = wrapped(zero=zero)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    model(torch.ones(2, 8)).sum().backward()
    assert model.module[0].weight.grad is not None
