"""Any element-wise torch optimizer, and Muon, on plain, tensor-parallel and ZeRO-sharded parameters.

An element-wise optimizer computes each element of a parameter from that element's gradient and state alone, so it may
be given any part of a parameter. This one gives it the part of every parameter that this rank owns, a piece:

    backward          DDP leaves the mean gradient, or this rank's shard of it
    step              clip by the global norm | torch optimizer on the pieces | ZeRO 1, 2: launch gathers of parameters
    next forward      waits for each bucket at its first use (`_parameters/gathers.py`)
    state_dict        by parameter name, every state as rectangles of the global tensor (`StatePiece`)
    full_state_dict   full tensors, as in the torch optimizer of one process (`_state/full_state.py`)

The update of an element is the same arithmetic on every rank: with equal gradients, all ZeRO stages give the same
bits. Muon, whose update needs full matrices, brings the parts of a matrix to one rank (`_muon/matrices.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import CheckedInside, Fact, Turns, checked

from ._gradients.placeholder import align_gradients
from ._ranks.axis import Axis
from ._state.build import Instance, build_optimizer, check_class, cut_pieces, group_pieces, take_apart
from ._state.entries import (
    MASTER,
    StateTemplate,
    check_loaded,
    check_names,
    elementwise_names,
    expose,
    from_json,
    probe_state,
    take,
    to_json,
)
from ._state.full_state import NOT_SAVED, gather_full, named_state, numbered_state
from ._state.hyperparameters import Hyperparameters, group_facts
from ._state.loss_scaling import PieceList, Unscaler
from ._state.masters import MasterWeights
from ._state.pieces import Piece, StatePiece
from ._state.state_dtype import KeptState, check_state_dtype
from .clip import check_max_norm, clip_grad_norm_, distribution_axes, mesh_axes
from .ddp import DDP

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Step a torch optimizer on this rank's part of a model's parameters.

    With a ``DDP`` of ZeRO 1, 2 or 3 it keeps 1/N of the state; with 1 and 2 it gathers parameters after the step. With
    ``zero=0`` or a module that is not a ``DDP`` it updates full local tensors. It works where a torch optimizer does:
    ``param_groups`` is live (learning-rate schedulers, changed hyperparameters) and holds the tensors that are updated,
    which with ZeRO are flat parts of the model's parameters. It works with ``torch.amp.GradScaler``: all ranks,
    including those of ``norm_axes``, find the same infinities and skip the same steps.

    Args:
        optimizer_class_or_instance: Element-wise ``torch.optim`` class, or a user's own: AdamW, Adam, SGD, Adagrad,
            RMSprop, …; or ``vescale.optim.Muon``, or ``torch.optim.Muon`` for a model of matrices only. Or an optimizer
            of such a class with the model's trainable parameters, made before or after ``DDP``: its groups,
            hyperparameters and state are taken over, and it should not be used any more.
        model: The ``DDP``, or a module.
        param_groups: As in torch: dicts with ``"params"``, a list of the model's parameters, and hyperparameters. Every
            trainable parameter must be in exactly one. By default one group of all.
        clip_grad_norm: Clip by this global norm, a positive number, before each step. ``math.inf`` only measures it.
        norm_axes: a 1-D mesh, or several, whose ranks hold different parameters, such as ``mesh["pp"]``, for that norm.
        master_dtype: Keep and update parameters of fewer bits than this, typically ``torch.float32``, in this dtype,
            which is also that of the optimizer's state. A write into parameters between steps updates the masters.
            Parameters that ``DDP(param_dtype=...)`` has cast have masters in their original dtype by default.
        state_dtype: Keep floating-point state that is as large as its parameter (moments, momentum) in this dtype of
            fewer bits, typically ``torch.bfloat16``, between steps; or a mapping from names of state to dtypes, such as
            ``{"exp_avg": torch.bfloat16}``, which leaves others unchanged. The optimizer computes the same on wide
            copies, which are rounded afterwards. During a step classes of ``torch.optim`` need these for 32 MiB of what
            is updated on this rank at a time, or for one larger part of a parameter; other classes and Muon need them
            for all. State dicts hold this dtype, and loaded state of another is rounded. Rounded second moments cannot
            fall in bfloat16 if a step takes less than half their spacing (``beta2`` above 0.998 or so), and most are
            out of range of float16: leave ``"exp_avg_sq"`` out. State of parameters of one element is never rounded.
        **optimizer_kwargs: Defaults of the optimizer class, such as ``lr``.

    Attributes:
        grad_norm: The global norm before clipping in the last step, a 0-dim tensor; None without ``clip_grad_norm``.

    Raises:
        ValueError: If the class is known not to be element-wise, if the model has no trainable parameter, or groups
            do not hold each trainable parameter once; as Muon's constructor; if an instance has hooks or a scheduler,
            or arguments of its constructor that cannot be found; if ``state_dtype`` is not a floating-point dtype of
            16 bits or more, has no fewer bits than a parameter or its master, or names state that there is not; or,
            on every rank, if arguments or hyperparameters differ between ranks.
        TypeError: If the class is not a subclass of ``torch.optim.Optimizer``, or hyperparameters are given with an
            instance, which has its own.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=1.0)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.grad_norm
        tensor(5.1962)
    """

    @checked
    def __init__(
        self,
        optimizer_class_or_instance: CheckedInside[type[torch.optim.Optimizer] | torch.optim.Optimizer],
        *,
        model: nn.Module,
        param_groups: Iterable[dict[str, Any]] | None = None,
        clip_grad_norm: CheckedInside[float | None] = None,
        norm_axes: DeviceMesh | Iterable[DeviceMesh] = (),
        master_dtype: torch.dtype | None = None,
        state_dtype: CheckedInside[torch.dtype | Mapping[str, torch.dtype] | None] = None,
        **optimizer_kwargs: Any,
    ):
        optimizer_class, instance = optimizer_class_or_instance, None
        if isinstance(optimizer_class, torch.optim.Optimizer):
            instance = _taken_apart(optimizer_class, param_groups, optimizer_kwargs)
            optimizer_class, param_groups = instance.optimizer_class, instance.param_groups
            optimizer_kwargs = instance.arguments
        check_class(optimizer_class)
        if clip_grad_norm is not None:
            check_max_norm("DistributedOptimizer: clip_grad_norm", clip_grad_norm)
        self.model = model
        self.clip_grad_norm = clip_grad_norm
        self.norm_axes = (norm_axes,) if isinstance(norm_axes, DeviceMesh) else tuple(norm_axes)
        self.grad_norm: Tensor | None = None
        _check_master_dtype(master_dtype)
        other_stages = any(axis.size() > 1 for axis in self.norm_axes)
        self.pieces = cut_pieces(model, master_dtype=master_dtype, detached=other_stages)
        if not self.pieces:
            raise ValueError(
                f"expected a model with trainable parameters, got one without: {type(model).__name__} has no trainable "
                "parameter; freeze fewer, or do without an optimizer"
            )
        groups = group_pieces(self.pieces, param_groups)
        self._base, self._make = build_optimizer(optimizer_class, groups, optimizer_kwargs, model)
        by_tensor = {piece.tensor: piece for piece in self.pieces}
        self._pieces_by_group = [[by_tensor[t] for t in group["params"]] for group in self._base.param_groups]
        self._kept = self._kept_state(state_dtype) if state_dtype is not None else None
        self._apart = [piece for piece in self.pieces if piece.tensor is not piece.param]
        self._distributed = [piece.param for piece in self.pieces if isinstance(piece.param, DTensor)]
        self._num_views = _num_views(self.pieces, model)
        original = model.originals.take if isinstance(model, DDP) else lambda _param: None
        self._masters = MasterWeights(self.pieces, original)
        self._unscaler = Unscaler(self.pieces, self._distribution_axes)
        self._complete = False
        super().__init__(self._base.param_groups, {})
        self._complete = True
        self.defaults = self._base.defaults
        for group in self._base.param_groups:
            group["params"] = PieceList(group["params"], self._unscaler)
        # Both share one list and one dict, so a change through either is visible in both.
        self.param_groups = self._base.param_groups
        self.state = self._base.state
        if instance is not None and instance.state:
            self._take_state(instance.state)
        self._hyperparameters, self._turns = Hyperparameters(), Turns()
        self._compare_first(master_dtype, state_dtype)

    def _compare_first(self, master_dtype: object, state_dtype: object) -> None:
        """Compare over all ranks what must be equal, and do so again in steps and at the end of backwards.

        Raises:
            ValueError: On every rank, if anything differs.
        """
        model = self.model if isinstance(self.model, DDP) else None
        axes = mesh_axes([piece.param for piece in self.pieces], model)
        if self._turns.is_on:
            same = "pass the same argument on all ranks"
            name = type(self._base).__name__
            facts = [
                Fact("the class of the optimizer", name, same),
                Fact("clip_grad_norm", str(self.clip_grad_norm), same),
                Fact("master_dtype", str(master_dtype), same),
                Fact("state_dtype", str(state_dtype), same),
            ]
            for axis in [*axes, *(Axis.of(mesh, role="norm_axes") for mesh in self.norm_axes)]:
                axis.check_facts(facts, what="arguments of DistributedOptimizer")
            for axis in axes:
                axis.check_facts(
                    [*group_facts(self._names_by_group()), *self._facts()], what="groups of DistributedOptimizer"
                )
        if model is not None:
            model.compare_in_backward(self._facts)
            axes = [axis for axis in axes if axis.ranks != model.data_axes.all.ranks]
        self._compared_in_turn = axes

    def _facts(self) -> list[Fact]:
        return self._hyperparameters.facts(self.param_groups, self.clip_grad_norm)

    def _kept_state(self, state_dtype: torch.dtype | Mapping[str, torch.dtype]) -> KeptState:
        names: set[str] = set()
        if isinstance(state_dtype, Mapping):
            for group, pieces in zip(self._base.param_groups, self._pieces_by_group, strict=True):
                for tensor in {piece.tensor.dtype: piece.tensor for piece in pieces}.values():
                    names |= elementwise_names(self._make, group, tensor)
        check_state_dtype(state_dtype, self.pieces, names)
        return KeptState(self._base, self.pieces, state_dtype)

    def _take_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Take over the state of an optimizer of the model's parameters."""
        by_fqn = {piece.fqn: state[piece.param] for piece in self.pieces if piece.param in state}
        self.load_full_state_dict(numbered_state(by_fqn, self._names_by_group(), self.param_groups))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, update this rank's part, and start the all-gathers of parameters. Every rank calls it.

        With ZeRO 1 and 2 all-gathers stay in flight while the next forward runs; a read of a parameter waits for its
        own.

        Args:
            closure: Clears gradients, computes the loss, runs backward and returns the loss.

        Raises:
            RuntimeError: If gradients have not been reduced since they were accumulated under ``no_sync``.
            ValueError: On every rank, if hyperparameters differ between ranks (see `vescale.dtensor.check_ranks`); with
                a ``DDP``, the backward before it raises that.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self.model if isinstance(self.model, DDP) else None
        if model is not None:
            model.wait_for_parameters()
            model.check_reduced()
        if self._compared_in_turn and self._turns.is_due():
            for axis in self._compared_in_turn:
                axis.check_facts(self._facts(), what="hyperparameters of DistributedOptimizer")
        align_gradients(self._distributed)
        self._masters.follow()
        if self.clip_grad_norm is not None:
            target = model or [piece.param for piece in self.pieces]
            self.grad_norm = clip_grad_norm_(target, self.clip_grad_norm, norm_axes=self.norm_axes)
        self._step_pieces()
        self._masters.store()
        if model is not None:
            model.gather_parameters(self._num_views)
        self._masters.remember()
        return loss

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class of the torch optimizer, which a checkpoint stores and compares."""
        return type(self._base)

    def _step_pieces(self) -> None:
        lists = [group["params"] for group in self.param_groups]
        for params in lists:
            params.is_stepping = True
        try:
            for piece in self._apart:
                grad = piece.param.grad
                if grad is None or piece.loaded is not grad:
                    piece.load_gradient()
            (self._kept or self._base).step()
        finally:
            for piece in self._apart:
                if piece.loaded is None:
                    piece.drop_gradient()
            for params in lists:
                params.is_stepping = False

    def _distribution_axes(self) -> list[Axis]:
        model = self.model if isinstance(self.model, DDP) else None
        return distribution_axes([piece.param for piece in self.pieces], model, self.norm_axes)

    def refresh_master_weights(self) -> None:
        """Copy parameters that were written through ``.data`` since the last step into the masters; other writes are
        detected.
        """
        self._masters.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        self.model.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise NotImplementedError: parts of parameters and their state were laid out at construction.

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

        State that is as large as the parameter is a `StatePiece`: a view of this rank's part, with its position in the
        global tensor. Numbers such as ``step`` are 0-dim tensors. State that the optimizer has not allocated yet is
        included with its initial value, so that a checkpoint can be loaded in place and given to ``load_state_dict``.
        Keys are the same on all ranks that hold the model. Hyperparameters are JSON values.

        Note:
            For SGD with momentum and ``dampening``, a parameter without state differs from one with zero momentum; such
            a state dict should be taken after the first step.
        """
        state = {}
        for group, pieces in zip(self.param_groups, self._pieces_by_group, strict=True):
            templates: dict[torch.dtype, StateTemplate] = {}
            for piece in pieces:
                entries = self.state.get(piece.tensor) or self._fresh_state(templates, group, piece)
                state[piece.fqn] = {k: expose(piece, k, v) for k, v in entries.items() if v is not None}
                if piece.value is not None:
                    state[piece.fqn][MASTER] = StatePiece(piece, piece.tensor.detach())
        groups = [{k: to_json(k, v) for k, v in group.items() if k not in NOT_SAVED} for group in self.param_groups]
        return {"state": {piece.fqn: state[piece.fqn] for piece in self.pieces}, "param_groups": groups}

    def _fresh_state(self, templates: dict[torch.dtype, StateTemplate], group: dict, piece: Piece) -> dict[str, Tensor]:
        dtype = piece.tensor.dtype
        if dtype not in templates:
            templates[dtype] = probe_state(self._make, group, piece.tensor)
        state = templates[dtype].fresh(piece.tensor)
        if self._kept is not None:
            self._kept.round_new(piece.tensor, state)
        return state

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, from this optimizer or one of the same model and layout.

        Values may also be full tensors of the parameters' global shapes. Values that are this optimizer's own state
        are used as they are, without a copy.

        Raises:
            ValueError: If names of parameters or of state differ, the number of groups differs, or a value has another
                shape or layout; nothing has been changed then, except for a value of another layout.
        """
        _check_form(state_dict)
        check_names(state_dict["state"], {piece.fqn for piece in self.pieces}, "parameters")
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the state dict has {len(state_dict['param_groups'])} param groups, this optimizer has "
                f"{len(self.param_groups)}; build it with the same param_groups"
            )
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, value in loaded.items():
                check_loaded(key, value, like=group.get(key))
        ours = self.state_dict()["state"]
        for fqn, entries in ours.items():
            check_names(state_dict["state"][fqn], set(entries), f"state of {fqn!r}")
        for piece in self.pieces:
            theirs = state_dict["state"][piece.fqn]
            taken = {name: take(entry, theirs[name]) for name, entry in ours[piece.fqn].items()}
            master = taken.pop(MASTER, None)
            if master is not None and master.data_ptr() != piece.tensor.data_ptr():
                piece.tensor.detach().copy_(master)
            self.state[piece.tensor] = taken
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, value in loaded.items():
                group[key] = from_json(value, like=group.get(key))

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict that the torch optimizer of one process would have, on every rank.

        A plain optimizer of the same class and groups, over the trainable parameters of the full model, can load it.
        Every rank calls it. Master weights are full tensors, too, by name under ``"master_weights"``. State is in
        ``state_dtype``, if there is one; torch widens what it loads.
        """
        state = {piece.fqn: self.state[piece.tensor] for piece in self.pieces if piece.tensor in self.state}
        masters = {piece.fqn: {MASTER: piece.tensor} for piece in self.pieces if piece.value is not None}
        full = gather_full(state, self.pieces, self.model)
        found = numbered_state(full, self._names_by_group(), self.param_groups)
        if masters:
            wide = gather_full(masters, self.pieces, self.model)
            found["master_weights"] = {fqn: entries[MASTER] for fqn, entries in wide.items()}
        return found

    @checked
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state that a torch optimizer of one process, or ``full_state_dict``, has returned.

        Each rank copies its part; no rank communicates. Parameters without state in it lose theirs.

        Raises:
            ValueError: If groups, parameters, names of state or shapes differ.
        """
        _check_form(state_dict)
        for group in state_dict["param_groups"]:
            _full_group(group.get("params"))
        model = self.model.module if isinstance(self.model, DDP) else self.model
        every = [fqn for fqn, _ in model.named_parameters()]
        found = named_state(state_dict, self._names_by_group(), every)
        absent = [piece for piece in self.pieces if piece.fqn not in found]
        ours = self.state_dict()["state"]
        masters = state_dict.get("master_weights", {})
        for fqn, entries in ours.items():
            given = {name: value for name, value in found.get(fqn, entries).items() if value is not None}
            if MASTER in entries:
                given[MASTER] = masters.get(fqn, entries[MASTER])
            found[fqn] = given
        kept = {fqn: found[fqn] for fqn in ours}
        groups = [{k: v for k, v in group.items() if k not in NOT_SAVED} for group in state_dict["param_groups"]]
        self.load_state_dict({"state": kept, "param_groups": groups})
        for piece in absent:
            self.state.pop(piece.tensor, None)

    def _names_by_group(self) -> list[list[str]]:
        return [[piece.fqn for piece in pieces] for pieces in self._pieces_by_group]


def _taken_apart(optimizer: torch.optim.Optimizer, param_groups: Any, kwargs: dict[str, Any]) -> Instance:
    if isinstance(optimizer, DistributedOptimizer):
        raise TypeError("a DistributedOptimizer was given to another one; give it a torch optimizer, or its class")
    given = [*(["param_groups"] if param_groups is not None else []), *kwargs]
    if given:
        raise TypeError(
            f"{given} cannot be given with an optimizer that exists, which has its own; pass the class "
            f"{type(optimizer).__name__} to set them, or change param_groups afterwards"
        )
    return take_apart(optimizer)


@checked
def _state_dict(state: Mapping[Any, Mapping[str, Any]], param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Check the parts of a state dict."""


@checked
def _full_group(params: Sequence[int | str]) -> None:
    """Check the numbers of the parameters of a group."""


def _check_form(state_dict: Mapping[str, Any]) -> None:
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"expected a state dict with 'state' and 'param_groups', got no {missing[0]!r} among {list(state_dict)}; "
            "pass what state_dict() or full_state_dict() has returned"
        )
    _state_dict(state_dict["state"], state_dict["param_groups"])


def _check_master_dtype(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"master_dtype must be a floating-point dtype such as torch.float32, or None, got {dtype!r}")


def _num_views(pieces: Iterable[Piece], model: nn.Module) -> Counter[int]:
    """Return, by index of a bucket, how many pieces are in the memory of the parameters."""
    slots = model.slots() if isinstance(model, DDP) else {}
    return Counter(slots[piece.fqn].bucket.plan.index for piece in pieces if piece.fqn in slots and piece.value is None)
