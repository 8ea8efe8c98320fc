"""Muon: momentum whose matrices are orthogonalized, with AdamW for everything that is not a matrix.

    method   parameters                                    state             update of a step
    muon     matrices (rows, cols), and stacks of them     momentum_buffer   momentum, Newton-Schulz, scale by shape
             (num_matrices, rows, cols), each by itself
    adamw    all others, and those listed in ``adamw``     as AdamW          as AdamW

A matrix is updated as ``torch.optim.Muon`` would update it, with the same bits. The iteration, which needs a full
matrix, is in `_muon/matrices.py`. One process has the matrix; ``DistributedOptimizer`` brings it to one of the
data-parallel and tensor-parallel ranks that have parts or copies of it, and brings the result back.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); for ``match_rms_adamw`` Liu et
al., "Muon is Scalable for LLM Training" (2025).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import Condition, NonNegative, checked, one_of

from ._muon.matrices import FullMatrices, Matrices, Update
from ._muon.newton_schulz import ADJUSTMENTS, NewtonSchulz, adjusted_lr
from ._param_groups import as_group, as_groups

__all__ = ["Muon"]

Rate = Annotated[
    float | Tensor,
    Condition(
        "a finite number of 0 or more, or a tensor of one",
        lambda lr: lr.numel() == 1 if isinstance(lr, Tensor) else 0 <= lr < math.inf,
    ),
]
Steps = Annotated[int, Condition("an integer from 0 to 99", lambda steps: 0 <= steps < 100)]
Adjustment = Annotated[str, one_of(*filter(None, ADJUSTMENTS))]
Decay = Annotated[float, Condition("a number from 0 up to 1, which is excluded", lambda decay: 0 <= decay < 1)]


class Muon(torch.optim.Optimizer):
    """Step matrices by Muon and all other parameters by AdamW.

    ``param_groups`` has separate groups for both methods, with ``"method"`` among their hyperparameters. A group with
    parameters of both kinds is split in two. Used directly, it takes plain tensors. For ``DDP``, ZeRO, tensor or
    expert parallelism give the class to ``DistributedOptimizer``.

    Args:
        params: Parameters, ``named_parameters()``, or groups of them as dicts, which may also have a ``"method"``.
        lr: Learning rate.
        weight_decay: Decoupled weight decay of matrices.
        momentum: Decay of the running mean of gradients.
        nesterov: Orthogonalize the mean one gradient ahead.
        ns_coefficients: Polynomial of the Newton-Schulz iteration.
        eps: Smallest norm by which a matrix is divided.
        ns_steps: Number of iterations.
        adjust_lr_fn: ``"original"`` (also None) or ``"match_rms_adamw"``: how ``lr`` depends on a matrix's shape.
        adamw: Matrices to step by AdamW: regexes for full names, such as those of embeddings and
            heads, or parameters. Regexes need named parameters. A ``Conv1d`` weight looks like a stack: list it here.
        adamw_lr: Learning rate of AdamW; None: ``lr``.
        adamw_betas: Coefficients of AdamW.
        adamw_eps: Term of AdamW's denominator.
        adamw_weight_decay: Decoupled weight decay of AdamW.
        matrices: Where matrices are orthogonalized; ``DistributedOptimizer`` gives it.

    Raises:
        ValueError: If a hyperparameter is out of range, an entry of ``adamw`` fits no parameter or needs names that are
            not there, or ``"method"`` asks for Muon where there is no matrix.
        TypeError: For DTensors, which need a ``DistributedOptimizer``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> optimizer = Muon(model.named_parameters(), lr=0.02, adamw=[r"1\\.weight"], adamw_lr=3e-4)
        >>> [(group["method"], group["param_names"]) for group in optimizer.param_groups]
        [('muon', ['0.weight']), ('adamw', ['0.bias', '1.weight', '1.bias'])]
    """

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-3,
        weight_decay: NonNegative = 0.1,
        momentum: NonNegative = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: NonNegative = 1e-7,
        ns_steps: Steps = 5,
        adjust_lr_fn: Adjustment | None = None,
        *,
        adamw: str | Tensor | Iterable[str | Tensor] = (),
        adamw_lr: Rate | None = None,
        adamw_betas: tuple[Decay, Decay] = (0.9, 0.999),
        adamw_eps: NonNegative = 1e-8,
        adamw_weight_decay: NonNegative = 0.01,
        matrices: Matrices | None = None,
    ):
        self._matrices = FullMatrices() if matrices is None else matrices
        self._listed = [adamw] if isinstance(adamw, (str, Tensor)) else list(adamw)
        self._names_seen: list[str] = []
        self._entries_used: set[int] = set()
        adamw_lr = lr if adamw_lr is None else adamw_lr
        self._adamw = _adamw_without_parameters(
            lr=adamw_lr, betas=tuple(map(float, adamw_betas)), eps=adamw_eps, weight_decay=adamw_weight_decay
        )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(as_groups(params), defaults)
        self._check_all_used()
        self._link()
        self._matrices.prepare([p for group in self.param_groups if group["method"] == "muon" for p in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as two if it has parameters for both methods.

        Raises:
            ValueError: As the constructor.
            TypeError: As the constructor.
        """
        own = self.defaults
        for group in self._split(as_group(param_group)):
            # The base class completes a group by self.defaults, and each method has its own.
            self.defaults = self._adamw.defaults if group["method"] == "adamw" else own
            check = _adamw_group if group["method"] == "adamw" else _muon_group
            check(**{**self.defaults, **group})
            try:
                super().add_param_group(group)
            finally:
                self.defaults = own
        self._link()

    def _split(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        asked = group.get("method")
        if asked not in (None, "muon", "adamw"):
            raise ValueError(f'"method" of a param group must be "muon" or "adamw", got {asked!r}')
        chosen: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for entry in params:
            name, param = entry if isinstance(entry, tuple) else (None, entry)
            chosen[self._method(name, param, asked)].append(entry)
        for method, members in chosen.items():
            if members or (not params and method == (asked or "muon")):
                yield {**group, "params": members, "method": method}

    def _method(self, name: str | None, param: Tensor, asked: str | None) -> str:
        if isinstance(param, DTensor):
            raise TypeError(
                f"Muon got a DTensor ({name or 'unnamed'}, placements {param.placements}): its matrix is spread over "
                "ranks; use DistributedOptimizer(vescale.optim.Muon, model=...)"
            )
        shape = self._matrices.shape_of(param)
        listed = self._is_listed(name, param)
        is_matrix = len(shape) in (2, 3) and torch.is_floating_point(param)
        if asked == "muon" and not is_matrix:
            raise ValueError(
                f'a param group with "method": "muon" holds {name or "a parameter"} of shape {shape}; Muon steps '
                "matrices (rows, cols) and stacks of them only"
            )
        return asked or ("muon" if is_matrix and not listed else "adamw")

    def _is_listed(self, name: str | None, param: Tensor) -> bool:
        if name is not None:
            self._names_seen.append(name)
        found = False
        for number, entry in enumerate(self._listed):
            if isinstance(entry, Tensor):
                fits = self._matrices.parameter_of(param) is entry
            elif name is None:
                raise ValueError(f"adamw={entry!r} needs names; pass model.named_parameters() instead of parameters")
            else:
                fits = re.fullmatch(entry, name) is not None
            if fits:
                self._entries_used.add(number)
                found = True
        return found

    def _check_all_used(self) -> None:
        for number, entry in enumerate(self._listed):
            if number not in self._entries_used:
                what = tuple(entry.shape) if isinstance(entry, Tensor) else entry
                near = difflib.get_close_matches(str(what), self._names_seen, n=3, cutoff=0.3)
                raise ValueError(
                    f"expected adamw entries that fit a parameter, got another: adamw entry {what!r} fits no "
                    f"parameter; the nearest names are {near}"
                )

    def _link(self) -> None:
        """Make the inner AdamW work on this optimizer's groups and state."""
        self._adamw.param_groups = [group for group in self.param_groups if group["method"] == "adamw"]
        self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_adamw" not in self.__dict__:  # a copy, which torch makes without the constructor
            self._matrices, self._listed, self._names_seen, self._entries_used = FullMatrices(), [], [], set()
            self._adamw = _adamw_without_parameters()
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Clears gradients, computes the loss, runs backward and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {}
        for tensor, result in self._matrices.orthogonalize(self._updates(groups)):
            _apply(tensor, result, groups[tensor], self._matrices.shape_of(tensor))
        self._adamw.state = self.state
        if self._adamw.param_groups:
            self._adamw.step()
        return loss

    def _updates(self, groups: dict[Tensor, dict[str, Any]]) -> Iterator[Update]:
        """Update momentum and yield it for orthogonalization; record the group of each tensor."""
        for group in self.param_groups:
            if group["method"] != "muon":
                continue
            iteration = NewtonSchulz(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.layout is not torch.strided:
                    raise RuntimeError(f"Muon got a sparse gradient ({param.grad.layout}); build with sparse=False")
                groups[param] = group
                yield Update(param, self._momentum(param, group), iteration)

    def _momentum(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
        return param.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _adamw_without_parameters(**settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.zeros(0, device="meta")], **settings)


def _apply(param: Tensor, result: Tensor, group: dict[str, Any], shape: tuple[int, ...]) -> None:
    lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    param.mul_(1 - lr * group["weight_decay"])
    param.add_(result, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], *shape[-2:]))


@checked
def _muon_group(
    *,
    lr: Rate,
    weight_decay: NonNegative,
    momentum: NonNegative,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    eps: NonNegative,
    ns_steps: Steps,
    adjust_lr_fn: Adjustment | None,
    **_others: Any,
) -> None:
    """Check the settings of a param group."""


@checked
def _adamw_group(
    *,
    lr: Rate,
    betas: tuple[Decay | Tensor, Decay | Tensor],
    eps: NonNegative,
    weight_decay: NonNegative,
    **_others: Any,
) -> None:
    """Check the settings of a param group."""
