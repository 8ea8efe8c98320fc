"""What stands for a module of another stage, other than its calls: plain attributes, what its tensors are like, hooks.

Code outside of stage modules runs on every stage::

    x.to(self.head.weight.dtype)    gets an answer everywhere
    x @ self.head.weight            is refused where the head is not, with its stage
    self.embed.position_ids[:, :n]  is read everywhere, if the buffer is small and no part of the state dict

Inside of a forward the modules in it are found, too, and are instances of their classes, for code that hooks them.

Buffers that are no part of the state dict follow from the configuration. So stubs keep them, up to a size, and plain
attributes. A stage that changes one that is read elsewhere raises (``OutsideCode``). What stubs themselves need has
names that begin with ``_vescale_``, so that no attribute of a module is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._run.inside import users_hooks
from .._run.mode import RunState
from .._run.values import PipelineError, Placeholder

_NO_VALUE = object()
KEPT_BYTES = 1 << 20  # the largest constant that stubs keep

_MAY = "code outside of stage modules may call the module, and read plain attributes and what its tensors are like"


class LooksLike:
    """Base of what `isinstance` takes for an instance of another class, ``_vescale_kind``, while the model runs."""

    _vescale_kind: type
    _vescale_state: RunState

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        state = vars(self).get("_vescale_state")
        return type(self) if state is None or state.mode is None else self._vescale_kind


class AbsentModule(LooksLike, nn.Module):
    """The attributes and hooks of a module of another stage, and of the modules in it. It holds no tensors.

    Args:
        module: the module.
        fqn: its fully qualified name in the model.
        stage: its stage.
        state: the engine's run state.
        constant: returns a constant by its fully qualified name, or None.
        is_here: whether this rank has the module, and its hooks have got placeholders.
    """

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        stage: int,
        state: RunState,
        constant: Callable[[str], torch.Tensor | None],
        *,
        is_here: bool = False,
    ) -> None:
        super().__init__()
        self._vescale_fqn, self._vescale_stage, self._vescale_constant = fqn, stage, constant
        self._vescale_kind, self._vescale_state = type(module), state
        self.training = module.training
        self._vescale_items: dict[str, Any] = _plain_attributes(module)
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            self._vescale_items[name] = AbsentTensor(tensor, f"{fqn}.{name}", stage, state)
        for name, child in module.named_children():
            vars(self)["_modules"][name] = AbsentModule(child, f"{fqn}.{name}", stage, state, constant, is_here=is_here)
        if is_here:
            vars(self).update((k, v) for k, v in vars(module).items() if isinstance(v, Placeholder))
        for hook, with_kwargs in users_hooks(module, before=True):
            self.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        for hook, with_kwargs in users_hooks(module, before=False):
            self.register_forward_hook(hook, with_kwargs=with_kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AbsentModule:
        """Change dtypes as the function changes those of tensors."""
        for item in self._vescale_items.values():
            if isinstance(item, AbsentTensor):
                item.apply(fn)
        super()._apply(fn, recurse)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a unit is called as a whole."""
        del args, kwargs
        raise PipelineError(
            f"expected calls of whole units by code outside of stage modules, got one of `{self._vescale_fqn}`, a part "
            f"of a unit of stage {self._vescale_stage}; pass example_inputs, which show what is called, or name "
            f"`{self._vescale_fqn}` in PipelinePlan.split"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there are none here."""
        del args, kwargs
        raise AttributeError(_only_there("a list of tensors", self._vescale_fqn, self._vescale_stage))

    named_buffers = state_dict = named_parameters

    def _vescale_keeps(self, name: str, value: Any) -> bool:
        """Return whether a new value of an attribute is a plain one of a plain attribute."""
        return is_plain(value) and is_plain(self.__dict__.get("_vescale_items", {}).get(name, _NO_VALUE))

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__.get("_vescale_items", {}).get(name)
        if isinstance(known, AbsentTensor) and isinstance(value, torch.Tensor):
            known.shape, known.dtype = value.shape, value.dtype
        elif self._vescale_keeps(name, value):
            self._vescale_items[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        items, modules = self.__dict__.get("_vescale_items", {}), self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if name in items:
            value, full_name = items[name], f"{self._vescale_fqn}.{name}"
            if not isinstance(value, AbsentTensor):
                self._vescale_state.attributes_read[full_name] = value
                return value
            constant = self._vescale_constant(full_name)
            return value if constant is None else constant
        own = self.__dict__
        raise AttributeError(_only_there(f"attribute `{name}`", own.get("_vescale_fqn"), own.get("_vescale_stage")))


def _only_there(what: str, fqn: str | None, stage: int | None) -> str:
    return f"{what} of `{fqn}` is available on pipeline stage {stage} only; {_MAY}"


class AbsentTensor:
    """Shape, dtype and device of a parameter or buffer of another stage.

    Args:
        tensor: the tensor; nothing else of it is kept.
        fqn: its fully qualified name in the model.
        stage: its stage.
        state: the engine's run state.

    Attributes:
        shape: global shape.
        dtype: present dtype.
    """

    def __init__(self, tensor: torch.Tensor, fqn: str, stage: int, state: RunState) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._device, self._fqn, self._stage, self._state = tensor.device, fqn, stage, state

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._state.device or self._device

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """Return whether the dtype is one of floating-point numbers."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Return whether the dtype is complex."""
        return self.dtype.is_complex

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the dtype as the function changes that of tensors."""
        self.dtype = function(torch.empty(0, dtype=self.dtype, device=self.device)).dtype

    def __getitem__(self, index: Any) -> Any:
        """Refuse: there are no values here."""
        raise PipelineError(f"`[...]`: expected values of this stage, got {self._describe()}; {_MAY}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: there are no values here."""
        del types
        found = next(each for each in [*args, *(kwargs or {}).values()] if isinstance(each, AbsentTensor))
        name = getattr(function, "__name__", str(function))
        raise PipelineError(f"`{name}`: expected values of this stage, got {found._describe()}; {_MAY}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"expected shape, dtype or device, got `{name}` of {self._describe()}; {_MAY}")

    def _describe(self) -> str:
        return f"`{self.__dict__.get('_fqn')}`, which is on pipeline stage {self.__dict__.get('_stage')} only"


def constants_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the small buffers of a module that are no part of its state dict, by name."""
    state = module.state_dict(keep_vars=True)
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name not in state and buffer.numel() * buffer.element_size() <= KEPT_BYTES
    }


def is_plain(value: Any) -> bool:
    """Return whether stubs keep an attribute: None, a number, a string, a dtype, a device, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    own_classes = [cls for cls in type(module).__mro__ if cls not in nn.Module.__mro__]
    registries = [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]  # which may hold None
    layers = [*(vars(cls) for cls in reversed(own_classes)), vars(module), *registries]
    found = {k: v for layer in layers for k, v in layer.items() if is_plain(v) and not k.startswith("_")}
    found.pop("training", None)  # every module has its own
    return found
