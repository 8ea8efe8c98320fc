"""Random operators on stages and in micro-batches draw what one process draws for the whole batch, bit for bit."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale.dtensor import init_device_mesh, random
from vescale.optim import DDP, DistributedOptimizer
from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan, Schedule
from vescale.pipe._run import draws, rows
from vescale_testing import halved, ranks

WIDTH, ROWS, STEPS = 6, 8, 3
SCHEDULES = ["1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v", "dual_pipe_v"]


class Block(nn.Module):
    """A block whose draws are of several kinds and sizes."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear, self.dropout = number, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1 + 0.1 * number)

    def forward(self, x):
        x = torch.tanh(self.linear(self.dropout(x)))
        return x + 0.1 * torch.randn_like(x) if self.number % 3 == 1 else x


class Net(nn.Module):
    """Blocks that draw, with draws before, between and after them."""

    def __init__(self, *, recomputes=False, outside=True):
        super().__init__()
        self.recomputes, self.outside = recomputes, outside
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(map(Block, range(8)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, target):
        if self.outside:
            x = F.dropout(x, 0.2)
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes and number % 2 else block(x))
            if self.outside and number == 3:
                x = F.dropout(x, 0.3)
        loss = (self.head(x) - target).square().mean()
        return loss + 0 * torch.rand(len(target)).sum() if self.outside else loss


def build(dtype=torch.float32, *, num_rows=ROWS, **options):
    torch.manual_seed(0)
    model = Net(**options).to(dtype)
    return model, {"x": torch.randn(num_rows, 3, dtype=dtype), "target": torch.randn(num_rows, 2, dtype=dtype)}


def one_process(model, batch, count, *, whole=False, per_microbatch=False):
    """Return the losses of some steps in one process: of the whole batch, or of a loop over parts of it."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if whole:
            total = model(**batch)
            total.backward()
        else:
            total = 0
            with random.micro_batches(1 if per_microbatch else count) as part:
                for m in range(count):
                    with part(0 if per_microbatch else m):
                        loss = model(**{name: value.tensor_split(count)[m] for name, value in batch.items()}) / count
                        loss.backward()
                    total = total + loss.detach()
        losses.append(total.detach())
        optimizer.step()
    return losses


def pipeline(model, batch, plan, **options):
    """Return the losses of some steps on the stages of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    engine = PipelineEngine(model, mesh["pp"], plan, **options)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = engine(**batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses


def check_equal(plan, *, stream="torch", per_microbatch=False, **options):
    model, batch = build(**options)
    reference = copy.deepcopy(model)
    with random.stream(stream, seed=5):
        expected = one_process(reference, batch, plan.num_microbatches, per_microbatch=per_microbatch)
        following = torch.rand(3)
    with random.stream(stream, seed=5):
        losses = pipeline(model, batch, plan, per_microbatch=per_microbatch)
        assert torch.equal(torch.rand(3), following)
    assert all(map(torch.equal, losses, expected)), (losses, expected)
    parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


@halved
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 4), (4, 2)])
def test_schedules(schedule, num_ranks, num_microbatches):
    ranks(num_ranks)(check_equal)(PipelinePlan(schedule, num_microbatches))


@halved
@pytest.mark.parametrize("per_microbatch", [False, True])
@pytest.mark.parametrize("stream", ["torch", "philox"])
@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 4), (2, 1), (3, 4)])
def test_streams(num_ranks, num_microbatches, stream, per_microbatch):
    plan = PipelinePlan("1f1b", num_microbatches)
    ranks(num_ranks)(check_equal)(plan, stream=stream, per_microbatch=per_microbatch)


@halved
@pytest.mark.parametrize("stream", ["torch", "philox"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
@ranks(2)
def test_checkpointed_blocks(schedule, stream):
    check_equal(PipelinePlan(schedule, 4), stream=stream, recomputes=True)


@pytest.mark.parametrize("stream", ["torch", "philox"])
@ranks(2)
def test_micro_batches_of_other_sizes_and_of_their_own(stream):
    check_equal(PipelinePlan("zb_h1", 3), stream=stream, per_microbatch=True, num_rows=10)


@ranks(2)
def test_any_order_of_the_actions():
    text = "0F0 1F0 0F1 1F1 1I1 0B1 1I0 0B0 1W1 1W0\n2F0 2F1 2I1 2I0 2W1 2W0"
    check_equal(PipelinePlan(Schedule.parse(text), 2))


@halved
@pytest.mark.parametrize("stream", ["torch", "philox"])
@pytest.mark.parametrize(
    "num_ranks, schedule, num_rows", [(1, "1f1b", 8), (1, "1f1b", 7), (2, "zb_v", 10), (3, "1f1b", 9)]
)
def test_the_whole_batch(num_ranks, schedule, num_rows, stream):
    """The values are those of one forward over the batch, up to the order of additions, for any number of rows."""

    @ranks(num_ranks)
    def check():
        model, batch = build(torch.float64, num_rows=num_rows)
        reference = copy.deepcopy(model)
        with random.stream(stream, seed=5):
            expected = one_process(reference, batch, 4, whole=True)
            following = torch.rand(3)
        with random.stream(stream, seed=5):
            losses = pipeline(model, batch, PipelinePlan(schedule, 4))
            assert torch.equal(torch.rand(3), following)
        for loss, other in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss, other, rtol=1e-10, atol=0)
        parameters = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-9, atol=1e-12)

    check()


@halved
@pytest.mark.parametrize("stream", ["torch", "philox"])
@pytest.mark.parametrize("schedule, num_rows", [("1f1b", 8), ("zb_h1", 8), ("zb_h1", 14)])
@ranks(4)
def test_data_parallel_ranks(schedule, num_rows, stream):
    """Ranks draw their rows of every micro-batch, although modules that do not draw run unwatched."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, batch = build(torch.float64, num_rows=num_rows)
    reference = copy.deepcopy(model)
    with random.stream(stream, seed=5):
        expected = one_process(reference, batch, 1, whole=True)
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan(schedule, 2))
    ddp = DDP(model, mesh["dp"])
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=ddp, lr=0.1)
    mine = {name: value.chunk(2)[mesh["dp"].get_local_rank()] for name, value in batch.items()}
    with random.stream(stream, seed=5):
        for loss in expected:
            found = engine(**mine)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = found.detach().clone()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            torch.testing.assert_close(total / 2, loss, rtol=1e-10, atol=0)


@pytest.mark.parametrize("broken", ["skips", "parts"])
@ranks(2)
def test_other_draws_are_found(broken, monkeypatch):
    """Stages that do not skip, or micro-batches that all draw the same rows, differ."""
    if broken == "skips":
        monkeypatch.setattr(draws.Course, "skip", lambda *_: None)
        monkeypatch.setattr(draws.Course, "begin", lambda *_: None)
        monkeypatch.setattr(draws.Course, "end", lambda *_: None)
    else:
        kind = draws._package()
        part = kind.part
        monkeypatch.setattr(kind, "part", staticmethod(lambda _, *others: part(0, *others)))
    with pytest.raises((AssertionError, RuntimeError)):
        check_equal(PipelinePlan("1f1b", 2))


@ranks(2)
def test_states_that_differ_are_refused():
    model, batch = build()
    torch.manual_seed(dist.get_rank())
    with pytest.raises(PipelineError, match="expected the same state of the random generators on every stage"):
        pipeline(model, batch, PipelinePlan("1f1b", 2))


class DropsSomeSizes(nn.Linear):
    """A layer that drops values if it gets some number of rows."""

    def __init__(self, sizes):
        super().__init__(WIDTH, WIDTH)
        self.sizes = sizes

    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, training=len(x) in self.sizes))


def square(x):
    return x.square().mean()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_draws_of_some_sizes_alone_are_refused(num_ranks, monkeypatch):
    """One process draws for the whole batch, or it does not.

    A rehearsal, which has other numbers of rows, is left out.
    """
    place = "its forward" if num_ranks == 1 else "micro-batches of other sizes"
    monkeypatch.setattr(rows, "_rehearsal_type", lambda: None)

    @ranks(num_ranks)
    def check():
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",))
        model = nn.Sequential(DropsSomeSizes({4}), DropsSomeSizes({4}))
        engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2), loss_fn=square)
        with pytest.raises(PipelineError, match=f"more, fewer or others in {place}"):
            engine(torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(0)))

    check()


@ranks(2)
def test_draws_of_a_size_that_did_not_draw_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = nn.Sequential(DropsSomeSizes({4}), DropsSomeSizes({4}))
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2), loss_fn=square, per_microbatch=True)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(0))
    engine(x).backward()
    if isinstance(last := model[1], DropsSomeSizes):
        last.sizes.add(3)
        with pytest.raises(PipelineError, match="more, fewer or others in a micro-batch"):
            engine(x)
    else:
        with pytest.raises(RuntimeError, match="rank 1: PipelineError in 1F1"):
            engine(x)


@ranks(1)
def test_a_rate_that_changes_is_refused():
    model, batch = build(outside=False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, Block):
            module.number = 0
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2))
    engine(**batch).backward()
    model.blocks[2].dropout.p = 0.5
    with pytest.raises(PipelineError, match="expected the random numbers to be drawn as in the first micro-batch"):
        engine(**batch)
