"""One training, and the layouts in which the suite of pairs runs it: what a user writes to save it and to go on.

The model is a Mixtral in float64, whose experts can be spread like its heads, with dropout. AdamW decays matrices
only, gradients are clipped, a scheduler changes the learning rate, and the random streams are part of the state. So
whatever a checkpoint leaves out, or gives to another parameter, changes the losses.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

import vescale
from vescale import ParallelModel, Plan
from vescale.dmodule.plans import block, experts, merge
from vescale.dtensor import random
from vescale.optim import DistributedOptimizer
from vescale_testing import TrainingRecord, keep_float64
from vescale_testing.training import Training

STOP, STEPS = 2, 5  # saved after the first of these, and trained to the second

# 42 rows are those of 2, 3 and 7 data-parallel ranks, also in micro-batches
TRAINING = Training("mixtral", layers=2, dropout=0.1, steps=STEPS, batch=42, seq=6)

adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)

_MLP = r"model\.layers\.\d+\.mlp"
_EXPERTS = rf"{_MLP}\.experts"
_STAGES = ("model.layers.0", "model.layers.1", "model.norm")


@dataclass(frozen=True)
class Layout:
    """How the training is spread over ranks.

    Attributes:
        plan: the plan; its axis "tp" has heads, vocabulary and experts, or experts alone.
        experts_alone: replicate over "tp" everything but the experts.
    """

    plan: Plan
    experts_alone: bool = False

    def parallelize(self, model: nn.Module) -> tuple[ParallelModel, DistributedOptimizer]:
        """Return the parallel model and its optimizer."""
        spread = merge(block(_MLP, output=Replicate()), experts(_EXPERTS, axis="tp")) if self.experts_alone else None
        return vescale.parallelize(
            self.plan,
            model,
            adamw,
            clip_grad_norm=1.0,
            param_groups=param_groups,
            module_plan=spread,
            row_wise=[_EXPERTS],
        )


#: Five groups; in each the first layout is a cheap one, which is started twice.
GROUPS: dict[str, dict[str, Layout]] = {
    "depth": {
        "one": Layout(Plan()),
        "pp2_v": Layout(Plan(pp=2, num_microbatches=3, schedule="zb_v", split=_STAGES)),
        "dp2_tp2_pp2": Layout(Plan(dp=2, tp=2, pp=2, num_microbatches=3, zero=1)),
        "ddp2": Layout(Plan(dp=2)),
    },
    "shards": {
        "tp2": Layout(Plan(tp=2)),
        "hybrid2x3": Layout(Plan(dp=6, zero=3, dp_replicate=2)),
        "dp2_pp2_loop": Layout(
            Plan(dp=2, pp=2, num_microbatches=2, schedule="interleaved_1f1b", zero=2, split=_STAGES)
        ),
        "zero1_dp3": Layout(Plan(dp=3, zero=1)),
    },
    "width": {
        "pp2": Layout(Plan(pp=2, num_microbatches=2)),
        "zero2_dp7": Layout(Plan(dp=7, zero=2)),
        "dp2_ep2": Layout(Plan(dp=2, tp=2, zero=1), experts_alone=True),
        "ddp3": Layout(Plan(dp=3)),
    },
    "sequence": {
        "tp2_sp": Layout(Plan(tp=2, sequence_parallel=True, mode="static")),
        "zero3_dp2": Layout(Plan(dp=2, zero=3)),
        "dp2_tp2_zero3": Layout(Plan(dp=2, tp=2, zero=3)),
        "pp5": Layout(Plan(pp=5, num_microbatches=3, split=(*_STAGES, "lm_head"))),
    },
    "modes": {
        "pp2_dual_pipe_v": Layout(Plan(pp=2, num_microbatches=6, schedule="dual_pipe_v", split=_STAGES)),
        "zero3_dp2_offload": Layout(Plan(dp=2, zero=3, offload=True)),
        "tp2_compiled": Layout(Plan(tp=2, mode="compile")),
    },
}

LAYOUTS: dict[str, Layout] = {name: layout for group in GROUPS.values() for name, layout in group.items()}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices, and norms without decay; on a stage that has none of them a group is empty."""
    named = dict(model.named_parameters())
    norms = [name for name in named if "norm" in name]
    return [
        {"params": [parameter for name, parameter in named.items() if name not in norms]},
        {"params": [named[name] for name in norms], "weight_decay": 0.0},
    ]


def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


class Run:
    """The training on this rank: built, trained to a step, saved, loaded."""

    def __init__(self, layout: Layout, *, seed: int = 0) -> None:
        """Build it; a run that loads may have another seed."""
        with keep_float64():
            torch.manual_seed(seed)
            self.model, self.optimizer = layout.parallelize(vescale.deferred_init(TRAINING.build))
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": _scheduler(self.optimizer),
            "random": random.Streams(),
            "step": 0,
        }

    def train(self, until: int) -> TrainingRecord:
        """Train to a step; return the losses and norms of these steps, and whole parameters and state after them."""
        losses, norms = [], []
        with keep_float64():
            while self.state["step"] < until:
                batch = TRAINING.global_batch(self.state["step"])
                loss = self.model(**self.model.local_batch(batch)).loss
                loss.backward()
                self.optimizer.step()
                self.state["scheduler"].step()
                self.optimizer.zero_grad()
                losses.append(self.model.global_loss(loss))
                norms.append(self.optimizer.grad_norm)
                self.state["step"] += 1
        with self.model.unsharded():
            return TrainingRecord.collect(self.model.module, self.optimizer, losses=losses, grad_norms=norms)

    def save(self, folder: str) -> None:
        """Save all of the state."""
        with keep_float64():  # AdamW counts steps in the default dtype
            vescale.save(folder, self.state, overwrite=True)

    def load(self, folder: str, *, without: str = "") -> None:
        """Load the state, but for one part, which stays as it is."""
        wanted = {name: value for name, value in self.state.items() if name != without}
        with keep_float64():
            vescale.load(folder, wanted, ignore=[without] if without else [])
        self.state.update(wanted)


def train_on_one() -> TrainingRecord:
    """Train as a user of plain torch does, in one process; return the steps after `STOP`."""
    losses, norms = [], []
    with keep_float64():
        torch.manual_seed(0)
        model = TRAINING.build()
        optimizer = adamw(param_groups(model))
        scheduler = _scheduler(optimizer)
        for step in range(STEPS):
            loss = model(**TRAINING.global_batch(step)).loss
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            losses.append(loss.detach())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return TrainingRecord.collect(model, optimizer, losses=losses[STOP:], grad_norms=norms[STOP:])
