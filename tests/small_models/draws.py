"""Random numbers: drawn by row, for all rows, once, in recomputed code, by generators outside of torch."""

from __future__ import annotations

import random

import numpy as np
import torch
from small import TOKENS, WIDTH, Small, layer, loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def per_row(x: Tensor) -> tuple[int, ...]:
    return (len(x), *(1 for _ in x.shape[1:]))


@layer()
def drop_path(_: Small, x: Tensor) -> Tensor:
    return x * x.new_empty(per_row(x)).bernoulli_(0.7) / 0.7


@layer()
def drop_path_by_floor(_: Small, x: Tensor) -> Tensor:
    return x * (0.7 + torch.rand(per_row(x), dtype=x.dtype)).floor() / 0.7


@layer()
def noise_of_the_size(_: Small, x: Tensor) -> Tensor:
    return x + torch.randn(x.size(), dtype=x.dtype)


@layer()
def noise_of_tokens(_: Small, x: Tensor) -> Tensor:
    return x + torch.randn(x.size(1), 1, dtype=x.dtype)


@layer(generator=lambda: torch.Generator().manual_seed(4))
def generator_of_the_model(model: Small, x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5), generator=model.generator)


@layer()
def one_draw_steers(_: Small, x: Tensor) -> Tensor:
    return x * 2 if torch.rand(()).item() < 0.5 else x * 3


@layer()
def layers_that_drop(_: Small, x: Tensor) -> Tensor:
    for _ in range(3):
        if torch.rand([]) < 0.5:
            x = x + F.dropout(x, 0.3)
    return x


@layer()
def gumbel(_: Small, x: Tensor) -> Tensor:
    return x * F.gumbel_softmax(x, dim=-1)


@layer()
def gumbel_one_hot(_: Small, x: Tensor) -> Tensor:
    return x * F.gumbel_softmax(x, dim=-1, hard=True)


@loss()
def variational(_: Small, y: Tensor) -> Tensor:
    mean, log_variance = y.chunk(2, -1)
    sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
    return sample.square().mean() + divergence.mean()


@layer()
def shuffled_rows(_: Small, x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


@layer()
def mixup(_: Small, x: Tensor) -> Tensor:
    weight = torch.rand(()).to(x.dtype)
    return weight * x + (1 - weight) * x[torch.randperm(x.size(0))]


@layer()
def dropped_weight(model: Small, x: Tensor) -> Tensor:
    return F.linear(x, F.dropout(model.out.weight, 0.3))


@layer()
def noisy_weight(model: Small, x: Tensor) -> Tensor:
    return F.linear(x, model.out.weight + 0.1 * torch.randn_like(model.out.weight))


@layer()
def random_slope(model: Small, x: Tensor) -> Tensor:
    return F.rrelu(x, training=model.training)


@layer()
def alpha_dropout(_: Small, x: Tensor) -> Tensor:
    return F.alpha_dropout(x, 0.3, training=True)


@layer()
def channel_dropout(_: Small, x: Tensor) -> Tensor:
    return F.dropout1d(x, 0.3)


@layer()
def row_dropout(_: Small, x: Tensor) -> Tensor:
    return F.dropout1d(x.mean(-1), 0.3).unsqueeze(-1) * x


@layer()
def sampled_tokens(_: Small, x: Tensor) -> Tensor:
    chosen = torch.multinomial(x.softmax(-1).detach().flatten(0, 1), 1)
    return x * chosen.view(x.shape[0], x.shape[1], 1)


@layer()
def transposed_dropout_that_is_recomputed(_: Small, x: Tensor) -> Tensor:
    dropped = lambda x: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1) * x  # noqa: E731
    return checkpoint(dropped, x, use_reentrant=False)


@layer()
def numpy_noise(_: Small, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.rand(*x.shape))


@layer()
def numpy_permutes_tokens(_: Small, x: Tensor) -> Tensor:
    return x[:, np.random.permutation(x.shape[1]).copy()]


@layer()
def python_steers(_: Small, x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x * 3


@layer()
def rotated_tokens(_: Small, x: Tensor) -> Tensor:
    first = int(torch.randint(1, TOKENS, (1,)))
    return torch.cat([x[:, first:], x[:, :first]], 1)


@layer(rate=lambda: 0.1)
def a_rate_that_grows(model: Small, x: Tensor) -> Tensor:
    model.rate = min(0.5, model.rate + 0.1)
    return F.dropout(x, model.rate)


@layer(lambda model: model.lift.register_forward_hook(lambda _m, _args, output: F.dropout(output, 0.3)))
def dropout_in_a_hook(_: Small, x: Tensor) -> Tensor:
    return x


@loss()
def negative_samples(model: Small, y: Tensor) -> Tensor:
    others = model.out.weight[torch.randint(0, 6, (y.shape[0], y.shape[1], 3))]
    return F.softplus((y[:, :, None] * others).sum(-1)).mean()


@loss()
def negatives_among_the_rows(_: Small, y: Tensor) -> Tensor:
    rows = y.mean(1)
    return F.softplus((rows * rows[torch.randint(0, len(rows), (len(rows),))]).sum(-1)).mean()


@layer()
def dropout_row_by_row(_: Small, x: Tensor) -> Tensor:
    return torch.stack([F.dropout(row, 0.3) for row in x])


@layer()
def dropout_token_by_token(_: Small, x: Tensor) -> Tensor:
    return torch.stack([F.dropout(token, 0.3) for token in x.unbind(1)], 1)


@loss()
def dropout_of_repeated_rows(_: Small, y: Tensor) -> Tensor:
    return F.dropout(y.repeat(2, 1, 1), 0.3).square().mean()


@loss()
def dropout_of_interleaved_rows(_: Small, y: Tensor) -> Tensor:
    return F.dropout(y.repeat_interleave(2, 0), 0.3).square().mean()


@layer()
def vmap_with_draws_of_each_row(_: Small, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * torch.rand_like(row), randomness="different")(x)


@layer()
def vmap_with_draws_of_all_rows(_: Small, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * torch.rand_like(row), randomness="same")(x)


@layer(attention=lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.2))
def attention_with_dropout(model: Small, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return model.attention(x, x, x)[0].transpose(0, 1)


@layer(encoder=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.2, batch_first=True))
def encoder_layer(model: Small, x: Tensor) -> Tensor:
    return model.encoder(x)


@layer(rnn=lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3))
def lstm_with_dropout(model: Small, x: Tensor) -> Tensor:
    return model.rnn(x.transpose(0, 1))[0].transpose(0, 1)


@layer(cell=lambda: nn.GRUCell(WIDTH, WIDTH))
def cell_with_dropout(model: Small, x: Tensor) -> Tensor:
    hidden, found = x.new_zeros(len(x), WIDTH), []
    for token in range(x.shape[1]):
        hidden = F.dropout(model.cell(x[:, token], hidden), 0.2)
        found.append(hidden)
    return torch.stack(found, 1)


@loss()
def discrepancy_to_noise(_: Small, y: Tensor) -> Tensor:
    rows, noise = y.mean(1), torch.randn_like(y.mean(1))
    kernel = lambda p, q: (-torch.cdist(p, q).square()).exp().mean()  # noqa: E731
    return kernel(rows, rows) + kernel(noise, noise) - 2 * kernel(rows, noise)
