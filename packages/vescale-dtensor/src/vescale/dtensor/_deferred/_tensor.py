"""The deferred tensor, and how one operator on deferred tensors gets onto the tape.

A `DeferredTensor` is a wrapper without storage. It reports the shape, strides, dtype, device and `requires_grad` that the
eager tensor would have, and knows its value on the tape. `record` runs the operator on meta tensors, which says what
the results look like and which of them are views, and appends a call::

    DeferredTensor(cpu, (4, 3)) --normal_--> record --> meta tensor (4, 3).normal_()      shapes, aliases
                                                    --> tape: Call(normal_, writes v0)    replayed by materialize

Guarantee: no operator on a deferred tensor runs on data. While the constructor runs, a mode records everything; after it,
only aliases (`nn.Parameter(t)`, `t.data`, `state_dict()`) and `copy.deepcopy` are recorded, the rest is refused.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from ._generators import GeneratorLog, generator_of
from ._ops import ALIAS, GEOMETRY_FACTORIES, OVERWRITES, REFUSED, SAME_KIND
from ._tape import Call, Ref, Tape
from ._torch import (
    Op,
    dispatch_without_torch_function,
    foreign_memory,
    is_random,
    make_wrapper,
    storage_key,
    takes_device,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    written_arguments,
)

__all__ = ["DeferredState", "DeferredTensor", "DeferredTensorError", "record", "wrap_constant"]


class DeferredTensorError(RuntimeError):
    """A deferred tensor was used where its contents are needed."""


@dataclass
class DeferredState:
    """What a deferred tensor is on its tape.

    Attributes:
        tape: the tape of its `deferred_init`.
        log: the generators of that tape.
        value: its value; `tensor.data = other` and `t_()` change it.
        name: FQN in the constructed module, for messages.
        result: what it was materialized to, with the layout, so that ties survive separate calls of `materialize`.
    """

    tape: Tape
    log: GeneratorLog
    value: int
    name: str = ""
    result: tuple[object, Tensor] | None = None


class DeferredTensor(Tensor):
    """A tensor that `deferred_init` recorded and `materialize` will make real."""

    deferred: DeferredState

    __torch_function__ = dispatch_without_torch_function

    @classmethod
    def of(cls, state: DeferredState) -> DeferredTensor:
        """Return a new tensor of a value. There is no `__init__`: `torch.Tensor(16)` would call it with 16."""
        value = state.tape.values[state.value]
        tensor = make_wrapper(cls, value.meta, value.device)
        tensor.deferred = state
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # noqa: ARG002 (torch's signature)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{grad})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ARG003 (torch's signature)
        kwargs = kwargs or {}
        tensor = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredTensor))
        if func is SAME_KIND:
            return all(isinstance(argument, DeferredTensor) for argument in args)
        if func in ALIAS:
            return record(tensor.deferred.tape, tensor.deferred.log, func, args, kwargs)
        raise DeferredTensorError(
            f"{func} on {_describe(tensor)}: a deferred tensor has no contents yet. Call vescale.dtensor.materialize(module) "
            "before you run the module, load a checkpoint into it, move or save it; what belongs to construction "
            "(such as .to(dtype)) also works inside: deferred_init(lambda: Model(config).to(dtype))"
        )

    # ------------------------------------------------------- what C++ does not dispatch for a wrapper subclass

    @property
    def data(self) -> Tensor:
        """An alias outside autograd."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DeferredTensor):
            other = wrap_constant(self.deferred.tape, self.deferred.log, other.detach().clone())
        Tensor.data.__set__(self, other.detach())
        self.deferred.value = other.deferred.value

    def tolist(self) -> object:
        """Return the contents as nested lists (while the constructor runs)."""
        return self._contents("tolist()").tolist()

    def numpy(self, *, force: bool = False):
        """Return a read-only array of the contents (while the constructor runs)."""
        array = self._contents("numpy()").numpy(force=force)
        array.flags.writeable = False  # a write would reach this copy alone, and be lost
        return array

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict) -> DeferredTensor:
        if id(self) not in memo:
            state = self.deferred
            (copy,) = _call(state.tape, state.log, torch.ops.aten.clone.default, (self.detach(),), {})
            if getattr(self, "_is_param", False):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            else:
                copy.requires_grad_(self.requires_grad)
                own = {name: value for name, value in vars(self).items() if name != "deferred"}
                vars(copy).update(deepcopy(own, memo))
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object):
        raise DeferredTensorError(f"{_describe(self)} cannot be saved; call vescale.dtensor.materialize(module) first")

    def _contents(self, what: str) -> Tensor:
        read = self.deferred.tape.read
        if read is None:
            raise DeferredTensorError(
                f"{what} of {_describe(self)}: a deferred tensor has no contents yet; call "
                "vescale.dtensor.materialize(module) first"
            )
        return read(self.deferred.value)


def _describe(tensor: DeferredTensor) -> str:
    name = f"'{tensor.deferred.name}' " if tensor.deferred.name else ""
    return f"{name}{tensor!r}"


# ------------------------------------------------------------------------------------------------- recording


def wrap_constant(tape: Tape, log: GeneratorLog, tensor: Tensor) -> DeferredTensor:
    """Record a real tensor, which must not change any more, as the origin of a deferred one."""
    (wrapped,) = _call(tape, log, torch.ops.aten.clone.default, (tensor.detach(),), {})
    return wrapped


def record(tape: Tape, log: GeneratorLog, func: Op, args: tuple, kwargs: dict) -> object:
    """Append an operator to the tape and return its result as the program expects it.

    Raises:
        NotImplementedError: the operator changes a tensor in a way that cannot be recorded.
    """
    written = _written(func, args, kwargs)
    _refuse_writes(func, written)
    args, kwargs = _snapshot_real(func, args, kwargs)
    results, spec = tree_flatten(_call(tape, log, func, args, kwargs, whole_result=True))
    # an in-place operator returns the very object it was called on
    by_value = {tensor.deferred.value: tensor for tensor in written}
    results = [by_value.get(r.deferred.value, r) if isinstance(r, DeferredTensor) else r for r in results]
    return tree_unflatten(results, spec)


def _call(tape: Tape, log: GeneratorLog, func: Op, args: tuple, kwargs: dict, *, whole_result: bool = False) -> object:
    """Run `func` on meta tensors and append the call; return the new tensors, or the operator's whole result."""
    written = _written(func, args, kwargs)
    metadata_only = torch.Tag.inplace_view in func.tags
    metas: dict[int, int] = {}  # id of a meta argument -> its value

    def to_meta(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DeferredTensor):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        meta = tape.values[tensor.deferred.value].meta
        meta = meta.detach() if metadata_only else meta  # `t_()` must not turn the value that earlier calls refer to
        metas[id(meta)] = tensor.deferred.value
        return meta

    meta_args, meta_kwargs = tree_map_only(Tensor, to_meta, (args, kwargs))
    results, spec = tree_flatten(func(*meta_args, **_on_meta(func, meta_args, meta_kwargs)))
    _check_geometry(func, written, metadata_only)

    device = _result_device(args, kwargs)
    argument_storages = {storage_key(t) for t in tree_leaves((meta_args, meta_kwargs)) if isinstance(t, Tensor)}
    fresh = [r for r in results if isinstance(r, Tensor) and (id(r) not in metas or metadata_only)]
    is_view = any(storage_key(r) in argument_storages for r in fresh)
    draws = None
    if is_random(func):
        draws = log.track(generator_of(args, kwargs, device))
        log.note_changes()
    index = len(tape.entries)

    outputs, wrapped = {}, []
    for place, result in enumerate(results):
        if not isinstance(result, Tensor):
            wrapped.append(result)
            continue
        known = None if metadata_only else metas.get(id(result))
        if known is None:
            known = outputs[place] = tape.add_value(result, device)
        wrapped.append(DeferredTensor.of(DeferredState(tape, log, known)))
    if not (outputs or written or draws is not None):
        return tree_unflatten(wrapped, spec)  # a question about geometry
    tape.entries.append(_make_call(func, args, kwargs, written, outputs, is_view or metadata_only, draws))
    if metadata_only:
        _retarget(written[0], wrapped[0])
    if draws is not None:
        log.drawn(draws, index)
    return tree_unflatten(wrapped, spec) if whole_result else tuple(wrapped)


def _make_call(
    func: Op, args: tuple, kwargs: dict, written: list[DeferredTensor], outputs: dict, is_view: bool, draws: int | None
) -> Call:
    looked_at = args[1:] if func in OVERWRITES else args
    inputs = [leaf.deferred.value for leaf in tree_leaves((looked_at, kwargs)) if isinstance(leaf, DeferredTensor)]
    reads = () if is_view or func in GEOMETRY_FACTORIES else tuple(inputs)
    writes = () if is_view else tuple(tensor.deferred.value for tensor in written)
    args, kwargs = tree_map_only(DeferredTensor, lambda tensor: Ref(tensor.deferred.value), (args, kwargs))
    return Call(func, args, kwargs, reads, writes, outputs, is_view, draws, torch.get_default_dtype())


def _retarget(tensor: DeferredTensor, new: DeferredTensor) -> None:
    """Let a tensor that was transposed, squeezed, … in place show its new geometry."""
    Tensor.data.__set__(tensor, new)
    tensor.deferred.value = new.deferred.value


def _written(func: Op, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that a call changes in place."""
    found = []
    for position, name in written_arguments(func):
        argument = args[position] if position < len(args) else kwargs.get(name)
        found += [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]
    return found


def _refuse_writes(func: Op, written: list[Tensor]) -> None:
    if func in REFUSED:
        raise NotImplementedError(f"{func} on {_describe(written[0])} is not supported in deferred_init: it has no storage")
    for tensor in written:
        if not isinstance(tensor, DeferredTensor):
            raise NotImplementedError(
                f"{func} inside deferred_init writes deferred or random values into a real tensor of shape "
                f"{tuple(tensor.shape)} ({'memory of numpy' if foreign_memory(tensor) else 'made outside'}). "
                "Create it inside the constructor with torch operators (for example torch.tensor(array)) instead"
            )


def _check_geometry(func: Op, written: list[DeferredTensor], metadata_only: bool) -> None:
    for tensor in () if metadata_only else written:
        if tensor.deferred.tape.values[tensor.deferred.value].meta.shape != tensor.shape:
            raise NotImplementedError(f"{func} resizes {_describe(tensor)}; deferred_init cannot record that")


def _snapshot_real(func: Op, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Copy real tensors whose contents the call uses: the program may change them before the replay."""
    if func in GEOMETRY_FACTORIES:
        return args, kwargs
    return tree_map_only(Tensor, lambda t: t if isinstance(t, DeferredTensor) else t.detach().clone(), (args, kwargs))


def _on_meta(func: Op, args: tuple, kwargs: dict) -> dict:
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    makes_from_nothing = not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
    if takes_device(func) and (makes_from_nothing or kwargs.get("device") is not None):
        kwargs["device"] = torch.device("meta")
    return kwargs


def _result_device(args: tuple, kwargs: dict) -> torch.device:
    """Return where the results of a call are: the device asked for, else that of the arguments (scalars may be on CPU)."""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        return device
    devices = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    elsewhere = [device for device in devices if device.type != "cpu"]
    return (elsewhere or devices or [torch.device("cpu")])[0]
