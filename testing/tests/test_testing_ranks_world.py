"""The world of a body under `ranks`: real processes, equal seeds, one thread, the caller's fixtures and closures."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from vescale_testing import ranks, run_ranks


@ranks(3)
def test_ranks_can_communicate():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    assert x.item() == 3.0
    assert dist.get_world_size() == 3
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(dist.get_rank()), "3")


@ranks(1)
def test_a_world_of_one_is_a_world():
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1.0, 1.0]


@pytest.fixture
def words():
    return ["shared", lambda: "not picklable"]


@ranks(2)
@pytest.mark.parametrize("number", [1, 2])
def test_fixtures_and_parameters_reach_every_rank(words, number, tmp_path):
    (tmp_path / f"{dist.get_rank()}").write_text(f"{words[1]()} {number}")
    dist.barrier()
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [f"not picklable {number}"] * 2


class TestMethods:
    @ranks(2)
    def test_a_method_can_be_decorated(self):
        assert dist.get_world_size() == 2


@ranks(2)
def test_pytest_raises_works_inside():
    with pytest.raises(ValueError, match="expected"):
        raise ValueError("expected")


def test_values_come_back_in_the_order_of_ranks():
    def body(base, *, step):
        return {"rank": dist.get_rank(), "tensor": torch.full((2,), base + step * dist.get_rank())}

    values = run_ranks(body, 3, 10, step=2)
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert [value["tensor"].tolist() for value in values] == [[10, 10], [12, 12], [14, 14]]


def test_large_values_come_back_whole():
    values = run_ranks(lambda: torch.arange(1_000_000) + dist.get_rank(), 2)
    assert all(torch.equal(values[rank], torch.arange(1_000_000) + rank) for rank in range(2))


def test_every_rank_starts_from_seed_zero_and_leaves_the_caller_alone():
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    draws = run_ranks(lambda: (torch.rand(1).item(), random.random(), torch.get_num_threads()), 2)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert draws == [(expected, random.Random(0).random(), 1)] * 2
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not dist.is_initialized()


def test_a_rank_that_ends_early_stays_a_peer_until_all_have_ended():
    def body():
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
            return True
        time.sleep(0.3)
        dist.recv(x := torch.zeros(1), 0)
        return x.item() == 1.0

    assert run_ranks(body, 2, timeout=20) == [True, True]


def test_without_a_backend_there_are_only_processes():
    assert run_ranks(dist.is_initialized, 2, backend=None) == [False, False]


def test_output_is_labeled(capfd):
    def body():
        print(f"hello from {dist.get_rank()}\nand more")
        os.write(2, b"written by C\n")

    run_ranks(body, 2)
    lines = capfd.readouterr().out.splitlines()
    for rank in range(2):
        assert {f"[rank {rank}] {text}" for text in (f"hello from {rank}", "and more", "written by C")} <= {*lines}


def test_many_worlds_in_a_row_leave_no_files_open():
    run_ranks(lambda: None, 2)
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else None
    for _ in range(5):
        run_ranks(lambda: None, 2)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [0, -1, 2.0, None])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(number):
    with pytest.raises(
        ValueError, match=r"expected a positive integer as the number of ranks, got .*write @ranks\(2\)"
    ):
        ranks(number)
    with pytest.raises(ValueError, match="number of ranks"):
        run_ranks(print, number)


def test_the_decorator_without_parentheses_is_refused():
    with pytest.raises(ValueError, match=r"write @ranks\(2\)"):

        @ranks
        def body():
            pass
