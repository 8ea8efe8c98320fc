"""Any element-wise torch optimizer, on plain, tensor-parallel and ZeRO-sharded parameters.

An element-wise optimizer computes each element of a parameter from that element's gradient and state alone, so it may
be given any part of a parameter. This one gives it, for every parameter, the part that this rank owns (`_pieces.py`):

    backward        DDP leaves the mean gradient, or this rank's shard of it
    step            clip by the global norm | torch optimizer on the pieces | ZeRO 1, 2: all-gather parameters per
    bucket state_dict      by parameter name, every state as rectangles of the global tensor (`StatePiece`)

The update of an element is the same arithmetic whoever owns it: with equal gradients, ZeRO 0, 1 and 2 give the same
bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ._grads import align_gradients
from ._pieces import Piece, StatePiece, cut_pieces
from ._state import StateTemplate, probe_state
from .clip import clip_grad_norm_
from .ddp import DDP

__all__ = ["DistributedOptimizer"]

#: Optimizers of torch whose update of an element needs others (rows, matrices, the whole model).
NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


class DistributedOptimizer(torch.optim.Optimizer):
    """Step a torch optimizer on what this rank owns of a model's parameters.

    With a ``DDP(zero=1)`` or ``DDP(zero=2)`` it keeps 1/N of the state and gathers parameters after the step; with
    ``zero=0`` or a module that is not a ``DDP`` it updates whole local tensors. It works where a torch optimizer does:
    ``param_groups`` is live (learning-rate schedulers, changed hyperparameters) and holds the tensors that are updated,
    which with ZeRO are flat parts of the model's parameters.

    Args:
        optimizer_class: Element-wise ``torch.optim`` class, or a user's own: AdamW, Adam, SGD, Adagrad, RMSprop, …
        model: The ``DDP``, or a module.
        param_groups: As in torch: dicts with ``"params"``, a list of the model's parameters, and hyperparameters. Every
            trainable parameter must be in exactly one. By default one group of all.
        clip_grad_norm: Clip by this global norm before each step. ``math.inf`` only measures it.
        norm_axes: 1-D meshes whose ranks hold different parameters, such as ``(mesh["pp"],)``, for that norm.
        **optimizer_kwargs: Defaults of the optimizer class, such as ``lr``.

    Attributes:
        grad_norm: The global norm before clipping in the last step, a 0-dim tensor; None without ``clip_grad_norm``.

    Raises:
        ValueError: If the class is known not to be element-wise, if the model has no trainable parameter, or groups
            do not hold each trainable parameter once.
        TypeError: If ``optimizer_class`` is not a subclass of ``torch.optim.Optimizer``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=1.0)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.grad_norm
        tensor(5.1962)
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        model: nn.Module,
        param_groups: Iterable[dict[str, Any]] | None = None,
        clip_grad_norm: float | None = None,
        norm_axes: Iterable[DeviceMesh] = (),
        **optimizer_kwargs: Any,
    ):
        _check_class(optimizer_class)
        self.model = model
        self.clip_grad_norm = clip_grad_norm
        self.norm_axes = (norm_axes,) if isinstance(norm_axes, DeviceMesh) else tuple(norm_axes)
        self.grad_norm: Tensor | None = None
        self.pieces = cut_pieces(model)
        if not self.pieces:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter; freeze fewer, or do without an optimizer"
            )
        groups = _group_pieces(self.pieces, param_groups)
        self._make = lambda groups: optimizer_class(groups, **optimizer_kwargs)
        self._base = self._make([{**h, "params": [piece.tensor for piece in pieces]} for h, pieces in groups])
        self._pieces_by_group = [pieces for _, pieces in groups]
        self._complete = False
        super().__init__(self._base.param_groups, self._base.defaults)
        self._complete = True
        # One list and one dict for both: a change through either is seen by both.
        self.param_groups = self._base.param_groups
        self.state = self._base.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, update what this rank owns, and gather parameters. Every rank calls it.

        Args:
            closure: Clears gradients, computes the loss, runs backward and returns the loss.

        Raises:
            RuntimeError: If gradients have not been reduced since they were accumulated under ``no_sync``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self.model if isinstance(self.model, DDP) else None
        if model is not None:
            model.check_reduced()
        align_gradients(piece.param for piece in self.pieces)
        if self.clip_grad_norm is not None:
            target = model or [piece.param for piece in self.pieces]
            self.grad_norm = clip_grad_norm_(target, self.clip_grad_norm, norm_axes=self.norm_axes)
        for piece in self.pieces:
            piece.load_gradient()
        self._base.step()
        for piece in self.pieces:
            piece.drop_gradient()
        if model is not None:
            model.gather_parameters()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        self.model.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: parts of parameters and their state were laid out at construction.

        Raises:
            NotImplementedError: Always, for users.
        """
        if self._complete:
            raise NotImplementedError(
                "add_param_group would change the layout of sharded state; unfreeze the parameters, wrap the module in "
                "DDP again and build a new DistributedOptimizer with param_groups=[...]"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {fqn: {name: value}}, "param_groups": [hyperparameters]}``.

        State that is as large as the parameter is a `StatePiece`: a view of this rank's part that knows its place in
        the global tensor. ``step`` is a 0-dim tensor. State that the optimizer has not allocated yet is there, too,
        with its initial value, so that a checkpoint can be loaded in place and given to ``load_state_dict``. Keys are
        the same on all ranks that hold the model. Hyperparameters are JSON values.

        Note:
            For SGD with momentum and ``dampening``, a parameter without state differs from one with zero momentum; such
            a state dict should be taken after the first step.
        """
        state = {}
        for group, pieces in zip(self.param_groups, self._pieces_by_group, strict=True):
            templates: dict[torch.dtype, StateTemplate] = {}
            for piece in pieces:
                entries = self.state.get(piece.tensor) or self._fresh_state(templates, group, piece)
                state[piece.fqn] = {k: _expose(piece, k, v) for k, v in entries.items() if v is not None}
        groups = [{k: _to_json(k, v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"state": {piece.fqn: state[piece.fqn] for piece in self.pieces}, "param_groups": groups}

    def _fresh_state(self, templates: dict[torch.dtype, StateTemplate], group: dict, piece: Piece) -> dict[str, Tensor]:
        dtype = piece.tensor.dtype
        if dtype not in templates:
            templates[dtype] = probe_state(self._make, group, piece.tensor)
        return templates[dtype].fresh(piece.tensor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned, from this optimizer or one of the same model and layout.

        Values may also be whole tensors of the parameters' global shapes. Values that are this optimizer's own state
        are used as they are, without a copy.

        Raises:
            ValueError: If names of parameters or of state differ, the number of groups differs, or a value has another
                shape or layout; nothing has been changed then, except for a value of another layout.
        """
        _check_names(state_dict["state"], {piece.fqn for piece in self.pieces}, "parameters")
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the state dict has {len(state_dict['param_groups'])} param groups, this optimizer has "
                f"{len(self.param_groups)}; build it with the same param_groups"
            )
        ours = self.state_dict()["state"]
        for fqn, entries in ours.items():
            _check_names(state_dict["state"][fqn], set(entries), f"state of {fqn!r}")
        for piece in self.pieces:
            self.state[piece.tensor] = {
                name: _take(entry, state_dict["state"][piece.fqn][name]) for name, entry in ours[piece.fqn].items()
            }
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, value in loaded.items():
                group[key] = _from_json(value, like=group.get(key))


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a class such as torch.optim.AdamW, got {optimizer_class!r}")
    refused = next((base.__name__ for base in optimizer_class.__mro__ if base.__name__ in NOT_ELEMENTWISE), None)
    if refused is not None:
        raise ValueError(
            f"{refused} is not element-wise: its update of an element depends on other elements, which may be on other "
            f"ranks. Use an element-wise optimizer such as torch.optim.AdamW, or torch.optim.{refused} itself with "
            "DDP(zero=0) and without tensor parallelism"
        )


def _group_pieces(
    pieces: Sequence[Piece], param_groups: Iterable[dict[str, Any]] | None
) -> list[tuple[dict[str, Any], list[Piece]]]:
    """Return each group's hyperparameters and pieces."""
    if param_groups is None:
        return [({}, list(pieces))]
    by_param = {piece.param: piece for piece in pieces}
    groups, seen = [], set()
    for index, group in enumerate(param_groups):
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        params = [p[1] if isinstance(p, tuple) else p for p in params]
        params = [p for p in params if p.requires_grad]
        foreign = [tuple(p.shape) for p in params if p not in by_param]
        if foreign:
            raise ValueError(f"param group {index} has parameters that are not the model's, of shapes {foreign}")
        twice = [by_param[p].fqn for p in params if p in seen] + _duplicates([by_param[p].fqn for p in params])
        if twice:
            raise ValueError(f"parameters are in param groups more than once: {twice}")
        seen.update(params)
        groups.append(({k: v for k, v in group.items() if k != "params"}, [by_param[p] for p in params]))
    left = [piece.fqn for piece in pieces if piece.param not in seen]
    if left:
        raise ValueError(
            f"trainable parameters are in no param group: {left}; list them, or freeze them before wrapping"
        )
    return groups


def _duplicates(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _check_names(came: Iterable[str], expected: set[str], what: str) -> None:
    missing, unexpected = sorted(expected - set(came)), sorted(set(came) - expected)
    if missing or unexpected:
        raise ValueError(
            f"the state dict is of another model or optimizer: {what} missing {missing}, unexpected {unexpected}"
        )


def _expose(piece: Piece, name: str, value: Any) -> Any:
    """Return a state entry as the state dict shows it: what is as large as the piece becomes a `StatePiece`."""
    elementwise = isinstance(value, Tensor) and name != "step" and value.shape == piece.tensor.shape
    return StatePiece(piece, value) if elementwise else value


def _take(entry: StatePiece | Tensor, value: Any) -> Tensor:
    """Return this rank's state tensor with the loaded value: the one that the state dict exposed, or a copy into it."""
    if isinstance(entry, StatePiece):
        if isinstance(value, StatePiece) and value.piece is entry.piece:
            return value.tensor
        entry.load(value)
        return entry.tensor
    return entry.copy_(torch.as_tensor(value)) if value is not entry else entry


def _to_json(key: str, value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    try:
        json.dumps(value)
    except TypeError:
        raise TypeError(f"hyperparameter {key!r} is not a JSON value: {value!r}") from None
    return value


def _from_json(value: Any, *, like: Any) -> Any:
    """Return a loaded hyperparameter in the form of the present one."""
    if isinstance(like, Tensor):
        return like.fill_(value)
    return tuple(value) if isinstance(value, list) and isinstance(like, tuple) else value
