"""Nothing hangs: a rank that does not end is killed in time, its stack is shown, and no process stays behind."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from vescale_testing import RankFailure, run_ranks


@contextmanager
def fails_within(seconds):
    """Expect a RankFailure in time, and no child left, not even a zombie."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        yield caught
    assert time.monotonic() - start < seconds
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_hang_is_killed_and_shows_the_stack_of_every_rank():
    def wait_for_ever():
        time.sleep(100)

    def body():
        wait_for_ever() if dist.get_rank() else dist.recv(__import__("torch").zeros(1), 1)

    with fails_within(15) as caught:
        run_ranks(body, 2, timeout=2)
    text = str(caught.value)
    assert text.startswith("rank 0: did not end within 2 s (2 of 2 ranks failed)")
    assert "[rank 0] did not end within 2 s and was killed here:" in text
    assert "in recv" in text
    assert "in wait_for_ever" in text
    assert "pytest" not in text  # frames outside of the body are left out


def test_a_body_that_is_quick_enough_is_not_killed():
    assert run_ranks(lambda: time.sleep(0.5), 2, timeout=20) == [None, None]


def test_ranks_that_ended_well_are_told_from_the_one_that_hangs():
    with fails_within(15) as caught:
        run_ranks(lambda: dist.get_rank() == 0 and dist.barrier(), 2, timeout=2)
    assert "[rank 1] finished" in str(caught.value)
    assert "in barrier" in str(caught.value)


def test_after_a_failure_the_others_get_a_short_grace_and_not_the_whole_time_out():
    def body():
        if dist.get_rank() == 0:
            raise ValueError("the cause")
        time.sleep(100)

    with fails_within(15) as caught:
        run_ranks(body, 2, timeout=60)
    text = str(caught.value)
    assert text.startswith("rank 0: ValueError: the cause")
    assert "[rank 1] did not end within 3 s after rank 0 had failed and was killed here:" in text
    assert "in body" in text


def test_all_threads_of_a_rank_are_shown():
    def helper():
        time.sleep(100)

    def body():
        threading.Thread(target=helper).start()
        time.sleep(100)

    with fails_within(15) as caught:
        run_ranks(body, 1, timeout=2)
    assert "in helper" in str(caught.value)
    assert "in body" in str(caught.value)


def test_a_rank_that_cannot_answer_is_killed_all_the_same():
    with fails_within(15) as caught:
        run_ranks(lambda: os.kill(os.getpid(), signal.SIGSTOP), 1, timeout=2)
    assert "was killed (it gave no stack)" in str(caught.value)


def test_a_thread_that_does_not_end_does_not_keep_its_rank():
    def body():
        threading.Thread(target=time.sleep, args=(100,)).start()

    start = time.monotonic()
    assert run_ranks(body, 2) == [None, None]
    assert time.monotonic() - start < 15


def test_an_interrupt_in_the_caller_ends_the_ranks():
    def interrupt():
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    # a program that a shell starts in the background ignores the signal
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(lambda: time.sleep(100), 2)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - start < 15
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
