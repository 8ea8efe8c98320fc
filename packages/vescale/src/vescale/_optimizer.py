"""The optimizer of a plan from what the user gives: a class, a partial of one, or any function of the parameters.

    torch.optim.AdamW                                          its defaults
    functools.partial(torch.optim.AdamW, lr=3e-4)              hyperparameters by name
    functools.partial(make, 3e-4), lambda params: ...          called with the parameters, returns an optimizer
    vescale.MuonWithAdamW(lr=0.02, adamw_lr=3e-4)              Muon for matrices, AdamW for all else

`vescale.optim.DistributedOptimizer` takes a class and its hyperparameters, or an optimizer, which it takes apart.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import NonNegative, checked
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale.plan import Plan


@checked
@dataclass(frozen=True)
class MuonWithAdamW:
    """Muon for the matrices of a model, and AdamW for its embeddings, its head and all that is no matrix.

    An ``optimizer_fn`` of `vescale.parallelize`. Embeddings are found by their class, the head by its shape: the last
    linear layer with one output per row of an embedding, and weights that are tied to either.

    Attributes:
        lr: learning rate of matrices.
        adamw_lr: learning rate of AdamW.
        adamw: further matrices for AdamW: names of parameters, or regular expressions for full names.
        options: other arguments of `vescale.optim.Muon`, such as ``{"weight_decay": 0.01}``.

    Example:
        >>> MuonWithAdamW(lr=0.02, adamw_lr=3e-4).names(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)))
        ['0.weight', '1.weight']
    """

    lr: NonNegative
    adamw_lr: NonNegative
    adamw: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def names(self, model: nn.Module) -> list[str]:
        """Return the names of the matrices that AdamW updates.

        Raises:
            ValueError: an entry of ``adamw`` matches no parameter.
        """
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        rows = {module.num_embeddings for module in embeddings}
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        heads = [module for module in linear[-1:] if module.out_features in rows]
        weights = {id(module.weight) for module in (*embeddings, *heads)}
        named = dict(model.named_parameters())
        found = {name for name, parameter in named.items() if id(parameter) in weights}
        for pattern in self.adamw:
            matched = {name for name in named if name == pattern or re.fullmatch(pattern, name)}
            if not matched:
                raise ValueError(
                    f"MuonWithAdamW: expected names of parameters in adamw, got {pattern!r}, which matches none of "
                    f"{type(model).__name__}; write regular expressions for full names, such as r'.*\\.embed\\.weight'"
                )
            found |= matched
        return [name for name in named if name in found]


OptimizerFn = type[torch.optim.Optimizer] | Callable[..., Any] | MuonWithAdamW


@dataclass(frozen=True)
class OptimizerChoice:
    """What is known of an optimizer before the parameters are final.

    Attributes:
        optimizer_class: the class; None if ``make`` makes the optimizer.
        keywords: hyperparameters by name.
        make: called with the parameters.
        adamw: for `MuonWithAdamW`, the names in the full model that AdamW updates.
    """

    optimizer_class: type[torch.optim.Optimizer] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] | None = None
    adamw: tuple[str, ...] = ()

    @classmethod
    def of(cls, optimizer_fn: OptimizerFn, model: nn.Module) -> OptimizerChoice:
        """Return the choice in an ``optimizer_fn``.

        Raises:
            TypeError: it is no class of optimizers and cannot be called.
        """
        if isinstance(optimizer_fn, MuonWithAdamW):
            chosen = {**optimizer_fn.options, "lr": optimizer_fn.lr, "adamw_lr": optimizer_fn.adamw_lr}
            return cls(Muon, chosen, adamw=tuple(optimizer_fn.names(model)))
        function: Any = optimizer_fn
        keywords: dict[str, Any] = {}
        if isinstance(function, functools.partial) and not function.args:
            function, keywords = function.func, dict(function.keywords)
        if isinstance(function, type) and issubclass(function, torch.optim.Optimizer):
            return cls(function, keywords)
        is_optimizer = isinstance(optimizer_fn, torch.optim.Optimizer)
        is_class = isinstance(function, type | nn.Module)
        if is_optimizer or is_class or not callable(optimizer_fn):
            found = f"an instance of {type(optimizer_fn).__name__}" if is_optimizer else repr(optimizer_fn)
            raise TypeError(
                "parallelize: expected a torch.optim class, functools.partial of one, or a function from parameters to "
                f"an optimizer as optimizer_fn, got {found}; pass functools.partial(torch.optim.AdamW, lr=3e-4)"
            )
        return cls(make=optimizer_fn)

    def build(
        self,
        plan: Plan,
        model: DDP,
        *,
        param_groups: Iterable[dict[str, Any]] | None,
        norm_axes: tuple[DeviceMesh, ...],
    ) -> DistributedOptimizer:
        """Return the optimizer of this rank's part of the parameters.

        Raises:
            TypeError: a function returned no optimizer.
        """
        settings: dict[str, Any] = {
            "model": model,
            # an infinite norm is measured, and nothing is clipped
            "clip_grad_norm": math.inf if plan.clip_grad_norm is None else plan.clip_grad_norm,
            "norm_axes": norm_axes,
            "master_dtype": dtype_of(plan.master_dtype),
            "state_dtype": dtype_of(plan.state_dtype),
        }
        if self.optimizer_class is not None:
            keywords = dict(self.keywords)
            if self.adamw:
                here = {name for name, _ in model.named_parameters()}
                keywords["adamw"] = [re.escape(name) for name in self.adamw if name in here]
            return DistributedOptimizer(self.optimizer_class, param_groups=param_groups, **settings, **keywords)
        assert self.make is not None
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = self.make(trainable if param_groups is None else list(param_groups))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"parallelize: expected a function that returns an optimizer as optimizer_fn, got one that returns "
                f"{type(optimizer).__name__}; return torch.optim.AdamW(params, ...)"
            )
        return DistributedOptimizer(optimizer, **settings)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return a dtype by its name in a plan."""
    return None if name is None else getattr(torch, name)
