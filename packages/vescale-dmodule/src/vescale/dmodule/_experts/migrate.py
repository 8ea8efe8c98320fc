"""Move experts to other ranks between steps, with their gradients and optimizer state.

    allocator chooses  ->  all ranks agree  ->  plan_moves: slots to send and receive  ->  one all-to-all per dtype

Values do not change: each expert sees the same tokens, with or without a move. Only the last bit of sums over ranks may
differ, if a token's experts were on other ranks before (tokens that are replicated).

While experts are not in order, the expert dim of their tensors is in the order of slots, not of experts. ``state_dict``
of the module is refused until :func:`restore_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import checked, describe_difference, differing_texts, waits_of

from .allocate import Allocation, check_allocation, initial_allocation
from .axes import is_cut
from .region import ALLOCATION, LOADS, ExpertRegion, allocation_of, experts_region

__all__ = ["Moves", "plan_moves", "rebalance_experts", "restore_experts"]


@checked
def rebalance_experts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Allocation]:
    """Get an allocation from the allocator of each experts module and move the experts. Call it between steps.

    Parameters, gradients and optimizer state are changed in place: tensors, parameter groups and hooks stay.
    All ranks of the mesh call it. It waits for the device once per experts module.

    Args:
        model: a module whose experts were spread by ``parallelize_module``.
        optimizer: holds the state of the experts' parameters; None if there is no state.

    Returns:
        The new allocation of each module whose experts moved, by name: the slot of each expert.

    Raises:
        ValueError: the optimizer does not hold a parameter, or an allocator gave no allocation or ranks different ones.
        TypeError: optimizer state that cannot be moved by expert.

    Example:
        >>> rebalance_experts(model, optimizer)                              # doctest: +SKIP
        {'layers.0.mlp.experts': (2, 0, 1, 3)}
    """
    return _reallocate(model, optimizer, _ask_allocator)


@checked
def restore_experts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Allocation]:
    """Bring all experts back to the order of one device, as :func:`rebalance_experts` moves them."""
    return _reallocate(model, optimizer, lambda region, _module: initial_allocation(region.layout.num_experts))


# ------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class Moves:
    """What one rank sends and receives, in local slots.

    Attributes:
        send: for each rank, the slots whose experts go there.
        receive: for each rank, the slots that its experts go to, in the order in which it sends them.
    """

    send: tuple[tuple[int, ...], ...]
    receive: tuple[tuple[int, ...], ...]


def plan_moves(current: Allocation, new: Allocation, *, num_ranks: int, rank: int) -> Moves:
    """Return what ``rank`` sends and receives on the way from one allocation to another.

    Example:
        >>> plan_moves((0, 1, 2, 3), (0, 2, 1, 3), num_ranks=2, rank=0)       # experts 1 and 2 change places
        Moves(send=((0,), (1,)), receive=((0,), (1,)))
    """
    per_rank = len(current) // num_ranks
    send: list[list[int]] = [[] for _ in range(num_ranks)]
    receive: list[list[int]] = [[] for _ in range(num_ranks)]
    for old_slot, new_slot in sorted(zip(current, new, strict=True), key=lambda pair: pair[1]):
        source, target = old_slot // per_rank, new_slot // per_rank
        if source == rank:
            send[target].append(old_slot % per_rank)
        if target == rank:
            receive[source].append(new_slot % per_rank)
    return Moves(tuple(map(tuple, send)), tuple(map(tuple, receive)))


# ------------------------------------------------------------------------------------------------- moving


def _reallocate(model: nn.Module, optimizer: torch.optim.Optimizer | None, choose) -> dict[str, Allocation]:
    regions = {n: (m, experts_region(m)) for n, m in model.named_modules() if experts_region(m) is not None}
    regions = {name: (module, region) for name, (module, region) in regions.items() if region.layout.kind == "stacked"}
    tensors = {name: _tensors(name, module, optimizer) for name, (module, _) in regions.items()}
    chosen = {}
    for name, (module, region) in regions.items():
        new = _agreed(name, choose(region, module), region)
        if new != allocation_of(module, region.layout):
            chosen[name] = new
    for name, new in chosen.items():
        module, region = regions[name]
        _move(region, allocation_of(module, region.layout), new, tensors[name])
        vars(module)[ALLOCATION] = new
    return chosen


def _ask_allocator(region: ExpertRegion, module: nn.Module) -> Allocation:
    """Return the choice of the allocator of ``region`` for the loads since the last call."""
    layout, loads = region.layout, [0] * region.layout.num_experts
    if layout.allocator.needs_loads and region.last_tokens is not None:
        counts = vars(module).pop(LOADS, None)
        device = next(module.parameters()).device
        counts = torch.zeros(layout.num_experts + 1, dtype=torch.int64, device=device) if counts is None else counts
        group = region.group([axis for axis, p in enumerate(region.last_tokens) if is_cut(p)])
        if group is not None:
            waits_of(group).run("all-reduce", dist.all_reduce, counts)
        loads = counts[:-1].tolist()
    return layout.allocator.allocate(loads, allocation_of(module, layout), region.num_ranks)


def _agreed(name: str, chosen: Allocation, region: ExpertRegion) -> Allocation:
    """Return the allocation that all ranks chose.

    Raises:
        ValueError: on all ranks, if the choice of one is no allocation, or if two differ.
    """
    kind, error = type(region.layout.allocator).__name__, None
    try:
        chosen = check_allocation(chosen, region.layout.num_experts, region.num_ranks)
    except ValueError as found:
        error = found
    texts = differing_texts(f"{chosen}" if error is None else f"no allocation: {error}", region.mesh)
    if error is not None:
        raise ValueError(f"experts {name!r}: {kind} chose no allocation: {error}") from error
    if texts:
        raise ValueError(f"experts {name!r}: {describe_difference(f'the allocation of {kind}', texts)}")
    return chosen


def _tensors(name: str, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the local tensors of a value per expert: parameters, gradients, optimizer state.

    Raises:
        ValueError, TypeError: as :func:`rebalance_experts`.
    """
    held = set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: list[Tensor] = []
    for leaf, parameter in module.named_parameters():
        where = f"{name}.{leaf}" if name else leaf
        if optimizer is not None and parameter.requires_grad and id(parameter) not in held:
            raise ValueError(
                f"{type(optimizer).__name__} does not hold {where!r}, so its state would stay behind; give "
                "rebalance_experts the optimizer that updates the experts' parameters themselves, not copies of them"
            )
        found.append(_local(parameter))
        if parameter.grad is not None:
            found.append(_local(parameter.grad))
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        found += _state_tensors(where, parameter, state)
    return found


def _state_tensors(where: str, parameter: Tensor, state: dict) -> Iterable[Tensor]:
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.numel() == 1:  # a number of steps
            continue
        if value.shape != parameter.shape or isinstance(value, DTensor) != isinstance(parameter, DTensor):
            raise TypeError(
                f"optimizer state {key!r} of {where!r} is a {type(value).__name__} of shape {tuple(value.shape)}, "
                f"which cannot be moved by expert; expected the parameter's type and shape {tuple(parameter.shape)}"
            )
        if isinstance(value, DTensor) and value.placements != parameter.placements:
            raise TypeError(
                f"optimizer state {key!r} of {where!r} has placements {value.placements}, the parameter "
                f"{parameter.placements}; expected the same"
            )
        yield _local(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def _move(region: ExpertRegion, current: Allocation, new: Allocation, tensors: Sequence[Tensor]) -> None:
    """Move the rows of ``tensors``, in place, by one all-to-all per dtype."""
    group = region.group(region.layout.expert_axes)
    rank = 0 if group is None else group.rank()
    moves = plan_moves(current, new, num_ranks=region.num_ranks, rank=rank)
    send, receive = ([slot for slots in part for slot in slots] for part in (moves.send, moves.receive))
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        rows = torch.cat([tensor[send].reshape(len(send), -1) for tensor in same], dim=1)
        received = torch.empty_like(rows)
        if group is None:
            received = rows
        else:
            splits = [len(slots) for slots in moves.receive], [len(slots) for slots in moves.send]
            waits_of(group).run("all-to-all", dist.all_to_all_single, received, rows, *splits)
        for tensor, part in zip(same, received.split([tensor[0].numel() for tensor in same], dim=1), strict=True):
            tensor[receive] = part.reshape(len(receive), *tensor.shape[1:])
