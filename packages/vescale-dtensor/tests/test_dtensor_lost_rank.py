"""A rank that ends while DTensors communicate ends the others, soon, with an error that names it and the collective."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor

from vescale.dtensor import (
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    disabled,
    distribute_tensor,
    init_device_mesh,
)
from vescale.dtensor.extension import Fact, Failures, check_facts, differing_texts
from vescale_testing import RankFailure, ranks, run_ranks


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


def tensor(mesh, placement):
    local = torch.ones(12, 12) if placement.is_partial() else torch.ones(12 // mesh.size(), 12)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size([12, 12]), stride=(12, 1))


def moved(source, target):
    return lambda mesh, _: tensor(mesh, source).redistribute(placements=[target]).to_local()


def awaited_later(mesh, _):
    return tensor(mesh, Shard(0)).redistribute(placements=[Replicate()], async_op=True).to_local() + 1


def backward(mesh, leave):
    """Gather the parameter in the forward, reduce and scatter its gradient in the backward."""
    parameter = tensor(mesh, Shard(0)).requires_grad_()
    whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    leave()
    whole.sum().backward()


PROGRAMS = {
    "gather": ("all-gather", lambda mesh, _: tensor(mesh, Shard(0)).full_tensor()),
    "reduce": ("all-reduce", moved(Partial(), Replicate())),
    "reduce and scatter": ("reduce-scatter", moved(Partial(), Shard(0))),
    "another dim": ("all-gather", moved(Shard(0), Shard(1))),
    "own placements": ("all-to-all", moved(InterleavedShard(0, 2), Shard(0))),
    "implicit": ("reduce-scatter", lambda mesh, _: tensor(mesh, Shard(0)) + tensor(mesh, Partial())),
    "a number": ("all-reduce", lambda mesh, _: tensor(mesh, Shard(0)).sum().item()),
    "awaited later": ("all-gather", awaited_later),
    "backward": ("reduce-scatter", backward),
    "scattered": ("scatter", lambda mesh, _: distribute_tensor(torch.ones(12), mesh, [Shard(0)])),
    "copied": ("broadcast", lambda mesh, _: distribute_tensor(torch.ones(12), mesh, [Replicate()])),
    "facts": ("comparison of ranks", lambda mesh, _: check_facts([Fact("lr", "0.1", "pass the same lr")], mesh)),
    "texts": ("comparison of ranks", lambda mesh, _: differing_texts("the same", mesh)),
}


def nothing():
    pass


def leave():
    os._exit(7)


def run_program(name, lost):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    program = PROGRAMS[name][1]
    program(mesh, nothing)
    if dist.get_rank() == lost and name != "backward":
        leave()
    program(mesh, leave if dist.get_rank() == lost else nothing)


def errors_of(program, world_size, *arguments, lost):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank {lost}: left with exit status 7") as failure:
        run_ranks(program, world_size, *arguments, timeout=60)
    assert time.monotonic() - began < 60  # gloo alone waits half an hour
    assert set(failure.value.exceptions) == set(range(world_size)) - {lost}, failure.value
    return {rank: str(error) for rank, error in failure.value.exceptions.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_others_name_the_lost_rank(name):
    lost = 0 if name in ("scattered", "copied") else 1  # the source: others need not wait for one that receives
    for rank, message in errors_of(run_program, 3, name, lost, lost=lost).items():
        expected = (
            rf"the {PROGRAMS[name][0]} over axis 'tp' failed on rank {rank}; "
            rf"no answer from rank {lost}: ended, or hangs elsewhere\n"
        )
        assert re.match(expected, message), message


def run_by_several_axes(lost):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = DTensor.from_local(torch.ones(4), mesh, [Partial(), Partial()], run_check=False)
    x.redistribute(placements=[Replicate(), Replicate()])
    if dist.get_rank() == lost:
        leave()
    x.redistribute(placements=[Replicate(), Replicate()])


def test_a_collective_over_several_axes():
    for rank, message in errors_of(run_by_several_axes, 4, 2, lost=2).items():
        expected = rf"the all-reduce over axis 'dp', 'tp' failed on rank {rank}; no answer from rank 2: ended"
        assert message.startswith(expected), message


def test_ranks_of_other_groups_name_the_first_rank_that_was_lost():
    """Rank 1 waits for rank 0 along 'pp', which has ended because it had waited for rank 2, and that for rank 3."""
    store = dist.HashStore()
    errors = {}
    for rank, gone, axis in [(2, 3, "tp"), (0, 2, "dp"), (1, 0, "pp")]:
        began = time.monotonic()
        errors[rank] = Failures((rank, gone), rank, store).describe(f"the all-reduce over axis {axis!r}", "closed")
        assert (time.monotonic() - began > 1) == (rank == 2), "ranks that have said what they lost are not waited for"
        assert f"failed on rank {rank}; no answer from rank {gone}: ended" in errors[rank], errors[rank]
    first = "the all-reduce over axis 'tp' failed on rank 2; no answer from rank 3: ended, or hangs elsewhere"
    assert errors[0].endswith(f"\n  before that, {first}")
    second = "the all-reduce over axis 'dp' failed on rank 0; no answer from rank 2: ended, or hangs elsewhere"
    assert errors[1].endswith(f"\n  before that, {second}; before that, {first}")
    assert "before" not in errors[2]


def run_without(name, lost):
    with disabled("process"):
        run_program(name, lost)


def test_stock_torch_names_no_rank():
    for message in errors_of(run_without, 2, "gather", 1, lost=1).values():
        assert "gloo" in message, message
        assert "rank 1" not in message
        assert "axis" not in message


def values_of_operators(group, size):
    """Return the results of the functional operators, which a listening group must not change."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(3 * size, 2)
    splits = [3 + (rank + other) % 2 for other in range(size)]
    rows = torch.randn(sum(splits), 2)
    plain = torch.ops._c10d_functional
    found = [
        *(functional.all_reduce(x, op, group) for op in ("sum", "max", "product")),
        functional.all_reduce(torch.complex(x, -x), "sum", group),
        functional.all_reduce(x.bfloat16().t(), "sum", group),
        *functional.all_reduce_coalesced([x, rows[:1]], "sum", group),
        plain.wait_tensor(plain.all_gather_into_tensor(x, size, group.group_name)),
        plain.wait_tensor(plain.reduce_scatter_tensor(x, "sum", size, group.group_name)),
        plain.wait_tensor(plain.reduce_scatter_tensor(x, "max", size, group.group_name)),
        *map(plain.wait_tensor, plain.reduce_scatter_tensor_coalesced([x, x * 2], "sum", size, group.group_name)),
        functional.all_to_all_single(rows, splits, splits, group),
        functional.broadcast(x, size - 1, group),
    ]
    return [each.wait() if hasattr(each, "wait") else each for each in found]


@ranks(3)
def test_values_are_those_of_stock_operators():
    ours = values_of_operators(dist.group.WORLD, 3)
    with disabled("process"):
        stock = values_of_operators(dist.group.WORLD, 3)
    for index, (one, other) in enumerate(zip(ours, stock, strict=True)):
        assert one.stride() == other.stride(), index
        assert torch.equal(one, other), index


@ranks(2)
def test_a_slow_rank_is_waited_for():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if dist.get_rank() == 1:
        time.sleep(0.5)
    assert torch.equal(tensor(mesh, Shard(0)).full_tensor(), torch.ones(12, 12))


@ranks(2)
def test_a_group_of_the_same_name_after_the_first_has_ended():
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert torch.equal(tensor(mesh, Partial()).full_tensor(), torch.full((12, 12), 2.0))
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)


def test_an_answer_right_before_the_last_words_is_heard(monkeypatch):
    """Rank 1 answers and raises its error between two looks of rank 0 into the store."""
    store = dist.HashStore()
    first, second = (Failures((0, 1), rank, store) for rank in range(2))
    words_of, raised = first._words_of, []

    def words_after_an_error(rank):
        if not raised:
            raised.append(second.describe("the gather", "of rank 1"))
        return words_of(rank)

    monkeypatch.setattr(first, "_words_of", words_after_an_error)
    message = first.describe("the gather", "of rank 0")
    assert "every rank of the axis is there" in message, message
    assert "rank 1: the gather: of rank 1" in message, message
