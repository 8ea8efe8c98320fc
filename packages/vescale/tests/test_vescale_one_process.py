"""On one process `parallelize` changes nothing: the training is that of plain PyTorch.

Bit for bit without clipping; the global norm adds squares in another order than torch does.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vescale
from vescale_testing import ranks

STEPS = 4


class Net(nn.Module):
    """Three blocks, a head and a loss, as an ordinary module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.scale = 2.0

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x).tanh()
        return SimpleNamespace(loss=nn.functional.mse_loss(self.scale * self.head(x), y))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        yield {"x": x, "y": x.sum(dim=1, keepdim=True)}


def build():
    torch.manual_seed(0)
    return Net().double()


def train_plain(*, lr=0.05, clip=0.5):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, norms = [], []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def train_parallel(plan, *, lr=0.05, clip=0.5):
    adamw = functools.partial(torch.optim.AdamW, lr=lr)
    model, optimizer = vescale.parallelize(plan, build(), adamw, clip_grad_norm=clip)
    losses, norms = [], []
    for batch in batches():
        loss = model(**model.local_batch(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.global_loss(loss).item())
        if clip is not None:
            norms.append(optimizer.grad_norm.item())
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@ranks(1)
def test_training_is_that_of_plain_torch(zero):
    losses, _, state = train_parallel(vescale.Plan(zero=zero), clip=None)
    plain_losses, _, plain_state = train_plain(clip=None)
    assert losses == plain_losses
    assert list(state) == list(plain_state)
    assert all(torch.equal(state[name], value) for name, value in plain_state.items())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@ranks(1)
def test_clipping_is_that_of_plain_torch(zero):
    losses, norms, _ = train_parallel(vescale.Plan(zero=zero))
    plain_losses, plain_norms, _ = train_plain()
    assert losses == pytest.approx(plain_losses, rel=1e-12)
    assert norms == pytest.approx(plain_norms, rel=1e-12)
    assert max(norms) > 0.5, "or nothing was clipped"


@ranks(1)
def test_another_learning_rate_is_noticed():
    """The comparisons above can fail: a learning rate, or clipping, that differs."""
    assert train_parallel(vescale.Plan(), lr=0.06)[0] != pytest.approx(train_plain()[0], rel=1e-6)
    assert train_parallel(vescale.Plan(), clip=None)[0] != pytest.approx(train_plain()[0], rel=1e-6)


@ranks(1)
def test_micro_batches_accumulate():
    """Two micro-batches give the gradients of the whole batch, up to the order of additions."""
    losses, norms, _ = train_parallel(vescale.Plan(num_microbatches=2))
    plain_losses, plain_norms, _ = train_plain()
    assert losses == pytest.approx(plain_losses, rel=1e-12)
    assert norms == pytest.approx(plain_norms, rel=1e-12)


@ranks(1)
def test_model_reads_like_the_users():
    module = build()
    model, _ = vescale.parallelize(vescale.Plan(), module, torch.optim.SGD)
    assert model.module is module
    assert model.scale == 2.0
    assert model.head is module.head
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in build().named_parameters()]
    assert list(model.state_dict()) == list(build().state_dict())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in module.parameters())
    assert not model.eval().module.training
    assert model.train().module.training
    assert "Plan: 1 process on cpu" in repr(model)
    with pytest.raises(RuntimeError, match="flat buffers; convert the model before parallelize"):
        model.float()


@ranks(1)
def test_checkpoint_resumes_the_training(tmp_path):
    """Save after two steps, load into a fresh model and optimizer, continue: the same losses."""
    adamw = functools.partial(torch.optim.AdamW, lr=0.05)

    def steps(model, optimizer, batches):
        losses = []
        for batch in batches:
            loss = model(**model.local_batch(batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    data = list(batches())
    model, optimizer = vescale.parallelize(vescale.Plan(zero=1), build(), adamw)
    steps(model, optimizer, data[:2])
    vescale.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    expected = steps(model, optimizer, data[2:])

    fresh = build()
    nn.init.zeros_(fresh.head.weight)
    other, other_optimizer = vescale.parallelize(vescale.Plan(), fresh, adamw)
    vescale.load(tmp_path / "checkpoint", {"model": other, "optimizer": other_optimizer})
    assert steps(other, other_optimizer, data[2:]) == expected
    assert steps(*vescale.parallelize(vescale.Plan(), build(), adamw), data[2:]) != expected


@ranks(1)
def test_param_groups_are_made_of_the_parallel_parameters():
    def groups(module):
        decay = [p for _, p in module.named_parameters() if p.dim() > 1]
        plain = [p for _, p in module.named_parameters() if p.dim() == 1]
        return [{"params": decay, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]

    _, optimizer = vescale.parallelize(vescale.Plan(), build(), torch.optim.AdamW, param_groups=groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4]
