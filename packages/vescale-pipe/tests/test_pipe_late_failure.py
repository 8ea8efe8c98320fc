"""An error of one stage at a late micro-batch is raised on all ranks, soon, with its stage, action and traceback."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import RankFailure, halved, run_ranks


class Block(nn.Module):
    """A layer that raises in one of its calls, or in the backward of it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.fail_at, self.in_backward = nn.Linear(4, 4), 0, None, False

    def forward(self, x):
        self.calls += 1
        if self.calls != self.fail_at:
            return self.linear(x)
        if not self.in_backward:
            no_more_numbers()
        out = self.linear(x)
        out.register_hook(no_more_numbers)
        return out


def no_more_numbers(*_):
    raise ArithmeticError("no more numbers")


def train(mesh_of, plan, stage, in_backward):
    num_stages = dist.get_world_size() * (plan.stages_per_rank or 1)
    blocks = [Block() for _ in range(num_stages)]
    blocks[stage].fail_at, blocks[stage].in_backward = 6, in_backward  # the second micro-batch of the second step
    engine = PipelineEngine(nn.Sequential(*blocks), mesh_of(), plan, loss_fn=torch.mean)
    engine(torch.ones(8, 4)).backward()
    began = time.monotonic()
    try:
        engine(torch.ones(8, 4)).backward()
    except Exception as error:
        seconds = time.monotonic() - began
        with pytest.raises(RuntimeError, match="expected an engine without failed steps"):
            engine(torch.ones(8, 4))
        raise RuntimeError(f"after {seconds} s: {type(error).__name__}: {error}") from None


@halved
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("world_size", "plan", "stage", "rank"),
    [
        (2, PipelinePlan("1f1b", 4), 0, 0),
        (3, PipelinePlan("zb_h1", 4), 1, 1),
        (2, PipelinePlan("interleaved_1f1b", 4, stages_per_rank=2), 2, 0),
    ],
)
def test_all_ranks_raise_within_five_seconds(pipeline_mesh, world_size, plan, stage, rank, in_backward):
    with pytest.raises(RankFailure) as failure:
        run_ranks(train, world_size, pipeline_mesh, plan, stage, in_backward, timeout=60)
    errors = {r: str(error) for r, error in failure.value.exceptions.items()}
    assert set(errors) == set(range(world_size)), failure.value
    kind = "F" if not in_backward else "[BI]"
    for r, text in errors.items():
        seconds, what = re.match(r"after (\S+) s: (.*)", text, re.DOTALL).groups()
        assert float(seconds) < 5
        if r == rank:
            assert what.startswith("ArithmeticError: no more numbers")
        else:
            found = rf"rank {rank}: ArithmeticError in {stage}{kind}1 in step 2\n(.|\n)*in no_more_numbers\n"
            assert re.search(found, what), what
