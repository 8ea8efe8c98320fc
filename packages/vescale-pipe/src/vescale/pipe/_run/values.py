"""Values that cross stages: their identity, their metadata, and placeholders without storage.

A **value** is a tensor that depends on a unit's output. Its identity is the same on every stage: the index of its call
in the program, and its index among the call's outputs. Its **home** is the stage that computes it. On the home a value
is an ordinary tensor. On other stages it is a ``Placeholder``, a tensor that reports the value's shape, dtype and
device and owns no storage. A received copy is stored in ``Value.received``; the user's variables keep the placeholder
(or, if this rank runs both stages, the original).

Tensors that depend on no unit (masks, position ids, rotary tables, inputs) are **universal**: real on every stage.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import make_wrapper, no_torch_function, waited
from .tree import Leaf

ValueId = tuple[int, int]  # (position of the call in the program, position among its outputs)


class PipelineError(RuntimeError):
    """Raised for a program that cannot run as a pipeline, and for a failure of another stage."""


@dataclass(frozen=True)
class ShardedMeta:
    """Metadata to rebuild a DTensor from its local tensor; the receiver finds its mesh by the axis names."""

    placements: tuple[Placement, ...]
    axis_names: tuple[str, ...]
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]


@dataclass(frozen=True)
class TensorMeta(Leaf):
    """Metadata of a tensor. Shapes are global for DTensors."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    sharded: ShardedMeta | None = None

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        if self.sharded is not None:
            placements = ", ".join(map(str, self.sharded.placements))
            text += f" ({placements} over {', '.join(self.sharded.axis_names)})"
        return text

    @property
    def local_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of the local tensor."""
        if self.sharded is None:
            return self.shape, self.stride
        return self.sharded.local_shape, self.sharded.local_stride

    def same_data(self, other: TensorMeta) -> bool:
        """Return whether shape, dtype, placements and ``requires_grad`` are equal; strides may differ."""
        mine, theirs = self.sharded, other.sharded
        if (self.shape, self.dtype, self.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            return False
        if mine is None or theirs is None:
            return mine is theirs
        return (mine.placements, mine.local_shape) == (theirs.placements, theirs.local_shape)


@dataclass(frozen=True)
class SameAs(Leaf):
    """An output that is an argument of the call (identities, in-place operators): the argument's index."""

    argument: int


@dataclass(frozen=True)
class Repeated(Leaf):
    """An output that is the same tensor as an earlier output of the call: the earlier output's index."""

    output: int


@dataclass
class Value:
    """A value of the program. ``received`` has the tensors of stages where it is not the user's own."""

    id: ValueId
    home: int
    meta: TensorMeta
    received: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptValue:
    """What an attribute has kept of a forward: the identity of a value."""

    identity: int


_VALUES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_value(tensor: torch.Tensor) -> None:
    """Note that a tensor is one of some forward, which makes others in their place."""
    _VALUES[tensor] = True


def is_value(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a value of some forward."""
    return tensor in _VALUES


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return the metadata of a real tensor.

    Raises:
        PipelineError: the tensor is sparse, or its mesh axes have no names.
    """
    if tensor.layout is not torch.strided:
        raise PipelineError(
            f"expected a dense tensor to cross pipeline stages, got {tensor.layout} of shape {list(tensor.shape)}; "
            "convert it with .to_dense()"
        )
    sharded = None
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names
        if names is None:
            raise PipelineError(
                f"expected a DTensor over a mesh with axis names to cross pipeline stages, got {tensor.device_mesh}; "
                "build the mesh with init_device_mesh(..., mesh_dim_names=(...))"
            )
        local = cast(DTensor, tensor.detach()).to_local()
        sharded = ShardedMeta(tuple(tensor.placements), tuple(names), tuple(local.shape), tuple(local.stride()))
    return TensorMeta(
        tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type, tensor.requires_grad, sharded
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor to send: this rank's elements, detached."""
    tensor = tensor.detach()
    return waited(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def from_local_part(local: torch.Tensor, meta: TensorMeta, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return the value of a received local tensor; the inverse of ``local_part`` on another stage."""
    if meta.sharded is None:
        return local
    return DTensor.from_local(
        local,
        mesh,
        meta.sharded.placements,
        run_check=False,
        shape=torch.Size(meta.shape),
        stride=meta.stride,
    )


@functools.lru_cache(maxsize=1024)
def gradient_meta(meta: TensorMeta) -> TensorMeta:
    """Return the metadata of a sent gradient: contiguous, with the value's placements and Replicate for Partial."""
    sharded = meta.sharded
    if sharded is not None:
        placements = tuple(Replicate() if p.is_partial() else p for p in sharded.placements)
        stride = contiguous_stride(sharded.local_shape)
        sharded = replace(sharded, placements=placements, local_stride=stride)
    return replace(meta, stride=contiguous_stride(meta.shape), sharded=sharded)


def local_gradient(gradient: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the local tensor of a gradient in the layout of ``gradient_meta``; partial gradients are reduced."""
    if meta.sharded is not None:
        placements = cast(ShardedMeta, gradient_meta(meta).sharded).placements
        gradient = cast(DTensor, gradient).redistribute(placements=placements)
    return local_part(gradient).contiguous()


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(torch.empty(shape, device="meta").stride())


class Placeholder(torch.Tensor):
    """Placeholder for a value of another stage: shape, dtype and device, no storage.

    The running frame intercepts operators on placeholders and leaves them to the home stage. Any other operator on a
    placeholder raises here.
    """

    value: Value
    origin: str

    @staticmethod
    def __new__(cls, value: Value, *, device: torch.device, origin: str) -> Placeholder:
        meta = value.meta
        self = make_wrapper(
            cls, meta.shape, stride=meta.stride, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad
        )
        self.value = value
        self.origin = origin
        return self

    __torch_function__: Any = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types, kwargs
        found = next((a for a in args if isinstance(a, Placeholder)), None)
        text = f"{found.origin}, {found.value.meta}" if found is not None else "a value of another stage"
        raise PipelineError(
            f"operator {func}: expected values of this stage, got {text}, inside an opaque object or a custom autograd "
            "function; pass it as an argument of the module (in tuples, lists, dicts and dataclasses), or move the "
            "code into a module of one stage"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`{name}` is not available on {self.__dict__.get('origin', 'a placeholder')}, a value of another stage; "
            "code outside of stage modules may use tensor operators, shapes, dtypes and devices"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder({self.origin}, {self.value.meta})"


def unwrap(leaf: Any, stage: int) -> Any:
    """Return a stage's copy of a placeholder, and any other object unchanged."""
    return leaf.value.received.get(stage, leaf) if isinstance(leaf, Placeholder) else leaf
