"""Ctrl-C ends a step on every rank within seconds, be it pressed at one rank or at all of them."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale.pipe._lost_ranks import Failures
from vescale_testing import RankFailure, ranks, run_ranks


class Block(nn.Module):
    """A layer that interrupts its process in one of its calls, or in the backward of it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.interrupt_at, self.in_backward = nn.Linear(4, 4), 0, None, False

    def forward(self, x):
        self.calls += 1
        out = self.linear(x)
        if self.calls == self.interrupt_at and self.in_backward:
            out.register_hook(interrupt)
        elif self.calls == self.interrupt_at:
            interrupt()
        return out


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python raises when its own code runs next


def steps(mesh_of, plan, prepare, *, is_in_step=True):
    """Run steps until one is interrupted; raise an error that says what it was, and after how long."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    blocks = [Block() for _ in range(plan.actions(dist.get_world_size()).num_stages)]
    engine = PipelineEngine(nn.Sequential(*blocks), mesh_of(), plan, loss_fn=torch.mean)
    prepare(blocks)
    began = 0.0
    try:
        for _ in range(100_000):
            began = time.monotonic()
            engine(torch.ones(8, 4)).backward()
    except BaseException as error:
        seconds = time.monotonic() - began
        if is_in_step:
            with pytest.raises(RuntimeError, match="expected an engine without failed steps, got a call after "):
                engine(torch.ones(8, 4))
        raise RuntimeError(f"after {seconds} s: {type(error).__name__}: {error}") from None


def at_one_stage(mesh_of, plan, stage, call, in_backward):
    def prepare(blocks):
        blocks[stage].interrupt_at, blocks[stage].in_backward = call, in_backward

    steps(mesh_of, plan, prepare)


def at_all_ranks(mesh_of, plan):
    def prepare(_blocks):
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    steps(mesh_of, plan, prepare, is_in_step=False)  # it may come between two steps


def at_a_waiting_rank(mesh_of, plan, last):
    """The last stage sleeps, so that the others wait for it when rank 0 is interrupted."""

    def prepare(blocks):
        blocks[last].linear.register_forward_hook(lambda *_: time.sleep(10) if blocks[last].calls == 6 else None)
        if dist.get_rank() == 0:
            threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    steps(mesh_of, plan, prepare)


def at_a_rank_that_comes_early(mesh_of, plan):
    """The last rank makes no second step, so that the others wait for it before theirs begins."""

    def prepare(_blocks):
        if dist.get_rank() == 0:
            threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        if dist.get_rank() == dist.get_world_size() - 1:
            stock = PipelineEngine.__call__
            PipelineEngine.__call__ = lambda *args, **kwargs: (stock(*args, **kwargs), time.sleep(10))[0]

    steps(mesh_of, plan, prepare)


def errors_of(function, world_size, *args):
    with pytest.raises(RankFailure) as failure:
        run_ranks(function, world_size, *args, timeout=60)
    errors = {rank: str(error) for rank, error in failure.value.exceptions.items()}
    assert set(errors) == set(range(world_size)), failure.value
    found = {}
    for rank, text in errors.items():
        seconds, found[rank] = re.match(r"after (\S+) s: (.*)", text, re.DOTALL).groups()
        assert float(seconds) < 5, text
    return found


@pytest.mark.parametrize(
    ("world_size", "plan", "stage", "rank", "call", "in_backward"),
    [
        (2, PipelinePlan("1f1b", 4), 0, 0, 1, False),  # the first call of the model
        (2, PipelinePlan("1f1b", 4), 1, 1, 6, False),
        (2, PipelinePlan("interleaved_1f1b", 4, stages_per_rank=2), 2, 0, 1, True),
        (2, PipelinePlan("interleaved_1f1b", 4, stages_per_rank=2), 2, 0, 6, False),
        (3, PipelinePlan("zb_h1", 4), 1, 1, 6, True),
    ],
)
def test_at_one_rank(pipeline_mesh, world_size, plan, stage, rank, call, in_backward):
    """The others name the rank, what it did, and the line of code."""
    errors = errors_of(at_one_stage, world_size, pipeline_mesh, plan, stage, call, in_backward)
    where = "the first micro-batch" if call == 1 else f"{stage}{'[BI]' if in_backward else 'F'}1"
    for other, error in errors.items():
        if other == rank:
            assert error.startswith("KeyboardInterrupt")
        else:
            expected = rf"rank {rank}: KeyboardInterrupt in {where} in step {1 + (call > 4)}\n(.|\n)*in interrupt\n"
            assert re.search(expected, error), error


@pytest.mark.parametrize("plan", [PipelinePlan("1f1b", 4), PipelinePlan("zb_v", 4)])
def test_at_all_ranks(pipeline_mesh, plan):
    """As a terminal sends it to all processes of torchrun."""
    errors = errors_of(at_all_ranks, 2, pipeline_mesh, plan)
    assert any(error.startswith("KeyboardInterrupt") for error in errors.values())
    assert all(re.match("KeyboardInterrupt|RuntimeError: .*KeyboardInterrupt", e, re.DOTALL) for e in errors.values())


@pytest.mark.parametrize("where", ["in a step", "before a step"])
def test_at_a_rank_that_waits(pipeline_mesh, monkeypatch, where):
    """It does not wait on, and neither do others that wait."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 1.0)  # less than the 3 s after which ranks are ended
    function, more = (at_a_waiting_rank, [2]) if where == "in a step" else (at_a_rank_that_comes_early, [])
    with pytest.raises(RankFailure) as failure:
        run_ranks(function, 3, pipeline_mesh, PipelinePlan("1f1b", 4), *more, timeout=60)
    errors = {rank: str(error) for rank, error in failure.value.exceptions.items()}
    assert set(errors) == {0, 1}, failure.value  # code of the user is not interrupted
    assert all(float(re.match(r"after (\S+) s: ", text)[1]) < 3 + 5 for text in errors.values()), errors
    assert "s: KeyboardInterrupt" in errors[0]
    assert "rank 0: KeyboardInterrupt in " in errors[1], errors[1]


@ranks(2)
def test_a_handler_of_the_user_does_not_end_the_step(pipeline_mesh):
    """As one that asks the loop to stop after the step."""
    noticed = []
    signal.signal(signal.SIGINT, lambda *_: noticed.append("asked to stop"))
    blocks = [Block(), Block()]
    engine = PipelineEngine(nn.Sequential(*blocks), pipeline_mesh(), PipelinePlan("1f1b", 4), loss_fn=torch.mean)
    expected = engine(torch.ones(8, 4))
    blocks[1].linear.register_forward_hook(lambda *_: time.sleep(2) if blocks[1].calls == 6 else None)
    if dist.get_rank() == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert torch.equal(engine(torch.ones(8, 4)), expected)
    assert len(noticed) == (dist.get_rank() == 0)
    assert signal.set_wakeup_fd(-1) == -1
