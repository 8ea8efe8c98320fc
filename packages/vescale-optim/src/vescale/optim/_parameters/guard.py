"""One guard for parameters that must not be read now: their all-gather is in flight, or they are sharded.

A guard swaps the class of parameters. The guarded class answers questions about metadata immediately. It calls the
guard before everything else: operators, ``.data``, ``.detach()``, ``.copy_()``, collectives, copies, pickling. A write
counts as a read. What the guard does then is its ``on_read``:

    Wait      ZeRO 1, 2: an all-gather fills the parameter      wait for it, open the guard, and run the function
    Refuse    ZeRO 3: the memory of the parameter is freed      raise an error with the name of the parameter

    Guard.close()      Parameter -> InFlightParameter or ShardedParameter      DTensor -> InFlightDTensor ...
    Guard.open()       back to the class of before: an open guard costs nothing

Of a DTensor the local tensor is guarded as well. Static mode of `vescale.dmodule` computes with leaves over the memory
of DTensors. It registers each leaf through an attribute of the parameter (`Memory`), and the guard swaps the class of a
leaf with that of its parameter for as long as the leaf exists.

Note: reads that a guard cannot see
    A tensor that shared the memory before the guard closed (``w = param.detach()``) has its own class. C++ extensions
    that are no operators of torch, and ``torch.tensor(param)``, take a tensor without a look at its class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import tensors_in

from .. import _torch

__all__ = ["MEMORY", "MEMORY_FUNCTIONS", "PASSING_ATTRIBUTES", "PASSING_FUNCTIONS", "Guard", "Memory", "Refuse", "Wait"]

#: Attribute of a parameter by which other packages register tensors over its memory.
MEMORY = "_vescale_memory"

# fmt: off
#: Attributes and functions that pass a closed guard. None of them gives a value of the parameter, or its memory.
PASSING_ATTRIBUTES = frozenset(
    (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "requires_grad",
        "is_leaf", "grad", "grad_fn", "grad_dtype", "retains_grad", "output_nr",
        *_torch.BOOKKEEPING, "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse",
        "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_vulkan", "is_ipu", "is_xla", "is_ort",
        "is_mtia", "is_maia",
    )
)
PASSING_FUNCTIONS = frozenset(
    (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_distributed",
        "is_shared", "is_same_size", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
        "__hash__", "__len__", "grad", "backward", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
        "randn_like", "new_empty", "new_zeros", "new_ones", "new_full",
    )
)
# fmt: on

#: Functions that give the memory of a parameter. A sharded one lets them pass: its storage has 0 bytes.
MEMORY_FUNCTIONS = frozenset(("data_ptr", "untyped_storage"))

_ACCESSORS = ("__get__", "__set__", "__delete__")


@dataclass(frozen=True)
class Wait:
    """Let a read wait until the values are there.

    Attributes:
        finish: Waits for the values and opens the guard.
    """

    finish: Callable[[], None]
    prefix = "InFlight"
    passing_functions = PASSING_FUNCTIONS

    def __call__(self, _function: str, _tensor: Tensor, _name: str) -> None:
        """Wait for the values."""
        self.finish()

    def describe(self, tensor: Tensor, _name: str) -> str:
        """Return the ``repr`` of a guarded tensor: that of its values."""
        self.finish()
        return repr(tensor)


@dataclass(frozen=True)
class Refuse:
    """Let a read raise: this rank has only a part of the values.

    Attributes:
        rank: This rank.
    """

    rank: int
    prefix = "Sharded"
    passing_functions = PASSING_FUNCTIONS | MEMORY_FUNCTIONS

    def __call__(self, function: str, tensor: Tensor, name: str) -> None:
        """Raise RuntimeError: ``function`` reads the parameter ``name``."""
        raise RuntimeError(
            f"{function!r} reads or writes the parameter {name!r}, which has no values here: expected a use while its "
            f"unit runs, got one at another time, when rank {self.rank} holds only a part of its shape "
            f"{tuple(tensor.shape)} (DDP with zero=3). Use `with model.unsharded(): ...` on all ranks, the DDP's "
            "state_dict() and load_state_dict(), or let the parameter belong to the unit that uses it (units=...)"
        )

    def describe(self, tensor: Tensor, name: str) -> str:
        """Return the ``repr`` of a guarded tensor: its metadata."""
        return f"Sharded({name!r}, shape={tuple(tensor.shape)}, dtype={tensor.dtype})"


class _Guarded:
    """Mixed into the class of a tensor while its guard is closed. Each guard has classes of its own."""

    _vescale_guard: Guard

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        function = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if function in _ACCESSORS else None
        functions = cls._vescale_guard.on_read.passing_functions
        if function in functions if attribute is None else attribute in PASSING_ATTRIBUTES:
            with _torch.plain_functions():
                return func(*args, **kwargs)
        for kind in types:
            if issubclass(kind, _Guarded):
                kind._vescale_guard.read(function if attribute is None else attribute, [args, kwargs])
        return func(*args, **kwargs)

    def __repr__(self, **_kwargs: object) -> str:
        guard = self._vescale_guard
        return guard.on_read.describe(self, guard.name_of(self))

    def __reduce_ex__(self, protocol: object) -> Any:
        self._vescale_guard.read("pickle", self)
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Any:
        self._vescale_guard.read("deepcopy", self)
        return self.__deepcopy__(memo)


class _GuardedDTensor(_Guarded):
    """The methods of a DTensor that torch does not dispatch on."""

    def to_local(self, *args: Any, **kwargs: Any) -> Any:
        self._vescale_guard.read("to_local", self)
        return self.to_local(*args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Any:
        self._vescale_guard.read("full_tensor", self)
        return self.full_tensor(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        self._vescale_guard.read("redistribute", self)
        return self.redistribute(*args, **kwargs)


@dataclass(frozen=True)
class _Entry:
    """A guarded tensor: a parameter or its local tensor."""

    name: str
    tensor: Tensor
    shown: type
    guarded: type


@dataclass(frozen=True)
class Leaf:
    """A tensor that another package computes with in place of a parameter.

    Attributes:
        tensor: The leaf.
        name: Name of the parameter.
        is_view: Whether it shares the memory of the parameter.
    """

    tensor: weakref.ref[nn.Parameter]
    name: str
    is_view: bool


class Guard:
    """The guard of the parameters of one bucket; open at first.

    Args:
        parameters: By name. Their memory may move; the objects stay.
        on_read: What a read does while the guard is closed.

    Attributes:
        is_closed: Whether reads go to ``on_read``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], on_read: Wait | Refuse):
        self.on_read = on_read
        self.is_closed = False
        self._classes: dict[type, type] = {}
        self._leaves: list[Leaf] = []
        self._entries = [
            _Entry(name, tensor, type(tensor), self._class_like(type(tensor)))
            for name, param in parameters.items()
            for tensor in dict.fromkeys((param, _torch.local_tensor(param)))
        ]

    def _class_like(self, shown: type) -> type:
        if shown not in self._classes:
            mixin = _GuardedDTensor if issubclass(shown, DTensor) else _Guarded
            name = f"{self.on_read.prefix}{shown.__name__}"
            self._classes[shown] = type(name, (mixin, shown), {"__slots__": (), "_vescale_guard": self})
        return self._classes[shown]

    def close(self) -> None:
        """Send reads to ``on_read`` from now on."""
        self.is_closed = True
        for entry in self._entries:
            entry.tensor.__class__ = entry.guarded
        for leaf in self.leaves():
            leaf.__class__ = self._class_like(nn.Parameter)

    def open(self) -> None:
        """Let everything be read again."""
        self.is_closed = False
        for entry in self._entries:
            entry.tensor.__class__ = entry.shown
        for leaf in self.leaves():
            leaf.__class__ = nn.Parameter

    def read(self, function: str, arguments: object) -> None:
        """Do what a read does while the guard is closed.

        Args:
            function: Name of the function that reads.
            arguments: What it was called with.
        """
        if self.is_closed:
            tensor = next((t for t in tensors_in(arguments) if self.name_of(t)), self._entries[0].tensor)
            self.on_read(function, tensor, self.name_of(tensor))

    def add_leaf(self, leaf: nn.Parameter, name: str, *, is_view: bool) -> None:
        """Guard a leaf as the parameter ``name``, for as long as it exists."""
        self._leaves = [each for each in self._leaves if each.tensor() is not None]
        self._leaves.append(Leaf(weakref.ref(leaf), name, is_view))
        if self.is_closed:
            leaf.__class__ = self._class_like(nn.Parameter)

    def leaves(self) -> list[nn.Parameter]:
        """Return the leaves that exist."""
        return [tensor for leaf in self._leaves if (tensor := leaf.tensor()) is not None]

    def views_of(self, name: str) -> list[nn.Parameter]:
        """Return the leaves that share the memory of the parameter ``name``."""
        found = [leaf.tensor() for leaf in self._leaves if leaf.is_view and leaf.name == name]
        return [tensor for tensor in found if tensor is not None]

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of the parameter that a tensor is or stands for; empty for a tensor that is not guarded."""
        names = [entry.name for entry in self._entries if entry.tensor is tensor]
        names += [leaf.name for leaf in self._leaves if leaf.tensor() is tensor]
        return names[0] if names else ""


class Memory:
    """The value of the attribute ``_vescale_memory`` of a parameter: registers leaves that stand for it.

    A copy of the parameter, also through pickle, has None there: no DDP manages it.

    Attributes:
        frees: Whether the memory is freed and refilled, so that its address identifies nothing.
    """

    def __init__(self, guard: Guard, *, frees: bool):
        self.frees = frees
        self._guard = guard

    def share(self, parameter: Tensor, tensor: nn.Parameter, *, is_view: bool) -> None:
        """Guard a leaf that stands for a parameter of the bucket, for as long as the leaf exists.

        Args:
            parameter: One of the bucket.
            tensor: The leaf.
            is_view: Whether it shares the memory of the parameter, for a DTensor that of the local tensor.
        """
        if is_view or self.frees:
            self._guard.add_leaf(tensor, self._guard.name_of(parameter), is_view=is_view)

    def __reduce__(self) -> tuple:
        return _no_memory, ()


def _no_memory() -> None:
    return None
