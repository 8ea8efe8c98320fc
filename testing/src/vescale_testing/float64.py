"""Run a model that casts to float32 inside entirely in float64.

A comparison in float64 separates a bug (1e-3, 1e-7) from the order of additions (1e-16). Many models, however, cast to
float32 inside: norms, router softmax, rotary tables. One such cast rounds to 1e-7 and hides every bug below that.
`keep_float64` turns these casts into casts to float64, without a change to the model:

    with keep_float64():
        loss = model(tokens, labels=tokens).loss
        loss.backward()

It is a `TorchFunctionMode` and intercepts each call of a torch function before dispatch. It works for plain tensors,
DTensors and other subclasses alike. If backward is inside the context, it also works during recomputation.
`created_dtypes` shows whether a model slipped through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vescale_testing._torch import TorchDispatchMode, autograd_is_no_torch_function, tree_leaves


@contextmanager
def keep_float64() -> Iterator[None]:
    """Turn casts to float32 into casts to float64 while the context is open.

    Affected are `.float()`, and `torch.float32` as an argument of any torch function: `.to(torch.float32)`,
    `.type(torch.float32)`, `softmax(x, dim=-1, dtype=torch.float32)`, `torch.ones(3, dtype=torch.float32)`; and a
    default dtype of float32. Casts to bfloat16 and float16 stay, as does `Tensor.view(torch.float32)`, which is no
    cast. Tensors that are float32 already stay so: use a model built inside the context or converted by `.double()`.

    Both sides of a comparison need it, and all of a training step should be inside.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> with keep_float64():
        ...     x.float().dtype, x.to(torch.bfloat16).dtype
        (torch.float64, torch.bfloat16)
        >>> x.float().dtype
        torch.float32
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(_widened(default))
    try:
        with _KeepFloat64(), autograd_is_no_torch_function():
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def created_dtypes() -> Iterator[dict[torch.dtype, set[str]]]:
    """Record the dtypes of all tensors that operators return while the context is open, with the operators' names.

    Example:
        >>> with created_dtypes() as seen:
        ...     x = torch.ones(2).double()
        >>> {dtype: sorted(operators) for dtype, operators in seen.items()}
        {torch.float32: ['aten.ones.default'], torch.float64: ['aten._to_copy.default']}
    """
    recorder = _RecordDtypes()
    with recorder:
        yield recorder.seen


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:  # a mode is off while it handles a call, but recomputation needs it
            with self:
                return _backward(*args, **kwargs)
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args, **kwargs)
        if func is torch.Tensor.view:  # reinterprets bits
            return func(*args, **kwargs)
        # most calls name no dtype: a compiler traces a plain loop many times faster than a call per argument
        for value in (*args, *kwargs.values()):
            if value is torch.float32:
                return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})
        return func(*args, **kwargs)


def _backward(
    tensor: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Do what `Tensor.backward` does once it has offered itself to function modes."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _RecordDtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch.dtype, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.seen.setdefault(leaf.dtype, set()).add(str(func))
        return result
