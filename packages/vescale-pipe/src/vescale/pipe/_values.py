"""Values that stages compute for one another: their identity, their metadata, and stand-ins without storage.

A tensor that depends on a unit's output is a **value**. It has an identity that is the same on every stage, the
position of the call that made it in the program and the position among that call's outputs, and a **home**: the stage
that computes it. On its home stage a value is an ordinary tensor. Elsewhere it is a ``Placeholder``, a tensor that
reports the shape, dtype and device of the value and owns no storage. When a stage receives the value, the copy hangs
on the value's record (``Value.received``), and the placeholder stays in the user's variables.

Tensors that depend on no unit (masks, position ids, rotary tables, inputs) are **universal**: real on every stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ._torch import make_wrapper, no_torch_function, waited
from ._tree import Leaf

ValueId = tuple[int, int]  # (position of the call in the program, position among its outputs)


class PipelineError(RuntimeError):
    """A program that cannot run as a pipeline, or a failure of another stage."""


@dataclass(frozen=True)
class ShardedMeta:
    """What a stage needs to rebuild a DTensor from its local part: the mesh is found by its axis names."""

    placements: tuple[Placement, ...]
    axis_names: tuple[str, ...]
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]


@dataclass(frozen=True)
class TensorMeta(Leaf):
    """Everything about a tensor but its elements. Shapes are global for DTensors."""

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
        """Shape and strides of the plain tensor that travels."""
        if self.sharded is None:
            return self.shape, self.stride
        return self.sharded.local_shape, self.sharded.local_stride

    def same_data(self, other: TensorMeta) -> bool:
        """Return whether both describe tensors of one shape, dtype and placement, strides aside."""
        mine, theirs = self.sharded, other.sharded
        if (self.shape, self.dtype, self.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            return False
        if mine is None or theirs is None:
            return mine is theirs
        return (mine.placements, mine.local_shape) == (theirs.placements, theirs.local_shape)


@dataclass(frozen=True)
class SameAs(Leaf):
    """An output that is one of the call's own arguments (identities, in-place operators): its position among them."""

    argument: int


@dataclass(frozen=True)
class Repeated(Leaf):
    """An output that is the same tensor as an earlier output of the call: its position among the outputs."""

    output: int


@dataclass
class Value:
    """A tensor of the program. ``received`` is this stage's copy, where the stage is not its home."""

    id: ValueId
    home: int
    meta: TensorMeta
    received: torch.Tensor | None = None


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return the metadata of a real tensor.

    Raises:
        PipelineError: a sparse tensor, or a DTensor whose mesh axes have no names.
    """
    if tensor.layout is not torch.strided:
        raise PipelineError(f"a {tensor.layout} tensor cannot cross pipeline stages; make it dense with .to_dense()")
    sharded = None
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names
        if names is None:
            raise PipelineError(
                f"a DTensor over a mesh without axis names {tensor.device_mesh} cannot cross pipeline stages: the "
                "receiver finds its own mesh by name; build the mesh with init_device_mesh(..., mesh_dim_names=(...))"
            )
        local = cast(DTensor, tensor.detach()).to_local()
        sharded = ShardedMeta(tuple(tensor.placements), tuple(names), tuple(local.shape), tuple(local.stride()))
    return TensorMeta(
        tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type, tensor.requires_grad, sharded
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor to send: the elements that this rank holds, detached."""
    tensor = tensor.detach()
    return waited(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def from_local_part(local: torch.Tensor, meta: TensorMeta, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return the value made of a received local part; the inverse of ``local_part`` on another stage."""
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


def gradient_meta(meta: TensorMeta) -> TensorMeta:
    """Return how the gradient of a value travels: contiguous, laid out as the value, replicated where it is partial."""
    sharded = meta.sharded
    if sharded is not None:
        placements = tuple(Replicate() if p.is_partial() else p for p in sharded.placements)
        stride = contiguous_stride(sharded.local_shape)
        sharded = replace(sharded, placements=placements, local_stride=stride)
    return replace(meta, stride=contiguous_stride(meta.shape), sharded=sharded)


def laid_out_as_gradient(gradient: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the local part of a gradient in the layout of ``gradient_meta``; partial gradients are reduced."""
    if meta.sharded is not None:
        placements = cast(ShardedMeta, gradient_meta(meta).sharded).placements
        gradient = cast(DTensor, gradient).redistribute(placements=placements)
    return local_part(gradient).contiguous()


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(torch.empty(shape, device="meta").stride())


class Placeholder(torch.Tensor):
    """Stand-in for a value on a stage that does not hold it: shape, dtype and device, no storage.

    Operators on it are recognized by the running frame and left to the value's home stage. An operator that reaches it
    any other way is an error, raised here.
    """

    value: Value
    origin: str

    @staticmethod
    def __new__(cls, value: Value, *, device: torch.device, origin: str) -> Placeholder:
        meta = value.meta
        self: Any = make_wrapper(
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
        what = f"{found.origin}, {found.value.meta}" if found is not None else "another stage's value"
        raise PipelineError(
            f"operator {func} ran on {what}, which this stage does not hold: it came in hidden in an object that the "
            "pipeline cannot look into, or through a custom autograd function outside of the stages' modules. Pass it "
            "as an argument of the module (tensors in tuples, lists, dicts and dataclasses are found), or move the "
            "code into a module that belongs to one stage"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`{name}` is not available on {self.__dict__.get('origin', 'a placeholder')}, which this stage does not "
            "hold; code outside of the stages' modules may use tensor operators, shapes, dtypes and devices"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder({self.origin}, {self.value.meta})"


def unwrap(leaf: Any) -> Any:
    """Return the received copy behind a placeholder; anything else as it is."""
    if isinstance(leaf, Placeholder) and leaf.value.received is not None:
        return leaf.value.received
    return leaf
