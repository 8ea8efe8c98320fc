"""Values that every rank has its own of: the position of a data loader, the state of a random generator.

The value of rank 3 at the path ``loader`` is the tensor ``loader/rank-3`` of a checkpoint: bytes of a JSON text, in the
data file of that rank. So ranks do not send each other their values, and the manifest has one row for each.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from .._errors import CheckpointError
from .._format.dtypes import ITEM_BYTES, dtype_name
from .._format.manifest import Manifest


@dataclass
class PerRank:
    """A value of a state that differs between ranks, and what becomes of it on another number of ranks.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, or None, bool, int, float, str, bytes, a tensor,
            an array of numpy, or a list, tuple or dict of them. A load replaces it, whatever it is, or passes what was
            saved to the object.
        resize: returns the value of a rank from those of all ranks that saved, in order, when another number of ranks
            loads; it gets ``(values, rank, num_ranks)``. Without it that is an error.

    Example:
        >>> position = PerRank({"epoch": 1, "sample": 64}, resize=lambda values, rank, num_ranks: values[0])
        >>> save("runs/step-10", {"position": position}, overwrite=True)
        >>> position.value = None
        >>> _ = load("runs/step-10", {"position": position})
        >>> position.value
        {'epoch': 1, 'sample': 64}
    """

    value: Any
    resize: Callable[[list[Any], int, int], Any] | None = None

    def __post_init__(self) -> None:
        if self.resize is not None and not callable(self.resize):
            raise TypeError(
                f"PerRank: expected a function for resize, got {self.resize!r}; it takes (values, rank, num_ranks) and "
                "returns the value of the rank"
            )

    def to_save(self, path: str, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensor of this rank."""
        value = self.value.state_dict() if _is_object(self.value) else self.value
        try:
            text = json.dumps(_encoded(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path!r}: expected a value of plain Python, tensors and arrays in PerRank, got {error}; convert it"
            ) from None
        return {_name(rank): torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def to_load(self, path: str, rank: int, num_ranks: int, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return tensors for what this rank needs of the checkpoint: its own value, or those of all ranks.

        Raises:
            CheckpointError: another number of ranks has saved, and there is no ``resize``.
        """
        prefix = f"{path}/rank-"
        found = [name for name in manifest.tensors if re.fullmatch(re.escape(prefix) + "[0-9]+", name)]
        saved = sorted(int(name.removeprefix(prefix)) for name in found)
        if len(saved) in (0, num_ranks):
            saved = [rank]
        elif self.resize is None:
            raise CheckpointError(
                f"{path!r}: expected the values of {num_ranks} ranks, got those of {len(saved)} in the checkpoint; say "
                "what a rank makes of them, PerRank(value, resize=lambda values, rank, num_ranks: ...)"
            )
        stored = {each: manifest.tensors.get(f"{prefix}{each}") for each in saved}
        shapes = {each: (0,) if own is None else own.meta.shape for each, own in stored.items()}
        return {_name(each): torch.zeros(shape, dtype=torch.uint8) for each, shape in shapes.items()}

    def take(self, path: str, rank: int, num_ranks: int, filled: dict[str, torch.Tensor]) -> None:
        """Take what was saved: on the same number of ranks one's own value, else what ``resize`` makes of all."""
        if not any(text.numel() for text in filled.values()):
            return  # not stored, with strict=False
        values = [_value_of(path, text) for text in filled.values()]
        if list(filled) == [_name(rank)]:
            (value,) = values
        else:
            assert self.resize is not None
            value = self.resize(values, rank, num_ranks)
        if _is_object(self.value):
            self.value.load_state_dict(value)
        else:
            self.value = value


def _is_object(value: Any) -> bool:
    return callable(getattr(type(value), "state_dict", None))


def _name(rank: int) -> str:
    return f"rank-{rank}"


def _value_of(path: str, text: torch.Tensor) -> Any:
    try:
        return _decoded(json.loads(text.numpy().tobytes()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path!r}: expected a value of PerRank, got {error}; use another checkpoint") from None


def _encoded(value: Any) -> Any:
    """Return the JSON form of a value: what JSON does not know is an object with one key that says what it is."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return list(map(_encoded, value))
    if type(value) is tuple:
        return {"tuple": list(map(_encoded, value))}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, numpy.generic):
        return _encoded(value.item())
    if isinstance(value, numpy.ndarray):
        return {"array": _encoded_tensor(torch.from_numpy(numpy.ascontiguousarray(value)))}
    if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return {"tensor": _encoded_tensor(value)}
    raise TypeError(f"{type(value)}")


def _encoded_tensor(value: torch.Tensor) -> list[Any]:
    values = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dtype_name(values.dtype) not in ITEM_BYTES:
        raise TypeError(f"a tensor of {values.dtype}")
    data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [dtype_name(values.dtype), list(values.shape), base64.b64encode(data).decode()]


def _decoded(form: Any) -> Any:
    if isinstance(form, list):
        return list(map(_decoded, form))
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tuple":
        return tuple(map(_decoded, content))
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind not in ("array", "tensor"):
        raise ValueError(f"the kind {kind!r}")
    dtype, shape, data = content
    if dtype not in ITEM_BYTES:
        raise ValueError(f"the dtype {dtype!r}")
    memory = bytearray(base64.b64decode(data, validate=True))
    flat = (
        torch.frombuffer(memory, dtype=getattr(torch, dtype)) if memory else torch.empty(0, dtype=getattr(torch, dtype))
    )
    return flat.reshape(shape).numpy() if kind == "array" else flat.reshape(shape)
