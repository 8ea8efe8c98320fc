"""Losses: means and sums over rows, over some rows or targets, and what compares rows with each other."""

from __future__ import annotations

import torch
from small import TOKENS, WIDTH, Small, loss
from torch import Tensor
from torch.nn import functional as F


def eye(y: Tensor) -> Tensor:
    return torch.eye(y.shape[-1], dtype=y.dtype)


@loss()
def distance_to_the_mean_row(_: Small, y: Tensor) -> Tensor:
    return F.mse_loss(y, y.detach().mean(0, keepdim=True).expand_as(y))


@loss()
def largest_elements(_: Small, y: Tensor) -> Tensor:
    return y.flatten().topk(7)[0].mean()


@loss()
def median_row(_: Small, y: Tensor) -> Tensor:
    return y.mean((1, 2)).median()


@loss()
def third_row(_: Small, y: Tensor) -> Tensor:
    return y.mean((1, 2)).kthvalue(3)[0]


@loss()
def largest_row(_: Small, y: Tensor) -> Tensor:
    return y.mean((1, 2)).max() + y.mean()


@loss()
def quantile(_: Small, y: Tensor) -> Tensor:
    return torch.quantile(y, 0.9) + y.mean()


@loss()
def number_of_classes(_: Small, y: Tensor) -> Tensor:
    return y.square().mean() * (y.sum(-1) > 0).long().unique().numel()


@loss()
def chosen_elements(_: Small, y: Tensor) -> Tensor:
    return y[y[..., 0] > 0].square().mean()


@loss()
def masked_mean(_: Small, y: Tensor) -> Tensor:
    mask = (y[..., 0] > 0).to(y.dtype)
    return (y.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


@loss()
def divided_by_a_number(_: Small, y: Tensor) -> Tensor:
    return y.square().sum() / (y[..., 0] > 0).sum().item()


@loss()
def weights_of_classes(_: Small, y: Tensor) -> Tensor:
    target = (y.sum(-1) > 0).long().flatten()
    return F.cross_entropy(y.flatten(0, 1), target, weight=torch.arange(1.0, WIDTH + 1, dtype=y.dtype))


@loss()
def smoothed_labels(_: Small, y: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), (y.sum(-1) > 0).long().flatten(), label_smoothing=0.1)


@loss()
def ignored_targets(_: Small, y: Tensor) -> Tensor:
    target = torch.where(y.detach()[..., 0] > 0, 1, -100)
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


@loss()
def confident_targets(_: Small, y: Tensor) -> Tensor:
    confidence, target = y.softmax(-1).max(-1)
    each = F.cross_entropy(y.flatten(0, 1), target.flatten().detach(), reduction="none")
    return (each * (confidence > 0.2).to(y.dtype).flatten()).mean()


@loss()
def hardest_tokens(_: Small, y: Tensor) -> Tensor:
    each = y.square().mean(-1).flatten()
    return each.topk(max(1, each.numel() // 4))[0].mean()


@loss()
def tokens_above_the_mean(_: Small, y: Tensor) -> Tensor:
    each = y.square().mean(-1).flatten()
    return each[each > each.detach().mean()].mean()


@loss()
def focal(_: Small, y: Tensor) -> Tensor:
    target = (y.detach() > 0).to(y.dtype)
    each = F.binary_cross_entropy_with_logits(y, target, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum() / target.sum().clamp(min=1)


@loss()
def dice(_: Small, y: Tensor) -> Tensor:
    found, target = y.sigmoid(), (y.detach() > 0).to(y.dtype)
    return 1 - (2 * (found * target).sum() + 1) / (found.sum() + target.sum() + 1)


@loss()
def ctc(_: Small, y: Tensor) -> Tensor:
    targets = torch.ones(len(y), 2, dtype=torch.long) * torch.tensor([1, 2])
    lengths = torch.full((len(y),), TOKENS), torch.full((len(y),), 2)
    return F.ctc_loss(y.log_softmax(-1).transpose(0, 1), targets, *lengths)


@loss()
def divided_by_the_rows(_: Small, y: Tensor) -> Tensor:
    return y.square().sum() / (y.shape[0] * y.shape[1])


@loss()
def sum_of_rows(_: Small, y: Tensor) -> Tensor:
    return y.square().sum() / 100


@loss()
def deviation(_: Small, y: Tensor) -> Tensor:
    return y.std(0).mean()


@loss()
def triplets(_: Small, y: Tensor) -> Tensor:
    rows = y.mean(1)
    return torch.cdist(rows, rows).mean() + F.triplet_margin_loss(rows, rows.roll(1, 0), rows.flip(0))


@loss()
def hardest_triplets(_: Small, y: Tensor) -> Tensor:
    rows = y.mean(1)
    distance = (rows[:, None] - rows[None]).square().sum(-1)
    label = torch.arange(len(rows)) % 2
    same = label[:, None] == label[None]
    return F.relu((distance * same).max(1)[0] - distance.masked_fill(same, 1e9).min(1)[0] + 1).mean()


@loss()
def barlow(_: Small, y: Tensor) -> Tensor:
    rows = (y.mean(1) - y.mean((0, 1))) / (y.mean(1).std(0) + 1e-3)
    return (rows.T @ rows / len(rows) - eye(y)).square().sum()


@loss()
def variance_and_covariance(_: Small, y: Tensor) -> Tensor:
    rows = y.mean(1)
    variance = F.relu(1 - (rows.var(0) + 1e-4).sqrt()).mean()
    centered = rows - rows.mean(0)
    covariance = centered.T @ centered / (len(rows) - 1)
    return variance + (covariance * (1 - eye(y))).square().sum() / WIDTH


@loss()
def contrast_of_two_views(_: Small, y: Tensor) -> Tensor:
    logits = F.normalize(y[:, 0], dim=-1) @ F.normalize(y[:, 1], dim=-1).T / 0.1
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@loss()
def contrast_of_dropped_views(_: Small, y: Tensor) -> Tensor:
    both, count = torch.cat([F.dropout(y, 0.3), F.dropout(y, 0.3)], 0).mean(1), len(y)
    logits = both @ both.T - 1e9 * torch.eye(2 * count, dtype=y.dtype)
    return F.cross_entropy(logits, (torch.arange(2 * count) + count) % (2 * count))


@loss()
def contrast_of_labels(_: Small, y: Tensor) -> Tensor:
    rows = F.normalize(y.mean(1), dim=-1)
    label = torch.arange(len(rows)) % 3
    same = (label[:, None] == label).to(y.dtype)
    return -((rows @ rows.T).log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


@loss()
def load_of_experts(_: Small, y: Tensor) -> Tensor:
    chances = y[..., :3].flatten(0, 1).softmax(-1)
    load = F.one_hot(chances.argmax(-1), 3).to(y.dtype).mean(0)
    return y.square().mean() + 0.1 * 3 * (load * chances.mean(0)).sum()


@loss()
def a_loss_that_is_kept(model: Small, y: Tensor) -> Tensor:
    model.auxiliary = (y[..., :3].flatten(0, 1).softmax(-1).mean(0) ** 2).sum()
    return y.square().mean() + model.auxiliary


@loss()
def covariance(_: Small, y: Tensor) -> Tensor:
    return torch.cov(y.mean(1).T).diagonal().sum()


@loss()
def correlation(_: Small, y: Tensor) -> Tensor:
    return torch.corrcoef(y.mean(1).T).square().mean()


@loss()
def singular_values(_: Small, y: Tensor) -> Tensor:
    return torch.linalg.svdvals(y.mean(1)).sum()


@loss()
def products_of_rows(_: Small, y: Tensor) -> Tensor:
    return torch.einsum("ntw,mtw->nm", y, y).mean()


@loss()
def squares_of_rows(_: Small, y: Tensor) -> Tensor:
    return torch.einsum("ntw,mtw->nm", y, y).diagonal().mean()


@loss()
def logsumexp_of_all(_: Small, y: Tensor) -> Tensor:
    return y.logsumexp((0, 1, 2))


@loss()
def geometric_mean(_: Small, y: Tensor) -> Tensor:
    return y.square().mean((1, 2)).log().mean().exp()


@loss()
def root_of_the_mean(_: Small, y: Tensor) -> Tensor:
    return y.square().mean().sqrt()


@loss()
def norm_of_all(_: Small, y: Tensor) -> Tensor:
    return y.norm()


@loss()
def divided_by_the_norm(_: Small, y: Tensor) -> Tensor:
    return (y / y.detach().norm()).sum()


@loss()
def balanced_assignment(_: Small, y: Tensor) -> Tensor:
    rows = y.mean(1)
    with torch.no_grad():
        assigned = (rows / 0.5).exp().T
        assigned /= assigned.sum()
        kinds, count = assigned.shape
        for _ in range(3):
            assigned /= assigned.sum(1, keepdim=True) * kinds
            assigned /= assigned.sum(0, keepdim=True) * count
    return -((assigned * count).T * rows.log_softmax(-1)).sum(-1).mean()
