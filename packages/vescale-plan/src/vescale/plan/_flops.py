"""`count_flops`: the floating-point operations of a training step, from a run on tensors without data.

The run is that of a profile (`_measure`), so a profile and this function give the same number for the same inputs.
Products of matrices, convolutions and attention of forward and backward count, by torch's formulas; products of experts
count for the tokens that they get under an even load. What is recomputed in backward is not counted, as the usual
definition of model FLOPs utilization has it (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ._checked import CheckedInside, checked
from ._measure.build import build
from ._measure.run import count
from ._profile import Model


class _NoLossError(Exception):
    """The model returns no scalar loss."""


@checked
def count_flops(
    model: CheckedInside[Model], batch: Mapping[str, Any], *, loss_fn: Callable[..., Tensor] | None = None
) -> int:
    """Return the floating-point operations of forward and backward of a plain model for one batch.

    Nothing is computed and no memory is used. The model is not changed; call this before ``vescale.parallelize``.

    Args:
        model: as for `profile`: real, on ``meta`` or deferred, or a description.
        batch: its arguments by name, of any size; one sequence is enough, and its tensors may be on ``meta``.
        loss_fn: computes the loss from the model's output, and from the batch's ``target`` if it has one.

    Returns:
        The number for this batch. Divided by its tokens, it is that of ``vescale.Metrics(flops_per_token=...)``.

    Raises:
        TypeError: ``model`` is no model, and no description of one.
        ValueError: the model has no loss, or does not run without data.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(16, 4, bias=False)
        >>> count_flops(model, {"input": torch.ones(2, 16), "target": torch.ones(2, 4)}, loss_fn=nn.functional.mse_loss)
        512
    """
    module = build("count_flops", model)
    try:
        return count(module, batch, lambda output, *target: _loss(output, target, loss_fn))
    except _NoLossError as error:
        raise ValueError(
            f"count_flops: expected a scalar loss, got {error}; pass labels in the batch, or loss_fn"
        ) from None
    except Exception as error:  # of the model's own code
        raise ValueError(
            f"count_flops: expected a model that runs on this batch without data, got {type(error).__name__}: {error}; "
            "correct the batch or loss_fn, or pass flops_per_token as a number, about six times the parameters that a "
            "token uses"
        ) from error


def _loss(output: Any, target: tuple[Any, ...], loss_fn: Callable[..., Tensor] | None) -> Tensor:
    found = output if loss_fn is None else loss_fn(output, *target)
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", found)
    if not isinstance(loss, Tensor) or loss.dim():
        source = "the model" if loss_fn is None else "loss_fn"
        kind = "Tensor" if isinstance(loss, Tensor) else type(found).__name__
        raise _NoLossError(f"{kind} from {source}")
    return loss
