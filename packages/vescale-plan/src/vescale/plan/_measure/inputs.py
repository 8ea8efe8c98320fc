"""Example inputs of any number of rows, for a model without a description.

    given by the caller       a batch, or a function of rows and sequence length; rows are dim 0 of its tensors
    Hugging Face              by ``main_input_name``: tokens and labels, images, or sounds
    a model with embeddings   tokens, and targets if the forward takes them
    other models              numbers, with the last dim of the first matrix

The values do not matter: integers are 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_map
from .values import Values

Inputs = Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]]
_TARGETS = ("labels", "targets", "target")


def candidates(
    model: nn.Module, rows: int, sequence_length: int, values: Values, given: Inputs | None
) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments for a call of ``model``, the most likely first."""
    if given is not None:
        batch = given(rows, sequence_length) if callable(given) else given
        yield {name: _with_rows(value, rows, values) for name, value in batch.items()}
        return
    names = [name for name, each in inspect.signature(model.forward).parameters.items() if each.kind not in (2, 4)]
    tokens = torch.zeros(rows, sequence_length, dtype=torch.long)
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)

    def numbers(*shape: int) -> Tensor:
        with values.mode:
            return torch.empty(rows, *shape, dtype=dtype)

    config, first = getattr(model, "config", None), getattr(model, "main_input_name", names[0] if names else "input")
    targets: dict[str, Any] = {name: tokens for name in _TARGETS if name in names}
    if "use_cache" in names:
        targets["use_cache"] = False
    if first == "pixel_values" and config is not None:
        size = getattr(config, "vision_config", config).image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        labels = {"labels": torch.zeros(rows, dtype=torch.long)} if "labels" in names else {}
        yield {first: numbers(getattr(config, "num_channels", 3), height, width)} | labels
    elif first == "input_features" and config is not None:
        length = 2 * config.max_source_positions
        decoded = torch.zeros(rows, min(sequence_length, config.max_target_positions), dtype=torch.long)
        yield {first: numbers(config.num_mel_bins, length), "labels": decoded}
    else:
        yield from _sequences(model, names, first, tokens, targets, numbers)


def _sequences(
    model: nn.Module,
    names: list[str],
    first: str,
    tokens: Tensor,
    targets: dict[str, Any],
    numbers: Callable[..., Tensor],
) -> Iterator[dict[str, Any]]:
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        yield {first: tokens} | targets
        yield {first: tokens}
        if "decoder_input_ids" in names:
            yield {first: tokens, "decoder_input_ids": tokens}
        if "pixel_values" in names:
            config: Any = model.config
            size = config.vision_config.image_size
            yield {first: tokens, "pixel_values": numbers(3, size, size), "return_loss": True}
    width = next((parameter.shape[-1] for parameter in model.parameters() if parameter.dim() == 2), 1)
    swaps = any(getattr(module, "batch_first", True) is False for module in model.modules())
    whole = numbers(tokens.shape[1], width)
    yield {first: whole.transpose(0, 1) if swaps else whole}
    yield {first: numbers(width)}


def _with_rows(value: Any, rows: int, values: Values) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    shape = (rows, *value.shape[1:])
    if value.dtype.is_floating_point:
        with values.mode:
            return torch.empty(shape, dtype=value.dtype)
    return torch.zeros(shape, dtype=value.dtype)


def without_data(batch: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a batch in which floating-point numbers are fake; integers are real, and 0 on the meta device."""

    def emptied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            return values.fake_like(leaf).requires_grad_(leaf.requires_grad)
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.detach().cpu()

    found: dict[str, Any] = tree_map(emptied, dict(batch))
    return found
