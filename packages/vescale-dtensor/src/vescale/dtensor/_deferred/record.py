"""Append one operator on deferred tensors to the tape.

The operator runs on meta tensors. That gives the geometry of its results, and shows which results are views and which
are its arguments. Then a call is appended to the tape::

    DeferredTensor (4, 3) --normal_-->  meta tensor (4, 3).normal_()      geometry, aliases, checks of arguments
                                        tape: Call(normal_, writes v0)    replayed by materialize
                                        generator: token of this draw     see generators

Guarantee: results behave as in the eager program: an in-place operator returns the same object, and `t_()` changes the
geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._containers import leaves, map_leaves
from .._torch.recording import Op, foreign_memory, is_random, storage_key, takes_device, written_arguments
from .generators import GeneratorLog, generator_of
from .ops import GEOMETRY_FACTORIES, OVERWRITES, REFUSED
from .tape import Call, Ref, Tape
from .tensor import DeferredState, DeferredTensor

__all__ = ["Recording"]


class Recording:
    """One `deferred_init`: its tape and its generators.

    Attributes:
        tape: the recorded program.
        log: the generators it uses.
        read: while the constructor runs, the function that computes the contents of a value on demand.
        is_replayed: whether a replay has advanced the user's generators by the program's draws.
    """

    def __init__(self) -> None:
        self.tape = Tape()
        self.log = GeneratorLog(self.tape)
        self.read: Callable[[int], Tensor] | None = None
        self.is_replayed = False

    def record(self, func: Op, args: tuple, kwargs: dict) -> object:
        """Append an operator to the tape and return its result.

        Raises:
            NotImplementedError: the operator changes a tensor in a way that cannot be recorded, or has no meta kernel.
        """
        _refuse_writes(func, _written(func, args, kwargs))
        return self._append(func, *_snapshot_real(func, args, kwargs))

    def constant(self, tensor: Tensor) -> DeferredTensor:
        """Return a deferred copy of a tensor; a real tensor must not change afterwards."""
        return self._append(torch.ops.aten.clone.default, (tensor.detach(),), {})

    def _append(self, func: Op, args: tuple, kwargs: dict) -> object:
        written = _written(func, args, kwargs)
        changes_geometry = torch.Tag.inplace_view in func.tags
        meta_args, meta_kwargs = map_leaves(lambda t: self._to_meta(func, t, changes_geometry), (args, kwargs), Tensor)
        meta_result = func(*meta_args, **_on_meta(func, meta_args, meta_kwargs))
        _check_layout(func, leaves(meta_result))
        if not changes_geometry:
            self._check_geometry(func, written)
        device = _result_device(args, kwargs)
        draws = self._prepare_draw(func, args, kwargs, device)

        argument_storages = {storage_key(t) for t in leaves((meta_args, meta_kwargs)) if isinstance(t, Tensor)}
        same = {} if changes_geometry else {id(self._meta(tensor)): tensor for tensor in written}
        results, outputs, is_view = [], {}, False
        for place, meta in enumerate(leaves(meta_result)):
            if isinstance(meta, Tensor) and id(meta) not in same:
                outputs[place] = self.tape.add_value(meta, device)
                results.append(DeferredTensor.of(DeferredState(self, outputs[place])))
                is_view |= storage_key(meta) in argument_storages
            else:
                results.append(same.get(id(meta), meta))  # an in-place operator returns the object it was called on
        if outputs or written or draws is not None:  # otherwise a query of geometry
            self.tape.entries.append(_make_call(func, args, kwargs, written, outputs, is_view, draws))
        if draws is not None:
            self.log.drawn(draws, len(self.tape.entries) - 1)
        if changes_geometry:
            written[0].become(results[0])
            return written[0]
        in_order = iter(results)
        return map_leaves(lambda _: next(in_order), meta_result)

    def _meta(self, tensor: DeferredTensor) -> Tensor:
        return self.tape.values[tensor.deferred.value].meta

    def _to_meta(self, func: Op, tensor: Tensor, changes_geometry: bool) -> Tensor:
        if isinstance(tensor, DeferredTensor):
            meta = self._meta(tensor)
            return meta.detach() if changes_geometry else meta  # earlier calls refer to the meta tensor of the value
        _check_layout(func, [tensor])
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _prepare_draw(self, func: Op, args: tuple, kwargs: dict, device: torch.device) -> int | None:
        """Return the index of the generator that the operator consumes, after recording changes to its state."""
        if not is_random(func):
            return None
        index = self.log.track(generator_of(args, kwargs, device))
        self.log.note_changes()
        return index

    def _check_geometry(self, func: Op, written: list[DeferredTensor]) -> None:
        for tensor in written:
            if self._meta(tensor).shape != tensor.shape:
                raise NotImplementedError(f"{func} resizes {tensor.described}; deferred_init cannot record that")


def _make_call(
    func: Op, args: tuple, kwargs: dict, written: list[DeferredTensor], outputs: dict, is_view: bool, draws: int | None
) -> Call:
    looked_at = args[1:] if func in OVERWRITES else args
    inputs = [leaf.deferred.value for leaf in leaves((looked_at, kwargs)) if isinstance(leaf, DeferredTensor)]
    reads = () if is_view or func in GEOMETRY_FACTORIES else tuple(inputs)
    writes = () if is_view else tuple(tensor.deferred.value for tensor in written)
    args, kwargs = map_leaves(lambda tensor: Ref(tensor.deferred.value), (args, kwargs), DeferredTensor)
    return Call(func, args, kwargs, reads, writes, outputs, is_view, draws, torch.get_default_dtype())


def _written(func: Op, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that a call changes in place."""
    found = []
    for position, name in written_arguments(func):
        argument = args[position] if position < len(args) else kwargs.get(name)
        found += [leaf for leaf in leaves(argument) if isinstance(leaf, Tensor)]
    return found


def _refuse_writes(func: Op, written: list[Tensor]) -> None:
    if func in REFUSED:
        raise NotImplementedError(
            f"{func} on {written[0].described} is not supported in deferred_init: it has no storage"
        )
    for tensor in written:
        if not isinstance(tensor, DeferredTensor):
            raise NotImplementedError(
                f"{func} inside deferred_init writes deferred or random values into a real tensor of shape "
                f"{tuple(tensor.shape)} ({'memory of numpy' if foreign_memory(tensor) else 'made outside'}). "
                "Create it inside the constructor with torch operators (for example torch.tensor(array)) instead"
            )


def _check_layout(func: Op, results: Iterable) -> None:
    for result in results:
        if isinstance(result, Tensor) and result.layout is not torch.strided:
            raise NotImplementedError(
                f"{func} on a tensor of layout {result.layout}: deferred_init records strided tensors"
            )


def _snapshot_real(func: Op, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Copy real tensors whose contents the call uses: the program may change them before the replay."""
    if func in GEOMETRY_FACTORIES:
        return args, kwargs
    return map_leaves(lambda t: t if isinstance(t, DeferredTensor) else t.detach().clone(), (args, kwargs), Tensor)


def _on_meta(func: Op, args: tuple, kwargs: dict) -> dict:
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    makes_from_nothing = not any(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs)))
    if takes_device(func) and (makes_from_nothing or kwargs.get("device") is not None):
        kwargs["device"] = torch.device("meta")
    return kwargs


def _result_device(args: tuple, kwargs: dict) -> torch.device:
    """Return the device of a call's results: the requested one, else that of the arguments (scalars may be on CPU)."""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        return device
    devices = [leaf.device for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    elsewhere = [device for device in devices if device.type != "cpu"]
    return (elsewhere or devices or [torch.device("cpu")])[0]
