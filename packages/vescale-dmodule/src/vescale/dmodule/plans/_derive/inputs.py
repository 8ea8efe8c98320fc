"""Example inputs for a module that comes without: guessed from its config, its signature and its first layers.

Nothing is run here. The guesses are tried one after the other on fake tensors, the most likely first.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["guesses"]

ROWS, TOKENS = 2, 8
MAX_GUESSES = 64

Shape = tuple[int, ...]


def guesses(module: nn.Module, num_tokens: int = TOKENS) -> Iterator[dict[str, object]]:
    """Yield example inputs by name of argument; tensors are on the meta device.

    Args:
        module: any module. Of its config the sizes of images and sounds are read, if it has one.
        num_tokens: of a sequence.
    """
    taken = inspect.signature(module.forward).parameters
    extra: dict[str, object] = {"use_cache": False} if "use_cache" in taken and hasattr(module, "config") else {}
    for guess in itertools.islice(
        itertools.chain(_by_config(module, num_tokens), _by_layers(module, num_tokens)), MAX_GUESSES
    ):
        if all(name in taken for name in guess):
            yield guess | extra


def _by_config(module: nn.Module, num_tokens: int) -> Iterator[dict[str, object]]:
    """Yield inputs of a model of Hugging Face: its main input, and those of a decoder or of a second tower."""
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", None)
    if config is None or main is None:
        return
    taken = inspect.signature(module.forward).parameters
    tokens = {name: _ids(num_tokens) for name in ("input_ids", "decoder_input_ids")}
    known = {**tokens, **{name: tensor for name in taken if (tensor := _of_config(config, name, module)) is not None}}
    first = {main: known[main]} if main in known else {}
    if getattr(config, "is_encoder_decoder", False):
        yield first | {"decoder_input_ids": tokens["decoder_input_ids"]}
    yield first | {name: known[name] for name in ("input_ids", "pixel_values") if name in taken and name in known}
    yield first
    dummies = getattr(module, "dummy_inputs", None)
    if isinstance(dummies, dict):
        yield {name: _like(value) for name, value in dummies.items()}


def _of_config(config: object, name: str, module: nn.Module) -> Tensor | None:
    """Return an image, a spectrogram or a sound for an argument of this name."""
    owner = getattr(config, "vision_config", None) or config
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    if name == "pixel_values":
        size = getattr(owner, "image_size", None) or 32
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return _floats((ROWS, getattr(owner, "num_channels", None) or 3, height, width), dtype)
    if name == "input_features":
        bins, length = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 64)
        return _floats((ROWS, bins, length), dtype)
    if name == "input_values":
        return _floats((ROWS, 4000), dtype)
    return None


def _like(value: object) -> object:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _ids(num_tokens: int) -> Tensor:
    return torch.zeros(ROWS, num_tokens, dtype=torch.int64, device="meta")


def _floats(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


# ------------------------------------------------------------------------------------------------- other modules


def _by_layers(module: nn.Module, num_tokens: int) -> Iterator[dict[str, object]]:
    """Yield inputs for the arguments that forward needs, each of a form that a first layer takes."""
    signature = inspect.signature(module.forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in signature.parameters.values() if p.kind in kinds]
    needed = [p.name for p in named if p.default is inspect.Parameter.empty] or [p.name for p in named[:1]]
    forms = list(itertools.islice(dict.fromkeys(_forms(module, num_tokens)), 6))
    made = [_floats(shape, dtype) for shape, dtype in forms]
    alike = [(tensor,) * len(needed) for tensor in made]
    mixed = [values for values in itertools.product(made, repeat=len(needed)) if len(set(map(id, values))) > 1]
    for values in (*alike, *mixed):
        yield dict(zip(needed, values, strict=True))


def _forms(module: nn.Module, num_tokens: int) -> Iterator[tuple[Shape, torch.dtype]]:
    """Yield the shape and dtype that each layer takes, in the order of the layers."""
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        dtype = own[0].dtype if own else torch.float32
        if isinstance(part, nn.Embedding):
            yield (ROWS, num_tokens), torch.int64
        elif isinstance(part, nn.Linear):
            yield (ROWS, num_tokens, part.in_features), dtype
            yield (ROWS, part.in_features), dtype
        elif isinstance(part, nn.MultiheadAttention):
            yield (ROWS, num_tokens, part.embed_dim), part.out_proj.weight.dtype
        elif isinstance(part, nn.LayerNorm | nn.RMSNorm):
            yield (ROWS, num_tokens, *part.normalized_shape), dtype
        elif isinstance(part, nn.RNNBase):
            yield (ROWS, num_tokens, part.input_size), dtype
        elif isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            for size in (32, 224):
                yield (ROWS, part.in_channels, *[size] * len(part.kernel_size)), dtype
