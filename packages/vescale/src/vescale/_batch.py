"""Slice a global batch for the data-parallel ranks: pure functions over dicts of tensors.

Every rank gets the same global batch and takes its own slice along dim 0:

    rows of the global batch    | 0 1 2 3 | 4 5 6 7 |        dp = 2: coord 0 takes rows 0-3, coord 1 rows 4-7
    micro-batches of a rank     | 0 1 | 2 3 |                 num_microbatches = 2, in this order

If the rows of a rank do not divide by the number of micro-batches, the first ones have one row more. The loss of the
run is the mean of the slices' means, by their rows. It equals the mean over the global batch only if all slices have
equally many counted targets per row. Integers of -100 are targets that losses ignore, under whatever name they come, so
slices with different numbers of them raise an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED_TARGET = -100
_NUM_ITEMS = "num_items_in_batch"


def slice_batch(
    batch: Mapping[str, Any], *, coord: int, dp: int, num_microbatches: int = 1, ep: int = 1
) -> dict[str, Any]:
    """Return the rows of every tensor for one data-parallel coordinate, and all other values unchanged.

    Args:
        batch: the global batch. Tensors of at least one dim have the sequences in dim 0.
        coord: this rank's coordinate on the axis.
        dp: size of the axis.
        num_microbatches: micro-batches of a rank's slice.
        ep: ranks over which the rows of a slice lie inside the model.

    Raises:
        TypeError: ``batch`` is not a mapping.
        ValueError: there is no tensor to slice, tensors differ in dim 0, their length is not divisible by ``dp``, or
            gives a rank fewer rows than micro-batches, or the slices have different numbers of counted targets per row.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"local_batch: expected a dict of the model's arguments as batch, got {type(batch).__name__}; pass them by "
            "name, such as {'input_ids': tokens}"
        )
    lengths = {name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
    if not lengths:
        raise ValueError(
            "local_batch: expected a tensor with sequences in dim 0, got none among "
            f"{', '.join(map(str, batch)) or 'no arguments'}; pass the inputs of the global batch"
        )
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(
            f"local_batch: expected the same number of sequences in dim 0 of every tensor, got {listed}; give each "
            "tensor one row per sequence"
        )
    first, length = next(iter(lengths.items()))
    if length % dp:
        raise ValueError(
            f"local_batch: expected a multiple of dp = {dp} sequences, got {length} in {first}; change the batch size "
            "or the plan"
        )
    rows = length // dp
    if rows < num_microbatches * ep:
        raise ValueError(
            f"local_batch: expected at least dp * num_microbatches = {dp * ep} * {num_microbatches} = "
            f"{dp * ep * num_microbatches} sequences, got {length} in {first}; change the batch size or the plan"
        )
    least, rest = divmod(rows, num_microbatches)
    sizes = [least + (index < rest) for index in range(num_microbatches)] * dp
    if _NUM_ITEMS not in batch:
        for name in lengths:
            check_equal_weight(name, batch[name], sizes=sizes)
    return {key: value[coord * rows : (coord + 1) * rows] if key in lengths else value for key, value in batch.items()}


def check_equal_weight(name: str, targets: Tensor, *, sizes: Sequence[int]) -> None:
    """Raise `ValueError` unless every slice of ``targets`` has the same number of counted targets per row.

    Integers of -100 are not counted. A causal model drops the first target of each sequence, so the numbers must be
    equal both with and without the first column.

    Args:
        name: of the targets, for the message.
        targets: of the global batch.
        sizes: rows of each slice.
    """
    if len(sizes) == 1 or targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return
    counted = (targets != IGNORED_TARGET).reshape(targets.shape[0], -1)
    for columns in (counted, counted[:, 1:]):
        counts = torch.stack([part.sum() for part in columns.split(list(sizes))]).tolist()  # the host waits once
        if any(count * sizes[0] != counts[0] * size for count, size in zip(counts, sizes, strict=True)):
            of = f"slices of {name!r}" if len(set(sizes)) == 1 else f"slices of {name!r}, of {list(sizes)} rows"
            raise ValueError(
                f"local_batch: expected equally many counted targets (not {IGNORED_TARGET}) in the {len(sizes)} {of}, "
                f"got {counts}: the mean of their means is not the mean over the global batch; "
                "mask each slice equally, or divide by the number in the whole batch: put "
                f"{_NUM_ITEMS}=<counted targets> into the batch, if the model's loss takes it (Hugging Face models do)"
            )
