"""Layers: rows that are compared, moved, counted, chosen, cut, and operators over the rows."""

from __future__ import annotations

import torch
from small import TOKENS, WIDTH, Small, layer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@layer()
def flipped_rows(_: Small, x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * x.flip(0)


@layer()
def rolled_rows(_: Small, x: Tensor) -> Tensor:
    return x - x.roll(1, 0)


@layer()
def sums_up_to_each_row(_: Small, x: Tensor) -> Tensor:
    return x.cumsum(0)


@layer()
def sorted_rows(_: Small, x: Tensor) -> Tensor:
    return x.sort(0)[0]


@layer()
def softmax_over_rows(_: Small, x: Tensor) -> Tensor:
    return x.softmax(0)


@layer()
def fourier_over_rows(_: Small, x: Tensor) -> Tensor:
    return torch.fft.fft(x, dim=0).real


@layer()
def convolution_over_rows(_: Small, x: Tensor) -> Tensor:
    rows = x.permute(1, 2, 0).flatten(0, 1)[:, None]
    return F.conv1d(rows, torch.ones(1, 1, 3, dtype=x.dtype) / 3, padding=1).view(TOKENS, WIDTH, -1).permute(2, 0, 1)


@layer(convolution=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
def convolution_over_tokens(model: Small, x: Tensor) -> Tensor:
    return model.convolution(x.transpose(1, 2)).transpose(1, 2)


@layer()
def interpolated_rows(_: Small, x: Tensor) -> Tensor:
    return F.interpolate(x.permute(1, 2, 0), scale_factor=2).permute(2, 0, 1)[::2]


@layer(attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=False))
def attention_over_rows(model: Small, x: Tensor) -> Tensor:
    return model.attention(x, x, x)[0]


@layer()
def divided_by_the_number_of_rows(_: Small, x: Tensor) -> Tensor:
    return x / x.shape[0]


@layer()
def minus_the_first_row(_: Small, x: Tensor) -> Tensor:
    return x - x[0]


@layer()
def minus_the_last_row(_: Small, x: Tensor) -> Tensor:
    return x - x[-1:]


@layer()
def times_the_index_of_the_row(_: Small, x: Tensor) -> Tensor:
    return x * torch.arange(len(x), dtype=x.dtype)[:, None, None]


@layer()
def every_other_row_is_written(_: Small, x: Tensor) -> Tensor:
    x = x.clone()
    x[::2] *= 2
    return x


@layer()
def halves_that_are_added(_: Small, x: Tensor) -> Tensor:
    one, other = x.chunk(2, 0)
    return torch.cat([one + other.roll(1, 0) * 0.1, other], 0)


@layer()
def halves_by_number(_: Small, x: Tensor) -> Tensor:
    count = len(x) // 2
    return torch.cat([x[:count] * 2, x[count:] * 3], 0)


@layer()
def part_of_a_longer_tensor(_: Small, x: Tensor) -> Tensor:
    first = len(x) // 2
    longer = torch.zeros(len(x) * 2, TOKENS, WIDTH, dtype=x.dtype)
    longer[first : first + len(x)] = x
    return longer[first : first + len(x)]


@layer()
def histogram(_: Small, x: Tensor) -> Tensor:
    counts = torch.histc(x.detach(), bins=4, min=-2, max=2)
    return x * (counts / counts.sum()).max()


@layer()
def counted_classes(_: Small, x: Tensor) -> Tensor:
    counts = torch.bincount((x[..., 0] > 0).long().flatten(), minlength=2)
    return x * (counts / counts.sum())[0]


@layer()
def means_of_classes(_: Small, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    index = (rows[:, 0] > 0).long()
    sums = torch.zeros(2, WIDTH, dtype=x.dtype).index_add(0, index, rows)
    return (rows - (sums / torch.bincount(index, minlength=2).clamp(min=1)[:, None])[index]).view_as(x)


@layer()
def whitened(_: Small, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1) - x.mean((0, 1))
    covariance = rows.T @ rows / len(rows) + 0.1 * torch.eye(WIDTH, dtype=x.dtype)
    factor = torch.linalg.cholesky(covariance)
    return torch.linalg.solve_triangular(factor, rows.T, upper=False).T.view_as(x)


@layer()
def experts_choose_tokens(model: Small, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    weights, found = model.out(rows)[:, :2].softmax(-1), torch.zeros_like(rows)
    for expert in range(2):
        weight, index = weights[:, expert].topk(len(rows) // 2)
        found = found.index_add(0, index, weight[:, None] * rows[index] * (expert + 1))
    return found.view_as(x)


@layer()
def experts_of_limited_capacity(model: Small, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    chosen = F.one_hot(model.out(rows)[:, :3].argmax(-1), 3)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return (rows * (place <= len(rows) // 3).to(x.dtype)[:, None]).view_as(x)


@layer()
def cut_to_the_longest_row(_: Small, x: Tensor) -> Tensor:
    longest = int((x[..., 0] > -0.5).sum(1).max())
    return F.pad(x[:, :longest], (0, 0, 0, x.shape[1] - longest))


@layer(rnn=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def packed_sequences(model: Small, x: Tensor) -> Tensor:
    lengths = (x[..., 0] > -0.5).sum(1).clamp(min=1)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(model.rnn(packed)[0], batch_first=True, total_length=TOKENS)[0]


@layer()
def nested_rows(_: Small, x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(x), layout=torch.jagged), 0.0)


@layer()
def vmap_over_rows(_: Small, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(x)


@layer(lambda model: model.lift.register_forward_hook(lambda _m, _args, output: output - output.mean(0)))
def rows_are_centered_in_a_hook(_: Small, x: Tensor) -> Tensor:
    return x


@layer()
def everything_is_recomputed(_: Small, x: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(x - x.mean(0), 0.3), x, use_reentrant=False)
