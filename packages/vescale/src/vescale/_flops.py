"""Count the floating-point operations of a training step without computing it.

Parameters, buffers and inputs are replaced by tensors on ``meta``, which have shapes and no values, and torch's counter
adds up the matrix products, convolutions and attention of forward and backward, and `_grouped_matmul` those of experts.
What is recomputed in backward is not counted, as the usual definition of model FLOPs utilization has it (arXiv
2204.02311, appendix B). The dtype makes no difference: all floating-point tensors are bfloat16, for grouped matrix
products take no other on ``meta``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vescale.dtensor.extension import checked, map_leaves

from ._output import loss_in


@checked
def count_flops(model: nn.Module, batch: Mapping[str, Any], *, loss_fn: Callable[..., Tensor] | None = None) -> int:
    """Return the floating-point operations of forward and backward of a plain model for one batch.

    Nothing is computed and no memory is used. The model is not changed; call this before `vescale.parallelize`.

    Args:
        model: real, on ``meta`` or deferred.
        batch: its arguments by name, of any size; one sequence is enough, and its tensors may be on ``meta``.
        loss_fn: as for `vescale.parallelize`; its argument ``target`` is taken from the batch.

    Returns:
        The number for this batch; divide it by its tokens for ``Metrics(flops_per_token=...)``.

    Raises:
        ValueError: the model has no loss, or it looks at values, as code that sorts tokens to experts may do.

    Example:
        >>> model = nn.Linear(16, 4, bias=False)
        >>> count_flops(model, {"input": torch.ones(2, 16), "target": torch.ones(2, 4)}, loss_fn=nn.functional.mse_loss)
        512
    """
    state = {name: _on_meta(tensor) for name, tensor in _tensors_of(model)}
    inputs = {name: map_leaves(_on_meta, value) for name, value in batch.items()}
    target = [inputs.pop("target")] if loss_fn is not None and "target" in inputs else []
    grouped: dict[Any, Any] = {torch.ops.aten._grouped_mm: _grouped_matmul}
    counter = FlopCounterMode(display=False, custom_mapping=grouped)
    with torch.enable_grad(), counter, torch.device("meta"):
        try:
            output = torch.func.functional_call(model, state, (), inputs)
            loss = output if loss_fn is None else loss_fn(output, *target)
            loss = loss_in(loss)
            if loss is not None:
                loss.backward()
        except Exception as error:  # of the user's code
            raise ValueError(
                "count_flops: expected a model that runs on this batch without values, got "
                f"{type(error).__name__}: {error}; correct the batch or loss_fn, or pass flops_per_token as a number, "
                "about six times the parameters that a token uses"
            ) from error
    if loss is None:
        raise ValueError(
            f"count_flops: expected a scalar loss, got {type(output).__name__} from the model; pass labels in the "
            "batch, or loss_fn"
        )
    return int(counter.get_total_flops())


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
    meta = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
    return meta.requires_grad_(value.requires_grad)


def _grouped_matmul(left: Sequence[int], right: Sequence[int], *_: object, **__: object) -> int:
    """Return the operations of a product of groups of rows, of columns, or of a sum over groups.

    A matrix whose rows or columns are groups has two dims and a stack of matrices has three. Each element of the
    larger operand's groups meets the other operand once, so of two stacks the groups count, and otherwise they do not.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]
