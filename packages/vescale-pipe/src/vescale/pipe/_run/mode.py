"""The torch function mode that reports the operators of a forward to its frame.

The mode is active while user code outside of units runs. It is removed inside units after the first micro-batch, so
units run without overhead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._torch import function_mode_on_top, pop_mode, push_mode
from .frame import Frame
from .tape import versions_of
from .tree import flatten

_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf grad grad_fn itemsize nbytes names is_cpu is_cuda is_meta "
    "is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex "
    "is_signed is_inference is_same_size get_device __len__ __hash__ __repr__ __str__ __format__"
)


def _description_functions() -> frozenset[Any]:
    """Return the functions that read metadata of a placeholder (shape, dtype, device); they are not events."""
    getters = [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)]
    methods = [getattr(torch.Tensor, name) for name in _METHODS.split()]
    functions = [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.result_type]
    return frozenset([*getters, *methods, *functions])


_DESCRIPTIONS = _description_functions()


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return name


class RunState:
    """State that the steps, hooks and stubs of one engine share.

    Attributes:
        mode: that of the forward in progress, or None.
        latest: the program of the last forward of each stage.
        device: this rank's device, once it is known.
        constants_read: names of the buffers of other stages that code outside of units has read.
        attributes_read: the same of plain attributes, with the values that it has got.
        attributes_shared: names of those that any rank has read.
        constants_written: names of buffers and attributes that steps have changed on this rank.
    """

    def __init__(self) -> None:
        self.mode: TraceMode | None = None
        self.latest: dict[int, object] = {}
        self.device: torch.device | None = None
        self.constants_read: set[str] = set()
        self.attributes_read: dict[str, Any] = {}
        self.attributes_shared: set[str] = set()
        self.constants_written: set[str] = set()


class TraceMode(TorchFunctionMode):
    """Report operators on values to the frame. Not active inside units."""

    # docs/protocols.md
    _vescale_traces = True  # values may stand for those of other stages
    _vescale_sees_once = True

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame
        self.unit: str | None = None
        self._paused = False
        self._pushed = False

    @property
    def current_module(self) -> str:
        """The running unit, for messages."""
        return f"`{self.unit}`" if self.unit is not None else "code outside of stage modules"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if self._paused or func in _DESCRIPTIONS:
            return func(*args, **kwargs)
        if self.unit is not None:
            result = func(*args, **kwargs)
            if self.frame.recorder is not None:
                self.frame.recorder.note_inside(self.unit, func, (args, kwargs), result)
            return result
        name = _name_of(func)
        arguments, structure = flatten((args, kwargs))
        tape = self.frame.tape
        if not self.frame.is_event(arguments, name):
            if tape is None:
                return func(*args, **kwargs)
            before = versions_of(arguments), tape.state()
            result = func(*args, **kwargs)
            tape.add(func, arguments, structure, *before, result, stage=None)
            return result
        call = self.frame.begin(name, arguments, structure)
        if call.real is None:
            return self.frame.absent(call)[0]
        args, kwargs = call.inputs
        return self.frame.finish(call, func, func(*args, **kwargs), is_operator=True)

    def outside(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context that traces nothing while code outside of units runs, else None."""
        return None if self.unit is not None or self._paused else self.paused()

    # --- on and off ---

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Trace the program inside this context."""
        self._push()
        try:
            yield
        finally:
            self._pop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the package's own tensor code without tracing it."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def enter_unit(self, fqn: str) -> None:
        """Begin a unit. In the first micro-batch the mode stays active, to record the unit's internal tensors."""
        if self.frame.tape is not None:
            self.frame.tape.entering()
        self.unit = fqn
        if self.frame.recorder is None and function_mode_on_top() is self:
            self._pop()

    def leave_unit(self) -> None:
        """End a unit."""
        if self.frame.tape is not None:
            self.frame.tape.leaving()
        self.unit = None
        self._push()

    def _push(self) -> None:
        if not self._pushed:
            push_mode(self)
            self._pushed = True

    def _pop(self) -> None:
        if self._pushed:
            pop_mode()
            self._pushed = False
