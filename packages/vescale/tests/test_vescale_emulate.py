"""`emulate` runs all ranks of a plan in one process, with the bits of as many processes."""

import functools
import os
import random
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testing import run_ranks

WIDTH, VOCABULARY = 16, 32


# ------------------------------------------------------------------------------------------------- collectives


def collectives():
    """Return the results of collectives of values that no order of additions leaves alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for numel in (1, 7, 1000, 600_001):
            found[f"all-reduce {dtype} {numel}"] = torch.randn(numel).to(dtype)
            dist.all_reduce(found[f"all-reduce {dtype} {numel}"])
    for numel in (1, 9, 3_000_000):
        values = torch.randn(numel)
        dist.reduce(values, size - 1)
        if rank == size - 1:
            found[f"reduce {numel}"] = values
    found["reduce-scatter"] = torch.empty(100)
    dist.reduce_scatter_tensor(found["reduce-scatter"], torch.randn(100 * size))
    for numel in (7, 3_000_000):
        found[f"reduce-scatter of a list {numel}"] = torch.empty(numel)
        dist.reduce_scatter(found[f"reduce-scatter of a list {numel}"], list(torch.randn(size, numel)))
    found["largest"] = torch.randn(5)
    dist.all_reduce(found["largest"], dist.ReduceOp.MAX)
    rows = torch.randn(size, 2)
    found["all-to-all"] = torch.empty_like(rows)
    dist.all_to_all_single(found["all-to-all"], rows)
    names = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    found["objects"] = torch.tensor([int(name.split()[1]) for name in names])
    every_other = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        found["subgroup"] = torch.randn(5)
        dist.all_reduce(found["subgroup"], group=every_other)
    found["message"] = torch.empty(3)
    receive = dist.irecv(found["message"], (rank - 1) % size)
    dist.send(torch.randn(3), (rank + 1) % size)
    receive.wait()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_have_the_bits_of_gloo(size):
    expected = run_ranks(collectives, size)
    found = vescale.emulate(size, collectives)
    for rank in range(size):
        assert found[rank].keys() == expected[rank].keys()
        for name, value in expected[rank].items():
            assert torch.equal(found[rank][name], value), (rank, name)


def summands():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    own = torch.randn(1000)
    total = own.clone()
    dist.all_reduce(total)
    return own, total


def test_another_order_of_additions_has_other_bits():
    found = vescale.emulate(4, summands)
    in_order = functools.reduce(torch.add, (own for own, _ in found))
    assert not torch.equal(in_order, found[0][1])
    torch.testing.assert_close(in_order, found[0][1])


# ------------------------------------------------------------------------------------------------- training


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def train(plan):
    """Return losses and parameters of three steps with dropout and clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, VOCABULARY))
    model, optimizer = vescale.parallelize(
        plan, model, torch.optim.AdamW, loss_fn=lambda out, target: nn.functional.cross_entropy(out, target)
    )
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(3):
        ids = torch.randint(VOCABULARY, (16,), generator=data)
        out = model(**model.local_batch({"input": ids, "target": ids}))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.detach())
    return losses, model.state_dict()


PLANS = {
    "dp, zero 3": {"dp": 2, "zero": 3},
    "tp, eager": {"tp": 2, "mode": "eager"},
    "dp x pp": {"dp": 2, "pp": 2},
    "tp x pp": {"tp": 2, "pp": 2, "num_microbatches": 2},
    "dp x tp x pp": {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "zero": 2},
}
MARKS = {"dp x tp x pp": pytest.mark.thorough}


@pytest.mark.parametrize("fields", [pytest.param(PLANS[name], id=name, marks=MARKS.get(name, ())) for name in PLANS])
def test_training_has_the_bits_of_processes(fields):
    plan = vescale.Plan(device="cpu", clip_grad_norm=0.5, **fields)
    expected = run_ranks(train, plan.world_size, plan, timeout=180)
    found = vescale.emulate(plan, train, plan)
    for rank in range(plan.world_size):
        assert all(map(torch.equal, found[rank][0], expected[rank][0]))
        assert found[rank][1].keys() == expected[rank][1].keys()
        assert all(torch.equal(found[rank][1][name], value) for name, value in expected[rank][1].items())


# ------------------------------------------------------------------------------------------------- one process


def own_state():
    """Return what belongs to the rank, before and after others have run."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    dist.barrier()
    return os.environ["RANK"], torch.rand(1).item(), random.random()


def test_a_rank_has_its_own_streams_and_environment():
    before = torch.get_rng_state(), random.getstate(), dict(os.environ)
    found = vescale.emulate(3, own_state)
    for rank, (name, torch_number, python_number) in enumerate(found):
        assert name == str(rank)
        assert torch_number == torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()
        assert python_number == random.Random(rank).random()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), dict(os.environ))
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------------------------- errors


def one_rank_stays_away():
    dist.init_process_group("gloo")
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def other_collectives():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2, 2))
    else:
        dist.broadcast(torch.ones(3), 0)


def a_bug():
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        raise KeyError("layer")
    dist.barrier()


def in_a_thread():
    dist.init_process_group("gloo")
    errors = []

    def reduce():
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=reduce, name="writer")
    thread.start()
    thread.join()
    return errors


def test_ranks_that_wait_for_each_other():
    with pytest.raises(RuntimeError) as found:
        vescale.emulate(3, one_rank_stays_away)
    assert str(found.value) == (
        "emulate: expected a rank that can go on, got all of them waiting for others:\n"
        "  rank 0: all-reduce (SUM) of (3,) float32, number 1 of ranks [0, 1, 2], without ranks [1]\n"
        "  rank 1: has ended\n"
        "  rank 2: all-reduce (SUM) of (3,) float32, number 1 of ranks [0, 1, 2], without ranks [1]"
    )


def test_ranks_in_different_collectives():
    with pytest.raises(RuntimeError, match="expected one collective number 1 of all ranks") as found:
        vescale.emulate(2, other_collectives)
    assert "rank 0 calls broadcast of (3,) float32 from rank 0, rank 1 calls all-reduce (SUM) of (2, 2) float32" in str(
        found.value
    )
    assert found.value.__notes__ == ["on emulated rank 1"]


def test_an_error_names_its_rank():
    with pytest.raises(KeyError, match="layer") as found:
        vescale.emulate(3, a_bug)
    assert found.value.__notes__ == ["on emulated rank 2"]
    assert vescale.emulate(2, own_state)[1][0] == "1"  # the next run is not disturbed


def test_a_thread_of_a_rank_does_not_communicate():
    ((text,),) = vescale.emulate(1, in_a_thread)
    assert "expected a collective in the thread of an emulated rank, got one in the thread 'writer'" in text


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (0, ValueError, "emulate: expected a plan of 1 to 4096 ranks, got 0"),
        (10**9, ValueError, "emulate: expected a plan of 1 to 4096 ranks, got 1000000000"),
        ("two", TypeError, "emulate: expected a Plan or a number of ranks for plan, got 'two'"),
        (vescale.Plan(device="cuda"), ValueError, "emulate: expected a plan for the device 'cpu', got 'cuda'"),
    ],
)
def test_what_cannot_be_emulated(plan, error, text):
    with pytest.raises(error, match=text):
        vescale.emulate(plan, own_state)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="emulate: expected a training function for function, got NoneType; pass"):
        vescale.emulate(2, None)


def inside_a_group():
    with pytest.raises(RuntimeError, match="emulate: expected a process without a process group, got one with it"):
        vescale.emulate(2, own_state)


def test_ranks_within_a_rank():
    with pytest.raises(RuntimeError, match="emulate: expected a call outside of emulated ranks, got one on a rank"):
        vescale.emulate(2, vescale.emulate, 2, own_state)


def test_a_process_with_a_group():
    run_ranks(inside_a_group, 1)
