"""On the fake process group one process runs the part of any rank of a pipeline, without the others."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import RankFailure, halved, run_ranks

WORDS, WIDTH, LENGTH, ROWS = 11, 6, 5, 8
SPLIT = ("blocks.1", "blocks.2", "blocks.3")
PLANS = [PipelinePlan("1f1b", 4), PipelinePlan("interleaved_1f1b", 4, stages_per_rank=2), PipelinePlan("zb_v", 4)]


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width), persistent=False)

    def forward(self, x, first):
        return first + torch.tanh(self.linear(x)) * self.scale


class Tied(nn.Module):
    """Blocks that all get the first one's output, with a head that has the embedding's weight."""

    def __init__(self, blocks=8, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, target):
        first = x = self.dropout(self.embed(tokens).to(self.head.weight.dtype))
        for block in self.blocks:
            x = block(x, first)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Repeats(nn.Module):
    """How often its code runs depends on the data."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for _ in range(1 + int(x[0, 0] > 0)):
            x = x * self.weight
        return x


def batch(device="cpu"):
    torch.manual_seed(2)
    tokens = torch.randint(WORDS, (2, ROWS, LENGTH)).to(device)
    return {"tokens": tokens[0], "target": tokens[1]}


def step_of(plan, mesh, *, device="cpu"):
    """Return what a rank has after a step: what crosses stages, the loss, and the gradients."""
    torch.manual_seed(1)
    with torch.device(device):
        model = Tied().double()
    engine = PipelineEngine(model, mesh, plan, per_microbatch=True)
    loss = engine(**batch(device))
    loss.backward()
    grads = {name: (p.grad.shape, p.grad.dtype) for name, p in model.named_parameters() if p.grad is not None}
    return engine.transfers, (loss.shape, loss.dtype), grads


def pipeline(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",))


def dry(rank, num_ranks, function):
    """Return what a function returns on a rank of a world that does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        return function(pipeline(num_ranks))
    finally:
        dist.destroy_process_group()


def alone(function):
    """Return what a function returns in a process of its own."""
    (result,) = run_ranks(function, 1, backend=None)
    return result


@halved
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
def test_each_rank_has_what_it_has_in_the_real_pipeline(plan, device):
    expected = run_ranks(lambda: step_of(plan, pipeline(4)), 4)
    step = functools.partial(step_of, plan, device=device)
    assert alone(lambda: [dry(rank, 4, step) for rank in range(4)]) == expected


def test_another_split_is_seen():
    steps = [functools.partial(step_of, plan) for plan in (PLANS[0], dataclasses.replace(PLANS[0], split=SPLIT))]
    first, other = alone(lambda: [dry(1, 4, step) for step in steps])
    assert first != other


def test_the_copy_of_the_model_draws_nothing():
    def state_after(mesh):
        step_of(PLANS[0], mesh)
        return torch.get_rng_state()

    def only_this_ranks_draws(mesh):
        torch.manual_seed(1)
        model = Tied().double()
        PipelineEngine(model, mesh, PLANS[0], per_microbatch=True)
        batch()
        return torch.get_rng_state()

    last, expected = alone(lambda: [dry(3, 4, state_after), dry(3, 4, only_this_ranks_draws)])
    assert torch.equal(last, expected)


def test_a_model_larger_than_any_machine():
    """Rank 20 of 64, with 4 of 256 blocks, and no data: 60 GB of parameters."""

    def step(mesh):
        with torch.device("meta"):
            model = Tied(blocks=256, width=8192)
        starts = [f"blocks.{4 * rank}" for rank in range(1, 64)]
        engine = PipelineEngine(model, mesh, PipelinePlan("1f1b", 128, split=starts))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.empty(128, 4, dtype=torch.long, device="meta")
        engine(tokens, target=tokens).backward()
        optimizer.step()
        return {name: p.grad.shape == p.shape for name, p in model.named_parameters()}

    own = [f"blocks.{block}.linear.{name}" for block in range(80, 84) for name in ("weight", "bias")]
    assert alone(lambda: dry(20, 64, step)) == dict.fromkeys(own, True)


def test_the_rows_of_all_micro_batches():
    def rows(mesh):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        return PipelineEngine(model, mesh, PipelinePlan(num_microbatches=2)).outputs(torch.ones(ROWS, WIDTH)).shape

    assert alone(lambda: dry(0, 4, rows)) == (ROWS, WIDTH)


def test_code_that_depends_on_the_data_needs_data():
    def loss(mesh, device):
        with torch.device(device):
            model = nn.Sequential(*(Repeats() for _ in range(4)))
        engine = PipelineEngine(model, mesh, PipelinePlan(num_microbatches=2), loss_fn=torch.mean)
        return engine(torch.ones(ROWS, WIDTH, device=device))

    assert alone(lambda: dry(0, 4, functools.partial(loss, device="cpu"))).shape == ()
    with pytest.raises(RankFailure, match=r"dry run: expected a model that runs without data, .*to_empty"):
        alone(lambda: dry(0, 4, functools.partial(loss, device="meta")))


def test_a_model_that_has_changed_is_refused():
    def step(mesh):
        model = Tied()
        engine = PipelineEngine(model, mesh, PLANS[0])
        model.double()
        engine(**batch())

    error = r"dry run: expected parameter `blocks.2.linear.weight` as it was .*float32, got torch.float64; make the eng"
    with pytest.raises(RankFailure, match=error):
        alone(lambda: dry(1, 4, step))


def test_times_are_refused():
    def measure(mesh):
        with PipelineEngine(Tied(), mesh, PLANS[0]).timing():
            pass

    with pytest.raises(RankFailure, match=r"expected ranks that run, got a dry run on the fake process group"):
        alone(lambda: dry(1, 4, measure))
