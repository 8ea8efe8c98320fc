"""How a failure on any rank is reported: whose it is, its traceback, and where the other ranks were."""

import os
import re
import signal
import sys

import pytest
import torch.distributed as dist

from vescale_testing import RankFailure, run_ranks


def failure_of(body, world_size=3, **options) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_ranks(body, world_size, **options)
    return caught.value


def section(failure: RankFailure, rank: int) -> str:
    """Return what the message says about one rank."""
    return re.split(r"^\[rank \d+\] ", str(failure), flags=re.MULTILINE)[1:][
        [int(r) for r in re.findall(r"^\[rank (\d+)\] ", str(failure), flags=re.MULTILINE)].index(rank)
    ]


def test_a_failing_assertion_names_its_rank_and_shows_its_message():
    def body():
        assert dist.get_rank() != 2, "rank two is wrong"

    failure = failure_of(body)
    assert str(failure).startswith("rank 2: AssertionError: rank two is wrong (1 of 3 ranks failed)\n[rank 2] raised\n")
    assert "in body" in section(failure, 2)
    assert "_rank.py" not in str(failure)
    assert section(failure, 0) == "finished\n"


def test_a_body_that_does_not_fail_reports_nothing():
    assert run_ranks(lambda: None, 3) == [None] * 3


def test_a_failure_is_an_assertion_error_and_carries_what_was_raised():
    def body():
        raise KeyError(dist.get_rank())

    failure = failure_of(body, 2)
    assert isinstance(failure, AssertionError)
    assert {rank: error.args for rank, error in failure.exceptions.items()} == {0: (0,), 1: (1,)}
    assert all(type(error) is KeyError for error in failure.exceptions.values())


def test_the_first_failure_comes_first_and_its_peers_show_where_they_waited():
    def body():
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    failure = failure_of(body)
    assert str(failure).startswith("rank 1: ValueError: the cause (3 of 3 ranks failed)\n[rank 1] raised")
    for rank in (0, 2):
        assert "dist.barrier()" in section(failure, rank) or "the same as" in section(failure, rank)


def test_equal_failures_are_shown_once():
    def body():
        raise ValueError("everywhere")

    failure = failure_of(body, 4)
    assert str(failure).count("ValueError: everywhere") == 2  # the first line and one traceback
    assert len(re.findall(r"the same as rank \d", str(failure))) == 3


def test_every_rank_reports_its_own_failure_though_the_first_would_close_the_connections():
    def body():
        raise ValueError(f"number {dist.get_rank()}")

    failure = failure_of(body, 4)
    assert all(f"ValueError: number {rank}" in section(failure, rank) for rank in range(4))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_rank_killed_by_a_signal_is_reported(name):
    def body():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.Signals[name])
        dist.barrier()

    failure = failure_of(body, 2)
    assert f"rank 1: was ended by {name}" in str(failure)
    assert ("in body" in section(failure, 1)) == (name == "SIGSEGV")  # a crash leaves the stack of where it was


def test_a_rank_that_leaves_is_reported():
    def body():
        if dist.get_rank() == 0:
            os._exit(0)

    assert "[rank 0] left with exit status 0 before its body had ended" in str(failure_of(body, 2))


def test_sys_exit_is_a_failure():
    failure = failure_of(sys.exit, 2)
    assert "SystemExit" in str(failure)


def test_pytest_fail_is_a_failure():
    assert "no good" in str(failure_of(lambda: pytest.fail("no good"), 2))


def test_a_value_that_cannot_be_pickled_is_a_failure_that_says_so():
    failure = failure_of(lambda: lambda: None, 1)
    assert "the returned value cannot be pickled" in str(failure)


def test_an_exception_that_cannot_be_pickled_still_shows_its_traceback():
    class DemandingError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    def body():
        raise DemandingError(1, 2)

    failure = failure_of(body, 1)
    assert "DemandingError: 1 2" in str(failure)
    assert "in body" in str(failure)
    assert failure.exceptions == {}


@pytest.mark.parametrize("outcome", ["skip", "xfail"])
def test_ranks_that_do_not_skip_together_fail(outcome):
    def body():
        if dist.get_rank() == 1:
            getattr(pytest, outcome)("only here")

    past = {"skip": "skipped", "xfail": "xfailed"}[outcome]
    text = rf"\[rank 1\] {past} \(only here\), but another rank did not: let all ranks take the same decision"
    assert re.search(text, str(failure_of(body, 2)))
