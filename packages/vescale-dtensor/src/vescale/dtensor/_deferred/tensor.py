"""The deferred tensor: a tensor without storage that refers to a value on a tape.

It reports the shape, strides, dtype, device and `requires_grad` of the eager tensor. While the constructor runs, a
dispatch mode (``mode``) gets every operator before this class. Afterwards only aliases (`nn.Parameter(t)`, `t.data`,
`state_dict()`) and `copy.deepcopy` are recorded. All other operators are refused; the error names the tensor and the
fix.

Guarantee: no operator on a deferred tensor runs on data.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .._containers import leaves
from .._torch.recording import Op, dispatch_without_torch_function, make_wrapper
from .ops import ALIAS, SAME_KIND
from .tape import Tape

__all__ = ["DeferredState", "DeferredTensor", "DeferredTensorError", "TensorRecording"]


class TensorRecording(Protocol):
    """The part of a recording that a deferred tensor uses; `record.Recording` implements it.

    Attributes:
        tape: the recorded program.
        read: while the constructor runs, computes the contents of a value on demand.
    """

    tape: Tape
    read: Callable[[int], Tensor] | None

    def record(self, func: Op, args: tuple, kwargs: dict) -> object:
        """Append an operator to the tape and return its result."""

    def constant(self, tensor: Tensor) -> DeferredTensor:
        """Return a deferred copy of a tensor."""


class DeferredTensorError(RuntimeError):
    """A deferred tensor was used where its contents are needed."""


@dataclass
class DeferredState:
    """The state of a deferred tensor.

    Attributes:
        recording: of the `deferred_init` that made it.
        value: its value on the tape; `tensor.data = other` and `t_()` change it.
        name: FQN in the constructed module, for messages.
        result: its layout and tensor once materialized; keeps tied tensors tied over several `materialize` calls.
    """

    recording: TensorRecording
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
        value = state.recording.tape.values[state.value]
        tensor = make_wrapper(cls, value.meta, value.device)
        tensor.deferred = state
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{grad})"

    @property
    def described(self) -> str:
        """The tensor with its name, for messages."""
        return f"'{self.deferred.name}' {self!r}" if self.deferred.name else repr(self)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, DeferredTensor))
        if func is SAME_KIND:
            return all(isinstance(argument, DeferredTensor) for argument in args)
        if func in ALIAS:
            return tensor.deferred.recording.record(func, args, kwargs)
        raise DeferredTensorError(
            f"{func} on {tensor.described}: a deferred tensor has no contents yet. Call "
            "vescale.dtensor.materialize(module) before you run the module, load a checkpoint into it, move or save "
            "it; what belongs to construction (such as .to(dtype)) also works inside: "
            "deferred_init(lambda: Model(config).to(dtype))"
        )

    # ------------------------------------------------------- methods that C++ does not dispatch for a wrapper subclass

    @property
    def data(self) -> Tensor:
        """An alias outside autograd."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DeferredTensor):
            other = self.deferred.recording.constant(other.detach().clone())
        self.become(other.detach())

    def become(self, other: DeferredTensor) -> None:
        """Take over the value and geometry of another deferred tensor; Python attributes stay."""
        Tensor.data.__set__(self, other)
        self.deferred.value = other.deferred.value

    def tolist(self) -> object:
        """Return the contents as nested lists (while the constructor runs)."""
        return self._contents("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a read-only array of the contents (while the constructor runs)."""
        array = self._contents("numpy()").numpy(force=force)
        array.flags.writeable = False  # a write would change only this copy
        return array

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict) -> DeferredTensor:
        if id(self) not in memo:
            copy = self.deferred.recording.constant(self.detach())
            if getattr(self, "_is_param", False):
                copy = nn.Parameter(copy, self.requires_grad)
            else:
                copy.requires_grad_(self.requires_grad)
                own = {name: value for name, value in vars(self).items() if name != "deferred"}
                vars(copy).update(deepcopy(own, memo))
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object):
        raise DeferredTensorError(
            f"{self.described} cannot be saved or pickled; call vescale.dtensor.materialize(module) first"
        )

    def _contents(self, what: str) -> Tensor:
        read = self.deferred.recording.read
        if read is None:
            raise DeferredTensorError(
                f"{what} of {self.described}: a deferred tensor has no contents yet; call "
                "vescale.dtensor.materialize(module) first"
            )
        return read(self.deferred.value)
