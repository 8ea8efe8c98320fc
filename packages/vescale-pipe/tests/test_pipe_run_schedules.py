"""Every schedule trains as one process, bit for bit: several stages per rank, weight gradients apart, skips."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.utils.checkpoint import checkpoint

from vescale.pipe import Costs, PipelineEngine, PipelinePlan, Schedule, from_csv, search_schedule
from vescale.pipe._run import backward
from vescale_testing import halved, ranks

ONE = ["1f1b", "gpipe", "zb_h1", "zb_h2"]
LOOPED = ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"]
V_SHAPED = ["zb_v", "dual_pipe_v"]
TORCHS = ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]


class Doubled(torch.autograd.Function):
    """An operator whose backward is Python, and computes the gradients of its input and its weight together."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (2 * gradient * x).sum(0)


class Block(nn.Module):
    """What a graph may have: a weight used twice, one behind a transformation, one of Python, in-place operators."""

    def __init__(self, number, width=6):
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.scale, self.unused = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = self.norm(x)
        h = torch.tanh(self.up(h)) + self.up(h * 0.5)
        h = nn.functional.linear(h, self.down.weight * self.scale).relu_()
        return Doubled.apply(h, self.scale) if self.number % 2 else h


class Net(nn.Module):
    """Residual blocks, with values of early stages that many later blocks use, as an encoder's output is used."""

    def __init__(self, num_blocks=8):
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(map(Block, range(num_blocks)))
        self.head = nn.Linear(6, 2)

    def forward(self, x, target):
        x = self.embed(x)
        early = [x, x * 0.5]
        for number, block in enumerate(self.blocks):
            x = x + block(x + early[number % 2] if number > 1 else x)
            if number == 1:
                early[1] = x
        return (self.head(x) - target).square().mean()


class Checkpointed(Net):
    def forward(self, x, target):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if number % 2 else block(x))
        return (self.head(x) - target).square().mean()


def build(kind=Net):
    torch.manual_seed(0)
    return kind()


def data(rows):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, width, generator=generator) for name, width in (("x", 3), ("target", 2))}


def loss_of(model, **batch):
    return model(**batch)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def check_training(plan, helpers, kind=Net, steps=3):
    """Return what differs after some steps of this rank's part of the model from those of one process."""
    train_one_process, pipeline_mesh, differences = helpers
    batch = data(2 * plan.num_microbatches)
    expected = train_one_process(build(kind), loss_of, batch, plan.num_microbatches, steps=steps, make_optimizer=adam)
    model = build(kind)
    engine = PipelineEngine(model, pipeline_mesh(), plan)
    optimizer = adam(list(model.parameters()))
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = engine(**batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                engine(**batch)
    same = [bool(torch.equal(p, expected.parameters[name])) for name, p in model.named_parameters()]
    return differences(model, expected), all(same) and all(map(torch.equal, losses, expected.losses))


def check_equal(plan, helpers, kind=Net):
    found, is_same = check_training(plan, helpers, kind)
    assert found == {}
    assert is_same


@pytest.fixture
def helpers(train_one_process, pipeline_mesh, differences):
    return train_one_process, pipeline_mesh, differences


WORLDS = [(1, 3), (2, 5), (3, 1), (4, 2)]  # ranks and micro-batches


@halved
@pytest.mark.parametrize("schedule", ONE + LOOPED + V_SHAPED)
@pytest.mark.parametrize("world", WORLDS)
def test_named_schedules(schedule, world, helpers):
    num_ranks, num_microbatches = world
    ranks(num_ranks)(check_equal)(PipelinePlan(schedule, num_microbatches), helpers)


LOOPS = [(1, 4), (2, 1), (2, 3), (2, 4)]  # ranks and stages per rank


@halved
@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("loop", LOOPS)
def test_stages_per_rank(schedule, loop, helpers):
    num_ranks, stages_per_rank = loop
    plan = PipelinePlan(schedule, 4, stages_per_rank=stages_per_rank)
    ranks(num_ranks)(check_equal)(plan, helpers)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "interleaved_1f1b"])
@ranks(2)
def test_checkpointed_blocks(schedule, helpers):
    check_equal(PipelinePlan(schedule, 4), helpers, Checkpointed)


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]
)
@ranks(2)
def test_schedules_of_torch(name, helpers, tmp_path):
    rows = get_schedule_ops(name, 2, 4, num_stages_per_rank=2, with_comms=False)
    lines = [",".join("" if action is None else str(action) for action in row) for row in rows]
    path = tmp_path / f"of_rank_{dist.get_rank()}.csv"
    path.write_text("\n".join(lines))
    check_equal(PipelinePlan(from_csv(path), 4), helpers)


@ranks(3)
def test_a_schedule_that_was_searched(helpers):
    schedule = search_schedule(3, 5, costs=Costs(1, 1.3, 0.7), stages_per_rank=2, effort=2000)
    check_equal(PipelinePlan(schedule, 5), helpers)


@ranks(2)
def test_a_schedule_that_the_engine_searches(helpers):
    costs = Costs([1, 1, 1, 2], 1.3, 0.7)
    check_equal(PipelinePlan("auto", 3, stages_per_rank=2, placement="V", costs=costs, activations=2), helpers)


@ranks(2)
def test_any_valid_order_and_placement(helpers):
    """Stages 0 and 1 on one rank, their weight gradients in another order than that of the micro-batches."""
    text = "0F0 1F0 0F1 1F1 1I1 0B1 1I0 0B0 1W1 1W0\n2F0 2F1 2I1 2I0 2W1 2W0"
    check_equal(PipelinePlan(Schedule.parse(text), 2), helpers)


@ranks(2)
def test_gradients_in_another_order_of_microbatches_differ(helpers, monkeypatch):
    """The sibling that breaks it: each sum takes the micro-batches as their weight gradients come."""
    monkeypatch.setattr(backward._StageSum, "add", lambda self, _microbatch, gradients: self._add(gradients))
    text = "0F0 0F1 0F2 0I2 0I1 0I0 0W2 0W0 0W1\n1F0 1F1 1F2 1I2 1I1 1I0 1W2 1W0 1W1"
    found, _ = check_training(PipelinePlan(Schedule.parse(text), 3), helpers, steps=1)
    assert found
    assert max(found.values()) < 1e-5


@ranks(2)
def test_a_lost_gradient_of_a_weight_differs(helpers, monkeypatch):
    """The sibling that breaks it: W does not run the nodes that I ran."""
    stock = backward._Cut.__init__

    def losing(self, *arguments):
        stock(self, *arguments)
        self.exits = {}

    monkeypatch.setattr(backward._Cut, "__init__", losing)
    found, _ = check_training(PipelinePlan("zb_h1", 2), helpers, steps=1)
    assert bool(found) == (dist.get_rank() == 1)  # stage 0 computes no gradients of inputs


def _triple(_module, _args, out):
    if out.requires_grad:
        out.register_hook(lambda gradient: 3 * gradient)


@ranks(2)
def test_hooks_on_tensors_run_once(helpers):
    """A hook runs in I alone, where W computes nothing."""

    class Hooked(Net):
        def __init__(self):
            super().__init__()
            self.blocks[2].norm.register_forward_hook(_triple)
            self.blocks[6].up.weight.register_hook(lambda gradient: gradient.clamp(max=1e-3))

    check_equal(PipelinePlan("zb_v", 3), helpers, Hooked)


@ranks(2)
def test_hooks_on_tensors_that_come_later(helpers):
    """The stage was recorded without; a hook that ran in W with effect would triple a gradient twice."""
    train_one_process, pipeline_mesh, differences = helpers
    batch = data(6)
    model, one = build(), build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("zb_h1", 3))
    engine(**batch)
    for block in (*model.blocks, *one.blocks):
        if isinstance(block, Block):
            block.norm.register_forward_hook(_triple)
    expected = train_one_process(one, loss_of, batch, 3)
    assert differences(build(), expected)
    engine(**batch).backward()
    assert differences(model, expected) == {}
