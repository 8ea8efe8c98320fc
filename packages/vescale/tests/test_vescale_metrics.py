"""Metrics of a training loop: what a row says, what it costs, and who prints it."""

import functools
import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale.dtensor import debug
from vescale.dtensor.extension import METERS
from vescale_testing import ranks

TOKENS = 64


class Slow(nn.Linear):
    """A layer in which a rank sleeps; `delays` has the seconds by rank."""

    delays: dict

    def forward(self, x):
        time.sleep(self.delays.get(dist.get_rank(), 0))
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, delays):
        super().__init__()
        self.layers = nn.ModuleList([Slow(8, 8), nn.Linear(8, 8)])
        self.layers[0].delays = dict(delays)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def build(plan, delays=(), **options):
    torch.manual_seed(0)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return vescale.parallelize(
        plan, Net(delays), sgd, clip_grad_norm=1.0, loss_fn=nn.functional.mse_loss, module_plan={}, **options
    )


def batch():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    return {"x": x, "target": x.sin()}


def train(model, optimizer):
    loss = model(**model.local_batch(batch())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@ranks(2)
def test_a_row_has_the_global_loss_and_the_rates():
    model, optimizer = build(vescale.Plan(dp=2, zero=1))
    metrics = vescale.Metrics(model, optimizer, flops_per_token=1e6, peak_flops_per_device=1e9, write=None)
    began = time.perf_counter()
    loss = train(model, optimizer)
    row = metrics.step(tokens=TOKENS, loss=loss)
    seconds = time.perf_counter() - began
    assert row["step"] == 1
    assert row["loss"] == model.global_loss(loss).item() != loss.item()
    assert row["grad_norm"] == optimizer.grad_norm.item()
    assert 0.5 * seconds < row["step_seconds"] < 2 * seconds + 0.1
    assert row["tokens_per_second"] == pytest.approx(TOKENS / row["step_seconds"])
    assert row["tokens_per_second_per_device"] == row["tokens_per_second"] / 2
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 1e6 / (2 * 1e9))
    assert 2**24 < row["memory_peak_bytes"] < 2**36
    assert 0 <= row["exposed_communication"] < 1
    assert "pipeline_wait" not in row


@ranks(1)
def test_what_is_not_given_is_not_in_a_row():
    model, _ = build(vescale.Plan())
    row = vescale.Metrics(model, write=None).step(tokens=TOKENS)
    assert not {"loss", "grad_norm", "mfu"} & set(row)
    assert "mfu" not in vescale.Metrics(model, flops_per_token=1e6, write=None).step(tokens=TOKENS)


@ranks(2)
def test_rows_come_every_few_steps_and_count_all_of_them():
    model, optimizer = build(vescale.Plan(dp=2))
    metrics = vescale.Metrics(model, optimizer, every=3, write=None)
    rows = [metrics.step(tokens=TOKENS, loss=train(model, optimizer)) for _ in range(7)]
    assert [bool(row) for row in rows] == [False, False, True, False, False, True, False]
    assert [row["step"] for row in rows if row] == [3, 6]
    for row in filter(None, rows):
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(TOKENS)


@ranks(2)
@pytest.mark.parametrize(("over_ranks", "per_row"), [(False, 1), (True, 2)])
def test_only_the_loss_is_communicated_and_only_in_rows(over_ranks, per_row):
    model, optimizer = build(vescale.Plan(dp=2))
    loss = train(model, optimizer)
    metrics = vescale.Metrics(model, optimizer, every=2, write=None, over_ranks=over_ranks)
    with debug.comm_log() as log:
        metrics.step(tokens=TOKENS, loss=loss)
        assert len(log) == 0
        metrics.step(tokens=TOKENS, loss=loss)
        assert [record.operator for record in log] == ["all_reduce"] * per_row
        metrics.step(tokens=TOKENS)
        metrics.step(tokens=TOKENS)
        assert len(log) == per_row + over_ranks


@ranks(1)
def test_between_rows_no_value_is_read():
    """A read of a tensor's value is what makes the host wait for a device."""
    model, optimizer = build(vescale.Plan())
    train(model, optimizer)
    unreadable = torch.empty((), device="meta")
    metrics = vescale.Metrics(model, optimizer, every=2, write=None)
    assert metrics.step(tokens=TOKENS, loss=unreadable) == {}
    with pytest.raises(RuntimeError, match=r"meta tensors"):
        metrics.step(tokens=TOKENS, loss=unreadable)


@ranks(2)
@pytest.mark.parametrize(("zero", "late"), [(0, 0), (2, 1)])
def test_the_rank_that_is_early_waits(zero, late):
    model, optimizer = build(vescale.Plan(dp=2, zero=zero), {late: 0.25})
    train(model, optimizer)  # recorded: ranks wait for each other in other places
    metrics = vescale.Metrics(model, optimizer, write=None)
    train(model, optimizer)
    row = metrics.step(tokens=TOKENS)
    seconds = row["exposed_communication"] * row["step_seconds"]
    if dist.get_rank() == late:
        assert seconds < 0.15
    else:
        assert 0.2 < seconds < row["step_seconds"]


@ranks(2)
def test_over_ranks_a_row_has_the_longest_wait():
    model, optimizer = build(vescale.Plan(dp=2), {1: 0.25})
    train(model, optimizer)
    metrics = vescale.Metrics(model, optimizer, write=None, over_ranks=True)
    train(model, optimizer)
    row = metrics.step(tokens=TOKENS)
    assert row["exposed_communication"] * row["step_seconds"] > 0.2


@ranks(2)
def test_a_pipeline_waits_for_its_slow_stage():
    model, optimizer = build(vescale.Plan(pp=2, num_microbatches=2), {0: 0.15})
    train(model, optimizer)
    metrics = vescale.Metrics(model, optimizer, write=None)
    train(model, optimizer)
    row = metrics.step(tokens=TOKENS)
    seconds = row["pipeline_wait"] * row["step_seconds"]
    assert seconds > 0.2 if dist.get_rank() == 1 else seconds < 0.15


@ranks(2)
def test_waits_in_a_pause_are_in_no_row():
    model, optimizer = build(vescale.Plan(dp=2), {1: 0.25})
    train(model, optimizer)
    metrics = vescale.Metrics(model, optimizer, write=None, over_ranks=True)
    time.sleep(0.1)
    with metrics.paused():
        train(model, optimizer)
    row = metrics.step(tokens=TOKENS)
    assert row["exposed_communication"] * row["step_seconds"] < 0.1


@ranks(1)
def test_a_pause_is_in_no_row():
    model, optimizer = build(vescale.Plan())
    metrics = vescale.Metrics(model, optimizer, write=None)
    with metrics.paused():
        time.sleep(0.3)
    train(model, optimizer)
    assert metrics.step(tokens=TOKENS)["step_seconds"] < 0.25
    time.sleep(0.3)
    assert metrics.step(tokens=TOKENS)["step_seconds"] > 0.25


@ranks(2)
def test_rank_0_writes_a_line():
    model, optimizer = build(vescale.Plan(dp=2))
    lines = []
    metrics = vescale.Metrics(model, optimizer, flops_per_token=1e6, peak_flops_per_device=1e12, write=lines.append)
    row = metrics.step(tokens=TOKENS, loss=train(model, optimizer))
    if dist.get_rank():
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"step 1  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3g}  ")
    for part in (" tokens/s (", " per device)  MFU ", "%  memory ", " GiB  waits for communication "):
        assert part in line


@ranks(1)
def test_meters_close_with_the_metrics():
    model, optimizer = build(vescale.Plan(pp=1, num_microbatches=2))
    with vescale.Metrics(model, optimizer, write=None) as metrics:
        assert len(METERS) == 1
    assert METERS == []
    metrics = vescale.Metrics(model, optimizer, write=None)
    assert len(METERS) == 1
    del metrics
    gc.collect()
    assert METERS == []


@pytest.mark.gpu
@ranks(1)
def test_no_step_without_a_row_synchronizes_the_device():
    model, optimizer = build(vescale.Plan(device="cuda"))
    loss = train(model, optimizer)
    metrics = vescale.Metrics(model, optimizer, every=2, flops_per_token=1e6, write=None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.step(tokens=TOKENS, loss=loss)
        with pytest.raises(RuntimeError, match=r"synchroniz"):
            metrics.step(tokens=TOKENS, loss=loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
