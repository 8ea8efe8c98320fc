"""One small training for the tests of plan fields: on one process, and through `vescale.parallelize`."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import vescale
from vescale.dtensor import Replicate, Shard

MODULE_PLAN = {
    "parameter": {
        r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {r"layers\.\d+\.up\.input": [{"tp": Replicate()}], r"layers\.\d+\.down\.output": [{"tp": Replicate()}]},
}

adamw = functools.partial(torch.optim.AdamW, lr=0.02)


class Block(nn.Module):
    """A residual feed-forward with dropout; counts its calls."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows for rows."""
        return x + self.down(self.inner(self.up(x).tanh()))


class Net(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(4))
        self.drop, self.norm, self.head = nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits for tokens."""
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    """Return the model."""
    torch.manual_seed(seed)
    return Net(dropout).to(dtype)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return the global batch of a step."""
    ids = torch.randint(12, (8, 5), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "target": ids.roll(1, 1)}


@dataclass
class Record:
    """What a training gave: losses and norms by step, and the state dict after it."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]

    def difference(self, other: Record) -> float:
        """Return the largest relative difference of numbers, and of values by the largest one of their tensor."""
        numbers = zip([*self.losses, *self.norms], [*other.losses, *other.norms], strict=True)
        found = [abs(ours - theirs) / abs(theirs) for ours, theirs in numbers]
        assert list(self.state) == list(other.state)
        for name, value in other.state.items():
            distance = (self.state[name].double() - value.double()).abs().max()
            found.append((distance / value.double().abs().max()).item())
        return max(found)


def train_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 2, parts: int = 1, around: Any = None
) -> Record:
    """Train as a user of plain torch does; ``parts`` of a batch are accumulated."""
    losses, norms = [], []
    for step in range(steps):
        whole, loss = batch(step), 0.0
        for rows in torch.arange(8).chunk(parts):
            with around() if around else contextlib.nullcontext():
                part = loss_fn(model(whole["ids"][rows]), whole["target"][rows]) / parts
            part.backward()
            loss += part.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return Record(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


def parallelize(plan: vescale.Plan, model: nn.Module, optimizer_fn: Any = adamw, **options: Any) -> Any:
    """Return the parallel model and its optimizer."""
    return vescale.parallelize(
        plan, model, optimizer_fn, loss_fn=loss_fn, **{"module_plan": MODULE_PLAN if plan.tp > 1 else {}, **options}
    )


def train(model: Any, optimizer: Any, *, steps: int = 2, start: int = 0) -> Record:
    """Train a parallel model."""
    losses, norms = [], []
    for step in range(start, start + steps):
        loss = model(**model.local_batch(batch(step))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.global_loss(loss).item())
        norms.append(optimizer.grad_norm.item())
    return Record(losses, norms, model.state_dict())
