"""The model that is run: built without memory where it is described, and copied with fake parameters.

A model may be given as

* an ``nn.Module``, real, on ``torch.device("meta")`` or deferred;
* a class or function with arguments: ``functools.partial(GPT, config)`` or ``(GPT, config)``;
* a config of Hugging Face, which is built by ``from_config`` of the first automatic class that knows it.

The last two are called on the meta device.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .values import Values

_TWO_STACKS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_ONE_STACK = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification", "AutoModel")


def build(owner: str, source: Any) -> nn.Module:
    """Return the module that a source describes, see the module; ``owner`` begins errors.

    Raises:
        TypeError: the source is none of these, or describes no module.
    """
    if isinstance(source, nn.Module):
        return source
    make = _maker(owner, source)
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{owner}: expected a class or function that returns an nn.Module as model, got one that returns "
            f"{type(model).__name__}; pass the model, functools.partial(Model, ...), (Model, arguments...) or a config "
            "of Hugging Face"
        )
    return model


def _maker(owner: str, source: Any) -> Any:
    if isinstance(source, functools.partial) or (isinstance(source, type) and issubclass(source, nn.Module)):
        return source
    if isinstance(source, tuple) and source and callable(source[0]):
        keywords = source[-1] if isinstance(source[-1], dict) and len(source) > 2 else {}
        return functools.partial(source[0], *source[1 : len(source) - bool(keywords)], **keywords)
    library = sys.modules.get("transformers")
    if library is not None and isinstance(source, library.PretrainedConfig):
        return functools.partial(_from_config, library, source)
    raise TypeError(
        f"{owner}: expected an nn.Module, functools.partial(Model, ...), (Model, arguments...) or a config of Hugging "
        f"Face as model, got {source!r}; build the model with torch.device('meta') and pass it"
    )


def _from_config(library: Any, config: Any) -> nn.Module:
    named = [getattr(library, name) for name in config.architectures or () if hasattr(library, name)]
    if named:
        model: nn.Module = named[0](config)
        return model
    for name in _TWO_STACKS + _ONE_STACK if getattr(config, "is_encoder_decoder", False) else _ONE_STACK:
        try:
            model = getattr(library, name).from_config(config)
        except (ValueError, KeyError, AttributeError):  # this class does not know the config
            continue
        return model
    raise TypeError(f"expected a config that an automatic class of transformers knows, got {type(config).__name__}")


def fake_copy(model: nn.Module, values: Values) -> nn.Module:
    """Return a copy of a model with fake parameters and buffers; the model itself stays as it is.

    Small buffers of integers keep their values, if the model is real.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(values.fake_like(parameter), requires_grad=parameter.requires_grad)
    others = [*model.buffers(), *(value for module in model.modules() for value in vars(module).values())]
    for tensor in others:
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            memo[id(tensor)] = _buffer(tensor, values)
    return copy.deepcopy(model, memo)


def _buffer(tensor: Tensor, values: Values) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return values.fake_like(tensor)
    if type(tensor) is Tensor and not tensor.is_meta:
        return tensor.detach().clone().cpu()
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
