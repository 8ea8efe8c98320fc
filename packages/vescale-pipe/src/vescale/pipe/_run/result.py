"""What the results of micro-batches are together: the loss of the batch, or its rows.

The last stage has them, and sends one tensor to all stages at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .microbatch import Share
from .rows import LossRule, RowChecks, unequal_counts
from .values import TensorMeta


class BatchLoss:
    """The loss of a batch from those of its micro-batches.

    Args:
        rule: how they make it.
        rows: checks of what mixes rows.
        is_here: whether this rank runs the last stage.
        shares: those of the micro-batches.

    Attributes:
        counts: notes the targets of micro-batches, where they may differ.
        value: the loss of the batch, once it is shared.
        losses: those of the micro-batches.
    """

    def __init__(self, rule: LossRule, rows: RowChecks, *, is_here: bool, shares: Sequence[Share]) -> None:
        self.counts = rows.target_counts() if is_here and rule.counts_targets else None
        self.value: torch.Tensor
        self.losses: torch.Tensor
        self._rule, self._rows, self._shares = rule, rows, shares
        self._of_microbatch: dict[int, torch.Tensor] = {}
        self._differs = False

    def add(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return what a micro-batch adds to the loss, divided before its backward as by ``(loss / n).backward()``."""
        plain = _plain(loss)
        self._of_microbatch[microbatch] = plain.detach()
        return self._rule.part(plain, self._shares[microbatch])

    def combined(self) -> torch.Tensor:
        """Return what the last stage sends: the sum, in order, whether numbers of targets differ, and the losses."""
        losses = [self._of_microbatch[microbatch] for microbatch in sorted(self._of_microbatch)]
        first, *others = map(self._rule.part, losses, self._shares)
        differs = self.counts is not None and self._rows.differ(self.counts, self._shares)
        return torch.stack([sum(others, first), first.new_tensor(differs), *losses])

    def empty(self, metas: Sequence[TensorMeta], device: torch.device) -> torch.Tensor:
        """Return a tensor for what the last stage sends; ``metas`` are those of the micro-batches' results."""
        return torch.zeros(2 + len(metas), dtype=metas[0].dtype, device=device)

    def take(self, numbers: torch.Tensor) -> None:
        """Take what the last stage has sent."""
        self._differs = self._rule.counts_targets and bool(numbers[1])
        self.value, self.losses = numbers[0], numbers[2:]

    def check(self) -> None:
        """Check that all parts of the batch count equally many targets.

        Raises:
            PipelineError: on every stage, if they do not.
        """
        if self._differs:
            raise unequal_counts([] if self.counts is None else self.counts.of_microbatches())


class BatchRows:
    """A tensor of the whole batch from those of its micro-batches, along dim 0; ``value``, once it is shared."""

    counts = None

    def __init__(self) -> None:
        self.value: torch.Tensor
        self._of_microbatch: dict[int, torch.Tensor] = {}

    def add(self, microbatch: int, rows: torch.Tensor) -> torch.Tensor:
        """Keep the rows of a micro-batch."""
        self._of_microbatch[microbatch] = _plain(rows)
        return self._of_microbatch[microbatch]

    def combined(self) -> torch.Tensor:
        """Return what the last stage sends: all rows."""
        return torch.cat([self._of_microbatch.pop(microbatch) for microbatch in sorted(self._of_microbatch)])

    def empty(self, metas: Sequence[TensorMeta], device: torch.device) -> torch.Tensor:
        """Return a tensor for what the last stage sends; ``metas`` are those of the micro-batches' results."""
        num_rows, others = sum(meta.shape[0] for meta in metas), metas[0].shape[1:]
        return torch.empty(num_rows, *others, dtype=metas[0].dtype, device=device)

    def take(self, rows: torch.Tensor) -> None:
        """Take what the last stage has sent."""
        self.value = rows


def _plain(result: torch.Tensor) -> torch.Tensor:
    """Return a result as a plain tensor; a DTensor is brought together over its mesh first."""
    if not isinstance(result, DTensor):
        return result
    return result.redistribute(placements=[Replicate()] * result.device_mesh.ndim).to_local()


def default_loss(output: Any) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        TypeError: the output has no scalar loss.
    """
    loss: Any = output
    if not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise TypeError(
            f"expected a scalar loss: output.loss, output['loss'] or a scalar tensor, got {what}; pass labels to the "
            "model, or loss_fn=... where the engine or the parallel model is made"
        )
    return loss
