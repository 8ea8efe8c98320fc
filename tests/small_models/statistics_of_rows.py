"""Values that models keep from call to call: buffers, running statistics, counters, queues, states."""

from __future__ import annotations

import torch
from small import TOKENS, WIDTH, Small, layer, loss
from torch import Tensor, nn
from torch.nn import functional as F


def zeros() -> Tensor:
    return torch.zeros(WIDTH)


def count() -> Tensor:
    return torch.zeros((), dtype=torch.long)


@layer(running=zeros)
def running_mean(model: Small, x: Tensor) -> Tensor:
    if model.training:
        with torch.no_grad():
            model.running.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
    return x - model.running


@layer(running=zeros)
def running_mean_that_is_assigned(model: Small, x: Tensor) -> Tensor:
    model.running = 0.9 * model.running + 0.1 * x.detach().mean((0, 1))
    return x - model.running


@layer(running=zeros)
def running_mean_in_data(model: Small, x: Tensor) -> Tensor:
    model.running.data.copy_(0.9 * model.running + 0.1 * x.detach().mean((0, 1)))
    return x - model.running


@layer(total=zeros)
def sum_of_all_rows(model: Small, x: Tensor) -> Tensor:
    model.total = model.total + x.detach().sum((0, 1))
    return x - 0.1 * model.total.tanh()


@layer(code=lambda: nn.Parameter(torch.randn(6, WIDTH)), uses=lambda: torch.zeros(6))
def code_book(model: Small, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    index = torch.cdist(rows, model.code).argmin(-1)
    chosen = model.code[index].view_as(x)
    with torch.no_grad():
        model.uses.index_add_(0, index, torch.ones_like(index, dtype=model.uses.dtype))
    return x + (chosen - x).detach() + 0 * model.uses.sum() + (chosen - x.detach()).square().mean()


@layer(lambda model: setattr(model, "lift", nn.utils.parametrizations.spectral_norm(model.lift)))
def spectral_norm(_: Small, x: Tensor) -> Tensor:
    return x


@layer(lambda model: setattr(model, "norm", nn.BatchNorm1d(WIDTH, momentum=None)))
def statistics_of_all_steps(_: Small, x: Tensor) -> Tensor:
    return x


@layer(lambda model: setattr(model, "norm", nn.BatchNorm1d(WIDTH, track_running_stats=False)))
def statistics_that_are_not_kept(_: Small, x: Tensor) -> Tensor:
    return x


@layer(lambda model: setattr(model, "norm", nn.BatchNorm1d(WIDTH, affine=False)))
def statistics_without_weights(_: Small, x: Tensor) -> Tensor:
    return x


@layer(lambda model: model.norm is None or model.norm.eval())
def statistics_that_are_frozen(_: Small, x: Tensor) -> Tensor:
    return x


@layer()
def statistics_of_a_function(_: Small, x: Tensor) -> Tensor:
    return F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)


@layer(channels=lambda: nn.BatchNorm1d(WIDTH))
def statistics_of_channels(model: Small, x: Tensor) -> Tensor:
    return model.channels(x.transpose(1, 2)).transpose(1, 2)


@layer(instance=lambda: nn.InstanceNorm1d(TOKENS, track_running_stats=True))
def statistics_of_each_row(model: Small, x: Tensor) -> Tensor:
    return model.instance(x)


@layer(largest=lambda: torch.zeros(()))
def largest_that_is_kept(model: Small, x: Tensor) -> Tensor:
    model.largest = torch.maximum(model.largest, x.detach().abs().max())
    scale = model.largest / 7
    return x + ((x / scale).round() * scale - x).detach()


@layer(largest=lambda: torch.zeros(()))
def largest_in_place(model: Small, x: Tensor) -> Tensor:
    model.largest.copy_(torch.max(model.largest, x.detach().abs().max()))
    scale = model.largest / 7
    return x + ((x / scale).round() * scale - x).detach()


@layer()
def largest_of_the_batch(_: Small, x: Tensor) -> Tensor:
    scale = x.detach().abs().max() / 7
    return x + ((x / scale).round() * scale - x).detach()


@layer(least=lambda: torch.full((WIDTH,), 9.0))
def least_by_out(model: Small, x: Tensor) -> Tensor:
    torch.minimum(model.least, x.detach().amin((0, 1)), out=model.least)
    return x - model.least


@loss(center=lambda: torch.zeros(1, WIDTH))
def centered_teacher(model: Small, y: Tensor) -> Tensor:
    rows = y.mean(1)
    target = ((rows - model.center) / 0.04).softmax(-1).detach()
    found = -(target * (rows / 0.1).log_softmax(-1)).sum(-1).mean()
    with torch.no_grad():
        model.center = model.center * 0.9 + 0.1 * rows.mean(0, keepdim=True)
    return found


def _copy_of_lift(model: Small) -> None:
    model.teacher.load_state_dict(model.lift.state_dict())
    model.teacher.requires_grad_(False)


@layer(_copy_of_lift, teacher=lambda: nn.Linear(WIDTH, WIDTH))
def teacher_that_follows(model: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        for mine, other in zip(model.teacher.parameters(), model.lift.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)
    return x + model.teacher(x).detach()


def _queue() -> Tensor:
    return F.normalize(torch.arange(24.0 * WIDTH).sin().view(24, WIDTH), dim=-1)


@loss(queue=_queue, first=lambda: torch.zeros(1, dtype=torch.long))
def queue_of_rows(model: Small, y: Tensor) -> Tensor:
    rows = F.normalize(y.mean(1), dim=-1)
    found = F.cross_entropy(rows @ model.queue.clone().T / 0.2, torch.zeros(len(rows), dtype=torch.long))
    with torch.no_grad():
        first = int(model.first)
        model.queue[first : first + len(rows)] = rows
        model.first[0] = (first + len(rows)) % 24
    return found


@layer(rnn=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), hidden=lambda: None)
def state_of_the_call_before(model: Small, x: Tensor) -> Tensor:
    found, hidden = model.rnn(x, model.hidden)
    model.hidden = tuple(each.detach() for each in hidden)
    return found


@loss(seen=lambda: 0)
def rows_are_counted(model: Small, y: Tensor) -> Tensor:
    model.seen += len(y)
    return y.square().mean() / model.seen


@loss(seen=count)
def rows_are_counted_in_a_buffer(model: Small, y: Tensor) -> Tensor:
    model.seen += len(y)
    return y.square().mean() / model.seen


@loss(calls=lambda: 0)
def calls_are_counted(model: Small, y: Tensor) -> Tensor:
    model.calls += 1
    return y.square().mean() * model.calls


@loss(calls=count)
def calls_are_counted_in_a_buffer(model: Small, y: Tensor) -> Tensor:
    model.calls += 1
    return y.square().mean() * model.calls


@layer(never=lambda: nn.Linear(WIDTH, WIDTH))
def a_layer_is_never_used(_: Small, x: Tensor) -> Tensor:
    return x


@layer(calls=lambda: 0, other=lambda: nn.Linear(WIDTH, WIDTH))
def a_layer_is_used_in_every_other_call(model: Small, x: Tensor) -> Tensor:
    model.calls += 1
    return model.other(x) if model.calls % 2 else x
