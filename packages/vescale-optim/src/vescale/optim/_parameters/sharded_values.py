"""Parameter values of a bucket of which each rank keeps 1/N: made whole for use, freed, and guarded in between.

    shard        | part |                        this coord's part, always there: what the optimizer updates
    values       | slot | slot | slot |pad|      memory exists while the parameters are in use; they are views of it

With offload (`_offload.py`) the shard is in host memory, and copied to its place in ``values`` before the gather.

The parameters stay the same objects, and the storage object of ``values`` stays the same, too: freeing resizes it to
nothing. So what autograd has saved for backward (the parameters, or views of them) has its values again when the bucket
is gathered for the backward.

Note: a parameter without values
    Reading memory that is not there would crash the process or give garbage. So a freed parameter changes its class, to
    one that answers questions about shape, dtype, device and gradient and raises for everything else; it gets its own
    class back when it is gathered. Of a DTensor, the local tensor is guarded as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .._attributes import MEMORY, ParameterAttribute
from .._buckets.plan import Bucket
from .._ranks.axis import Axis
from .offload import Awaitable, HostMemory

__all__ = ["ShardedValues"]

# fmt: off
#: What a parameter without values answers: attributes, and functions that read none.
_ATTRIBUTES = frozenset(
    (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "requires_grad",
        "is_leaf", "grad", "grad_fn", "grad_dtype", "retains_grad", "output_nr", "_version", "_backward_hooks",
        "_post_accumulate_grad_hooks", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse",
        "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_vulkan", "is_ipu", "is_xla", "is_ort",
        "is_mtia", "is_maia",
    )
)
_FUNCTIONS = frozenset(
    (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_distributed",
        "is_shared", "is_same_size", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
        "__hash__", "__len__", "grad", "backward", "data_ptr", "untyped_storage", "zeros_like", "ones_like",
        "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones", "new_full",
    )
)
# fmt: on

_hidden_classes: dict[type, type] = {}


class _Hidden:
    """Mixed into the class of a parameter while it has no values."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _FUNCTIONS or (name in ("__get__", "__set__", "__delete__") and owner in _ATTRIBUTES):
            with _torch.plain_functions():
                return func(*args, **(kwargs or {}))
        tensors = [t for t in _leaves([args, kwargs or {}]) if isinstance(t, _Hidden)]
        what = owner if name in ("__get__", "__set__", "__delete__") else name
        raise RuntimeError(
            f"{what!r} reads or writes the parameter {tensors[0]._vescale_name!r}, which has no values here: "
            "DDP(zero=3) keeps a part of it on each rank and makes it whole only while its unit runs. Use `with "
            "model.unsharded(): ...` on all ranks, state_dict() and load_state_dict() of the DDP, or let the parameter "
            "belong to the unit that uses it (units=...)"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Sharded({self._vescale_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: object) -> Any:
        return self._refuse("pickle")

    def __deepcopy__(self, memo: dict) -> Any:
        return self._refuse("deepcopy")

    def _refuse(self, what: str) -> Any:
        def named() -> None: ...

        named.__name__ = what
        return self.__torch_function__(named, (), (self,))


class _HiddenDTensor(_Hidden):
    """The methods of a DTensor that torch does not dispatch on."""

    def to_local(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._refuse("to_local")

    def full_tensor(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._refuse("full_tensor")

    def redistribute(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._refuse("redistribute")


def _leaves(values: object) -> list[object]:
    if isinstance(values, dict):
        values = list(values.values())
    return [leaf for v in values for leaf in _leaves(v)] if isinstance(values, (list, tuple)) else [values]


def _hidden_class(shown: type) -> type:
    if shown not in _hidden_classes:
        mixin = _HiddenDTensor if issubclass(shown, DTensor) else _Hidden
        _hidden_classes[shown] = type(f"Sharded{shown.__name__}", (mixin, shown), {"__slots__": ()})
    return _hidden_classes[shown]


class Memory(ParameterAttribute):
    """How others get at the memory of one bucket's parameters."""

    #: Whether memory is freed and refilled, so that its address says nothing.
    frees = True

    def __init__(self, values: ShardedValues):
        self._values = values

    def share(self, parameter: Tensor, tensor: nn.Parameter, *, is_view: bool) -> None:
        """Guard another parameter that stands for one of the bucket, too, as long as somebody holds it.

        Args:
            parameter: One of the bucket.
            tensor: A leaf.
            is_view: Whether it lies over the memory of the parameter, for a DTensor that of the local tensor.
        """
        params = self._values.params
        tensor._vescale_name = parameter._vescale_name
        self._values.share(
            next(at for at, param in enumerate(params) if param is parameter) if is_view else None, tensor
        )


class ShardedValues:
    """The values of one bucket's parameters. With one rank, and without offload, they are whole all the time.

    Args:
        plan: Layout.
        params: The parameters of ``plan.slots``, in that order; their memory moves into the buffer.
        axis: The axis over which they are sharded, with a process group for gathers.
        host: Where the shard is to be; None: on the device of the parameters.

    Attributes:
        shard: This coord's part.
        parts: This coord's part of each parameter: a flat view of ``shard``, perhaps empty.
        frees: Whether they are ever freed.
    """

    def __init__(self, plan: Bucket, params: Sequence[nn.Parameter], axis: Axis, host: HostMemory | None = None):
        self.plan = plan
        self.params = list(params)
        self.axis = axis
        self.frees = axis.size > 1 or host is not None
        self._host = host
        self._values = torch.zeros(plan.numel, dtype=plan.dtype, device=_torch.local_tensor(params[0]).device)
        self._guards: list[tuple[Tensor, type, type]] = []
        self._shared: list[tuple[weakref.ref[Tensor], int | None]] = []  # and the parameter's position if it is a view
        for view, param, slot in zip(self._views(), self.params, plan.slots, strict=True):
            local = _torch.local_tensor(param)
            view.copy_(local.detach())
            local.data = view
            for tensor in dict.fromkeys((param, local)):
                tensor._vescale_name = slot.fqn
                self._guards.append((tensor, type(tensor), _hidden_class(type(tensor))))
            if self.frees:
                setattr(param, MEMORY, Memory(self))
        start, stop = plan.shard(axis.coord)
        self._own = slice(start, stop)
        own = self._values[start:stop]
        self.shard = host.home_of(own) if host is not None else own.clone() if self.frees else own
        self.parts = []
        for slot, part in zip(plan.slots, plan.parts(axis.coord), strict=True):
            first, last = (min(max(slot.start + at - start, 0), len(self.shard)) for at in (part.start, part.stop))
            self.parts.append(self.shard[first:last])
        self.label = f"the parameters {plan.slots[0].fqn!r} and {len(plan.slots) - 1} more"
        self.is_whole = True
        self._pending: Awaitable | None = None
        self.free()

    def _views(self) -> list[Tensor]:
        """Return the place of each parameter in the buffer."""
        places = zip(self.plan.slots, self.params, strict=True)
        return [self._values[s.start : s.start + s.numel].view(_torch.local_tensor(p).shape) for s, p in places]

    def launch(self) -> None:
        """Start making the parameters whole."""
        self._values.untyped_storage().resize_(self.plan.num_bytes)
        if self._host is None:
            self._pending = self._gather(self.shard)
        else:
            own = self._values[self._own]
            self._pending = self._host.bring(own, self.shard, then=lambda: self._gather(own))

    def _gather(self, shard: Tensor) -> Awaitable | None:
        return self.axis.all_gather(self._values, shard, what=self.label)

    def finish(self) -> None:
        """Wait until they are, and let them be used."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        for tensor, shown, _ in self._guards:
            tensor.__class__ = shown
        for tensor, _ in self._sharers():
            tensor.__class__ = nn.Parameter
        self.is_whole = True

    def free(self) -> None:
        """Free the memory of the whole parameters; they cannot be used any more."""
        if not self.frees:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._values.untyped_storage().resize_(0)
        for tensor, _, hidden in self._guards:
            tensor.__class__ = hidden
        for tensor, _ in self._sharers():
            tensor.__class__ = _hidden_class(nn.Parameter)
        self.is_whole = False

    def share(self, position: int | None, tensor: nn.Parameter) -> None:
        """Guard another parameter as long as somebody holds it; with a position, move it with the parameter there."""
        self._shared = [pair for pair in self._shared if pair[0]() is not None]
        self._shared.append((weakref.ref(tensor), position))
        if not self.is_whole:
            tensor.__class__ = _hidden_class(nn.Parameter)

    def _sharers(self) -> list[tuple[Tensor, int | None]]:
        """Return what `share` was given and is still there, with the positions of the parameters under views."""
        return [(tensor, at) for reference, at in self._shared if (tensor := reference()) is not None]

    def give_away(self) -> None:
        """Take this coord's part of the whole parameters, and leave their memory to views that somebody has made."""
        if not self.frees:
            return
        if self._host is not None:
            self._host.wait_before_writing()
        self.shard.copy_(self._values[self._own])
        self._values = torch.empty_like(self._values)
        views = self._views()
        for view, param in zip(views, self.params, strict=True):
            _torch.local_tensor(param).data = view
        for tensor, at in self._sharers():
            if at is not None:
                tensor.data = views[at]
        self.free()

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a view of the whole parameters."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device != self._values.device:
            return False  # a wrapper without memory of its own, or a freed parameter
        first = self._values.data_ptr()
        return first <= tensor.data_ptr() < first + self.plan.num_bytes
