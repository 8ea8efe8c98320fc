"""`StepOutput`: what a forward with a loss returns, the same under every plan.

    output.loss                  the loss, on every rank; output.loss.backward() accumulates the gradients
    output.losses                the loss of each micro-batch
    output.logits, output[1]     what the module returned besides, where one call of the module had all rows of this
                                 rank: without stages and micro-batches

With stages or micro-batches no call has all rows. ``ParallelModel.outputs`` returns them there, and everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_NOWHERE = object()


def loss_in(output: Any) -> Tensor | None:
    """Return the scalar loss in a module's output: itself, ``output.loss`` or ``output["loss"]``; None without one."""
    loss = output
    if not isinstance(output, Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


class StepOutput:
    """The loss of a step, and the module's output where this rank has it.

    Attributes of the module's output are attributes of this object, and so are its items.

    Attributes:
        loss: mean over the rows of this rank's part of the batch, a 0-dim tensor equal on every stage;
            ``loss.backward()`` accumulates the gradients.
        losses: loss of each micro-batch as the model or ``loss_fn`` gave it, detached, ``[num_microbatches]``, equal on
            every stage.

    Raises:
        AttributeError: for what the module's output lacks, or what stages and micro-batches leave in parts.

    Example:
        >>> import torch
        >>> output = StepOutput(torch.tensor(2.0), torch.tensor([2.0]), {"loss": torch.tensor(2.0), "logits": [0, 1]})
        >>> output.loss.item(), output["logits"]
        (2.0, [0, 1])
    """

    loss: Tensor
    losses: Tensor

    def __init__(self, loss: Tensor, losses: Tensor, output: Any = _NOWHERE) -> None:
        self.loss, self.losses = loss, losses
        self._output = output

    @property
    def output(self) -> Any:
        """The module's own output for all rows of this rank.

        Raises:
            AttributeError: the plan has stages or micro-batches.
        """
        if self._output is _NOWHERE:
            raise AttributeError  # Python asks `__getattr__` then, which says why
        return self._output

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_output" not in vars(self):
            raise AttributeError(name)
        if self._output is _NOWHERE:
            raise AttributeError(_ELSEWHERE.format(what=repr(name)))
        return getattr(self._output, name)

    def __getitem__(self, key: Any) -> Any:
        if key == "loss":
            return self.loss
        if self._output is _NOWHERE:
            raise KeyError(_ELSEWHERE.format(what=repr(key)))
        return self._output[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.output)

    def __len__(self) -> int:
        return len(self.output)

    def __contains__(self, key: object) -> bool:
        return key == "loss" or (self._output is not _NOWHERE and key in self._output)

    def __repr__(self) -> str:
        own = "" if self._output is _NOWHERE else f", {self._output!r}"
        return f"StepOutput(loss={self.loss!r}, losses={self.losses!r}{own})"


_ELSEWHERE = (
    "expected loss or losses of a step with stages or micro-batches, none of which has all rows, got {what}; call "
    "model.outputs(..., select=lambda output: output.logits) for rows of the output"
)
