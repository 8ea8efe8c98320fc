"""Ranks with different numbers of terms: loss and gradients are those of the mean over the global batch."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from vescale.optim import DDP
from vescale_testing import ranks, run_ranks

IGNORED = -100
#: Unmasked tokens of each rank in each of two micro-batches: 0, 3 and 7 in all.
TOKENS = [(0, 0), (3, 0), (2, 5)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()


def micro_batches(coord):
    """Return two micro-batches of 8 tokens and their targets, of which all but a few are masked."""
    generator = torch.Generator().manual_seed(coord)
    batches = []
    for count in TOKENS[coord]:
        x, y = torch.randint(11, (2, 8), generator=generator)
        y[count:] = IGNORED
        batches.append((x, y))
    return batches


def one_process():
    model = build()
    every = [each for coord in range(len(TOKENS)) for each in micro_batches(coord)]
    x, y = (torch.cat(each) for each in zip(*every, strict=True))
    loss = cross_entropy(model(x), y, ignore_index=IGNORED)
    loss.backward()
    return loss.item(), {fqn: p.grad for fqn, p in model.named_parameters()}


def by_scaled_sums(model, batches):
    scale = model.global_mean_scale(sum((y != IGNORED).sum() for _, y in batches))
    return [cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum") * scale for x, y in batches]


def by_local_means(model, batches):
    means = [cross_entropy(model(x), y, ignore_index=IGNORED) for x, y in batches]
    return [loss.nan_to_num() / len(batches) for loss in means]


def on_ranks(zero, way, no_sync):
    model = DDP(build(), init_device_mesh("cpu", (3,), mesh_dim_names=("dp",)), zero=zero, bucket_bytes=100)
    losses = way(model, micro_batches(dist.get_rank()))
    for index, loss in enumerate(losses):
        with model.no_sync() if no_sync and index == 0 else contextlib.nullcontext():
            loss.backward()
    loss = sum(losses).detach()
    dist.all_reduce(loss)
    parts = {fqn: slot.grad_part if zero else slot.param.grad.view(-1) for fqn, slot in model.slots().items()}
    return (loss / 3).item(), {fqn: (model.slots()[fqn].part if zero else (0, None), p) for fqn, p in parts.items()}


def check(zero, way, no_sync):
    loss, grads = one_process()
    for actual_loss, parts in run_ranks(on_ranks, 3, zero, way, no_sync):
        assert actual_loss == pytest.approx(loss, rel=1e-12)
        for fqn, ((start, stop), part) in parts.items():
            torch.testing.assert_close(part, grads[fqn].view(-1)[start:stop], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zero, no_sync", [(0, True), (0, False), (2, True), (2, False)])
def test_scaled_sums_give_the_global_mean(zero, no_sync):
    check(zero, by_scaled_sums, no_sync)


def test_means_of_local_means_differ():
    with pytest.raises(AssertionError):
        check(0, by_local_means, True)


@ranks(3)
def test_counts_of_any_kind():
    model = DDP(build(), init_device_mesh("cpu", (3,), mesh_dim_names=("dp",)))
    count = (3, 0, 7)[dist.get_rank()]
    for given in (count, float(count), torch.tensor(count), torch.tensor([count]), torch.tensor(float(count))):
        assert model.global_mean_scale(given) == 3 / 10
    assert model.global_mean_scale(0.5 * count) == 3 / 5


BAD = {"negative": -1, "nan": math.nan, "infinite": math.inf, "two": torch.ones(2), "text": "3", "none": None}


@pytest.mark.parametrize("came", BAD.values(), ids=BAD)
@ranks(2)
def test_bad_counts_are_an_error_on_every_rank(came):
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    here = rf"at coords \[1\] of axis 'dp'{'; here it is ' if dist.get_rank() else '$'}"
    with pytest.raises(ValueError, match=rf"global_mean_scale: expected the number of terms, 0 or more, .*{here}"):
        model.global_mean_scale(came if dist.get_rank() else 3)


@ranks(2)
def test_no_terms_at_all():
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(
        ValueError, match="no rank of axis 'dp' has a term, so there is no mean; skip this batch on all"
    ):
        model.global_mean_scale(0)
