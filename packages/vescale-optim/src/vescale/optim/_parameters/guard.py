"""Parameters whose new values are on their way: whoever reads one waits for them first.

    launch     all-gather of a bucket starts; its parameters get another class     Parameter -> AwaitedParameter
    first use  any function of torch that is given one of them waits               AwaitedParameter -> Parameter
    later      they are what they were, and cost nothing

The other class answers questions about shape, dtype, device, gradient and hooks at once; everything else (operators,
``.data``, ``.detach()``, ``.copy_()``, collectives, pickling, ``to_local()`` of a DTensor, ...) waits for the bucket,
and then does what it would have done. So a write waits as a read does. Of a DTensor, the local tensor is guarded, too.

Note: what does not ask torch's functions
    Memory that was shared before the gather (``w = param.detach()``, a state dict that somebody kept) is read without
    us. Such a tensor holds the buffer's storage, so that it can be seen from the number of its holders: then there is
    nothing to overlap, and the gather is awaited at once. Functions of C++ extensions take parameters as they are; see
    `ParameterGathers` for modules that may call some.

Note: tensors that stand for a parameter
    Static mode of `vescale.dmodule` computes with leaves over the memory of DTensors. It tells us of each by an
    attribute of the parameter (`Memory`), and as long as somebody holds such a leaf it changes its class with the
    parameter, and is no stranger among the holders.

Note: accelerators
    Waiting makes the stream wait that reads first. If that is not the stream in which the gather was launched, the host
    waits as well: then all streams may read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .._attributes import MEMORY, ParameterAttribute
from .._gradients.bucket import FlatBucket
from .._ranks.axis import Pending

__all__ = ["AwaitedValues", "Memory"]

# fmt: off
#: What a parameter answers without its values: attributes, and functions that read none.
_ATTRIBUTES = frozenset(
    (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "grad_dtype",
        "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_cpu", "is_cuda", "is_meta", "is_sparse",
    )
)
_FUNCTIONS = frozenset(
    (
        "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_contiguous", "register_hook",
        "register_post_accumulate_grad_hook", "__hash__", "__len__",
    )
)
# fmt: on


class _Awaited:
    """Mixed into the class of a parameter while its values are on their way; each bucket has classes of its own."""

    _vescale_values: Callable[[], AwaitedValues | None]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _FUNCTIONS or (name in ("__get__", "__set__", "__delete__") and owner in _ATTRIBUTES):
            with _torch.plain_functions():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, _Awaited):
                kind._await()
        return func(*args, **(kwargs or {}))

    @classmethod
    def _await(cls) -> None:
        values = cls._vescale_values()
        if values is None:
            raise RuntimeError("this parameter has no values: their gather failed, and its DDP has been deleted since")
        values.finish()

    def __repr__(self, **kwargs: object) -> str:
        self._await()
        return self.__repr__(**kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        self._await()
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Any:
        self._await()
        return self.__deepcopy__(memo)


class _AwaitedDTensor(_Awaited):
    """The methods of a DTensor that torch does not dispatch on."""

    def to_local(self, *args: Any, **kwargs: Any) -> Any:
        self._await()
        return self.to_local(*args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Any:
        self._await()
        return self.full_tensor(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        self._await()
        return self.redistribute(*args, **kwargs)


class Memory(ParameterAttribute):
    """How others say that they have a tensor over the memory of a parameter."""

    #: Whether memory is freed and refilled, so that its address says nothing: no, it stays.
    frees = False

    def __init__(self, values: AwaitedValues):
        self._values = weakref.ref(values)

    def share(self, _parameter: Tensor, tensor: nn.Parameter, *, is_view: bool) -> None:
        """Guard a leaf that stands for a parameter of the bucket, too, as long as somebody holds it.

        Args:
            tensor: The leaf.
            is_view: Whether it lies over the memory of the parameter, for a DTensor that of the local tensor; if not,
                there is nothing to wait for.
        """
        values = self._values()
        if is_view and values is not None:
            values.share(tensor)


class AwaitedValues:
    """The values of one bucket's parameters (ZeRO 1, 2), and who may read them when.

    Args:
        bucket: The bucket, with parameters in its ``values``.
    """

    def __init__(self, bucket: FlatBucket):
        self.bucket = bucket
        self._pending: Pending | None = None
        self._stream: torch.Stream | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._guards: list[tuple[Tensor, type, type]] = []
        self._shared: list[weakref.ref[Tensor]] = []
        self._classes: dict[type, type] = {}
        for slot in bucket.slots:
            for tensor in dict.fromkeys((slot.param, _torch.local_tensor(slot.param))):
                self._guards.append((tensor, type(tensor), self._class_like(type(tensor))))

    def _class_like(self, shown: type) -> type:
        if shown not in self._classes:
            mixin = _AwaitedDTensor if issubclass(shown, DTensor) else _Awaited
            more = {"__slots__": (), "_vescale_values": weakref.ref(self)}
            self._classes[shown] = type(f"Awaited{shown.__name__}", (mixin, shown), more)
        return self._classes[shown]

    def invite_sharers(self) -> None:
        """Let those who make local tensors of the DTensors among the parameters say so, see `Memory`."""
        for slot in self.bucket.slots:
            if isinstance(slot.param, DTensor):
                setattr(slot.param, MEMORY, Memory(self))

    def share(self, tensor: nn.Parameter) -> None:
        """Guard a leaf over the memory of a parameter, too, as long as somebody holds it."""
        with self._lock:
            self._shared = [reference for reference in self._shared if reference() is not None]
            self._shared.append(weakref.ref(tensor))
            if self._pending is not None:
                tensor.__class__ = self._class_like(nn.Parameter)

    def _sharers(self) -> list[Tensor]:
        """Return what `share` was given and is still there."""
        return [tensor for reference in self._shared if (tensor := reference()) is not None]

    @property
    def is_on_its_way(self) -> bool:
        """Whether there is something to wait for."""
        return self._pending is not None

    def is_shared(self, num_views: int) -> bool:
        """Tell whether a tensor of which nothing is known here shares memory with the parameters.

        Args:
            num_views: How many tensors the optimizer has over the buffer.
        """
        own = 1 + 2 * len(self.bucket.slots) + num_views  # the buffer; of each slot its parameter and its part
        return _torch.num_holders(self.bucket.values) != own + len(self._sharers())

    def launch(self) -> None:
        """Start the gather; from now on whoever reads a parameter waits."""
        self._pending = self.bucket.gather_values()
        if self._pending is None:
            return
        if self.bucket.axis.device_type != "cpu":
            self._stream = torch.accelerator.current_stream(self.bucket.values.device)
        self.guard()

    def guard(self) -> None:
        """Give the parameters, and what stands for them, the class that waits."""
        for tensor, _, awaited in self._guards:
            tensor.__class__ = awaited
        for tensor in self._sharers():
            tensor.__class__ = self._class_like(nn.Parameter)

    def finish(self) -> None:
        """Wait until the values are there, and let them be used.

        Raises:
            RuntimeError: If the gather failed, here or on another rank; again in every later call.
        """
        if self._pending is None:
            return
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._pending is None:  # another thread has waited
                return
            try:
                self._pending.wait()
            except RuntimeError as error:
                self._failure = str(error)
                raise
            self._let_all_streams_read()
            for tensor, shown, _ in self._guards:
                tensor.__class__ = shown
            for tensor in self._sharers():
                tensor.__class__ = nn.Parameter
            self._pending = None

    def _let_all_streams_read(self) -> None:
        if self._stream is not None:
            here = torch.accelerator.current_stream(self.bucket.values.device)
            if here != self._stream:
                here.synchronize()
