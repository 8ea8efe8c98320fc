"""Gradients of a stage are reduced over data-parallel ranks while others work, with the bits of a late reduction."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from vescale import Plan
from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._gradients.reducer import Reducer
from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import assert_same_training, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one

ROWS, WIDTH, STEPS = 16, 6, 3


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH + k), nn.Tanh(), nn.Linear(WIDTH + k, WIDTH)) for k in range(4)]
    return nn.Sequential(*blocks).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).unbind()


def train_plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach() for fqn, p in model.named_parameters()}


def parallel(options, schedule, **more):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    module = build()
    plan = PipelinePlan(schedule, num_microbatches=4)
    engine = PipelineEngine(module, mesh["pp"], plan, loss_fn=nn.functional.mse_loss)
    model = DDP(module, mesh["dp"], bucket_bytes=256, **options, **more)
    return engine, model, mesh["dp"].get_local_rank()


def step_of(engine, coord, step):
    x, y = (each.chunk(2)[coord] for each in batch(step))
    return engine(x, target=y)


def train(options, schedule, is_late=False):
    if is_late:
        Reducer.begin = lambda *_: None
    engine, model, coord = parallel(options, schedule, reduction="ordered")
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    for step in range(STEPS):
        step_of(engine, coord, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded():
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


CASES = [
    ({"zero": 0}, "1f1b"),
    ({"zero": 1}, "zb_h1"),
    ({"zero": 2}, "interleaved_1f1b"),
    ({"zero": 3}, "zb_v"),
    ({"zero": 2, "overlap": False}, "gpipe"),
]


def test_every_schedule_and_stage_has_the_bits_of_a_late_reduction():
    plain = train_plain()
    late = {}
    for own in run_ranks(train, 4, {"zero": 0}, "1f1b", is_late=True):
        late |= own
    for fqn, expected in plain.items():
        torch.testing.assert_close(late[fqn], expected, rtol=1e-10, atol=1e-12)
    for options, schedule in CASES:
        for own in run_ranks(train, 4, options, schedule):
            for fqn, value in own.items():
                assert torch.equal(value, late[fqn]), (options, schedule, fqn)


# --- when ---


def order_of_events(schedule):
    """Return what a step runs and launches, in order: actions, and all-reduces over data-parallel ranks."""
    engine, _, coord = parallel({"zero": 2}, schedule)
    step_of(engine, coord, 0).backward()  # records
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = step_of(engine, coord, 1)
        with torch.profiler.record_function("backward"):
            loss.backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = {"c10d::allreduce_": "all-reduce", "backward": "backward"}
    return [
        names.get(event.name, event.name)
        for event in events
        if event.name in names or event.name.startswith("vescale.pipe/")
    ]


def test_buckets_leave_before_the_last_action():
    for events in run_ranks(order_of_events, 4, "interleaved_1f1b"):
        last = max(at for at, name in enumerate(events) if name.startswith("vescale.pipe/"))
        backward = events.index("backward")
        assert events[:last].count("all-reduce") >= 2
        assert events[last:backward].count("all-reduce") >= 2
        assert events[backward:].count("all-reduce") == 1  # of the parameters that were used


def test_nothing_is_left_for_one_stage_per_rank():
    for events in run_ranks(order_of_events, 4, "1f1b"):
        last = max(at for at, name in enumerate(events) if name.startswith("vescale.pipe/"))
        assert events[:last].count("all-reduce") == 0
        assert events[last : events.index("backward")].count("all-reduce") >= 4


# --- what users do ---


def uses(zero):
    """Compare a penalty, a scale, a hook on a weight, and gradients of two steps with one process."""
    engine, model, coord = parallel({"zero": zero}, "interleaved_1f1b")
    calls = []
    found = {}
    for use in ("scaled", "twice", "penalty", "hook"):
        if use == "hook":
            first = next(model.module.parameters())
            first.register_post_accumulate_grad_hook(lambda p: calls.append(tuple(p.shape)))
        loss = step_of(engine, coord, 0) * 3
        if use == "penalty":
            loss = loss + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        if use == "twice":
            step_of(engine, coord, 1).backward()
        found[use] = {fqn: _whole(model, fqn) for fqn, _ in model.named_parameters()}
        model.zero_grad()
    return found, calls


def _whole(model, fqn):
    """Return the reduced gradient of a parameter; with ZeRO 2 the ranks' parts are put together."""
    slot = model.slots()[fqn]
    if not slot.bucket.sharded:
        return slot.local_view.clone()
    flat = torch.zeros(slot.local_view.numel(), dtype=torch.float64)
    flat[slot.part[0] : slot.part[1]] = slot.grad_part
    dist.all_reduce(flat, group=model.mesh_axis.get_group())
    return flat.view(slot.local_view.shape)


def expected_uses():
    model = build()
    found = {}
    for use in ("scaled", "twice", "penalty", "hook"):
        losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(0), batch(1))]
        loss = losses[0] * 3 + (losses[1] if use == "twice" else 0)
        if use == "penalty":
            loss = loss + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        found[use] = {fqn: p.grad.clone() for fqn, p in model.named_parameters()}
        model.zero_grad()
    return found


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_are_those_of_one_process(zero):
    expected = expected_uses()
    for found, calls in run_ranks(uses, 4, zero):
        for use, gradients in found.items():
            for fqn, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[use][fqn], rtol=1e-10, atol=1e-12, msg=f"{use}: {fqn}")
        assert len(calls) == 1


PLAN = Plan(dp=2, pp=2, zero=2, num_microbatches=2)


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, schedule="interleaved_1f1b", zero=1)])
def test_a_weight_that_several_stages_use(plan):
    training = Training("llama", layers=4, overrides=(("tie_word_embeddings", True),))
    expected = train_on_one(training)
    for record in run_ranks(train_in_parallel, plan.world_size, training, plan, timeout=120):
        assert_same_training(record, expected, rtol=1e-10)
