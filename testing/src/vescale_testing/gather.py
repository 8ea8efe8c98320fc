"""Assemble full tensors from the parts of all ranks, to compare a parallel run with one process.

A rank may hold a plain tensor (a full one: a replica, or the only copy in its pipeline stage), a torch DTensor, or an
object with the box protocol:

    value.__global_shape__   -> tuple[int, ...]
    value.__boxes__()        -> list[tuple[tuple[int, ...], torch.Tensor]]     offsets in the global tensor, that box

All values are converted to boxes, the boxes of all ranks are exchanged once, and each tensor is assembled from them.
Boxes must cover the tensor. If two ranks hold the same element, they must agree bit for bit: replicas that have drifted
apart are an error, not an average.

Tensors are sent as bytes, because torch's pickling dominates the cost for small tensors. A tensor with the same bytes
on all ranks needs no further checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class _Held:
    """The part of one tensor that one rank holds."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    @property
    def is_full(self) -> bool:
        """Whether it is one box, the full tensor."""
        return len(self.boxes) == 1 and self.boxes[0][1].shape == self.shape and not any(self.boxes[0][0])

    def packed(self) -> _Packed:
        """Return the same without tensors."""
        boxes = ((offsets, str(box.dtype), tuple(box.shape), _bytes(box)) for offsets, box in self.boxes)
        return self.shape, tuple(boxes)

    @classmethod
    def unpacked(cls, packed: _Packed) -> _Held:
        shape, boxes = packed
        return cls(shape, tuple((offsets, _tensor(dtype, size, data)) for offsets, dtype, size, data in boxes))


#: A shape, and for each box its offsets, dtype, shape and bytes.
_Packed = tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], str, tuple[int, ...], bytes], ...]]


def _bytes(box: torch.Tensor) -> bytes:
    return box.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype_name: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def gather_full(value: Any, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the full tensor of a plain tensor, a DTensor or a boxed value; a copy, detached, on every rank.

    A plain tensor is returned without communication. For the others it is a collective: over the mesh of a DTensor,
    over `group` (by default the world) for a boxed value.

    Raises:
        AssertionError: If boxes leave a gap, or two ranks disagree on an element.

    Example:
        >>> gather_full(torch.nn.Parameter(torch.ones(2)))
        tensor([1., 1.])
    """
    if _is_boxed(value):
        return gather_named({"the value": value}, group=group)["the value"]
    return _held(value).boxes[0][1].clone()


def gather_named(named: Mapping[Any, Any], *, group: dist.ProcessGroup | None = None) -> dict[Any, torch.Tensor]:
    """Return the full tensors of all names that any rank of `group` holds, on every rank.

    Ranks may hold different names (pipeline stages) or parts of the same (shards, replicas); `named` may be empty.
    Without torch.distributed it only assembles what is there.

    Args:
        named: Names to plain tensors, DTensors or boxed values. Ranks of one DTensor mesh hold its names in one order.
        group: Ranks that take part; by default the world.

    Raises:
        AssertionError: If the boxes of a name leave a gap, or two ranks disagree on its shape or on an element.
    """
    held = {name: _held(value) for name, value in named.items()}
    if not dist.is_initialized():
        return {name: _assemble(name, {0: part}) for name, part in held.items()}
    mine = {name: part.packed() for name, part in held.items()}
    per_rank: list[dict[Hashable, _Packed]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(per_rank, mine, group=group)
    names = dict.fromkeys(name for holding in per_rank for name in holding)
    return {name: _unpack(name, {r: h[name] for r, h in enumerate(per_rank) if name in h}) for name in names}


def gather_state(
    state: Mapping[str, Mapping[str, Any]], *, group: dist.ProcessGroup | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the full tensors of an optimizer's state, `{fqn: {name: value}}`, as `gather_named` does."""
    flat = {(fqn, name): value for fqn, values in state.items() for name, value in values.items()}
    full: dict[str, dict[str, torch.Tensor]] = {}
    for (fqn, name), tensor in gather_named(flat, group=group).items():
        full.setdefault(fqn, {})[name] = tensor
    return full


def _is_boxed(value: Any) -> bool:
    return hasattr(value, "__boxes__") and not isinstance(value, torch.Tensor)


def _held(value: Any) -> _Held:
    if _is_boxed(value):
        boxes = tuple((tuple(offsets), box.detach().cpu()) for offsets, box in value.__boxes__())
        return _Held(tuple(value.__global_shape__), boxes)
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    full = value.detach()
    full = (full.full_tensor() if isinstance(full, DTensor) else full).cpu()
    return _Held(tuple(full.shape), (((0,) * full.ndim, full),))


def _unpack(name: Any, parts: dict[int, _Packed]) -> torch.Tensor:
    """Assemble one tensor from the packed parts of the ranks in `parts`."""
    first, packed = next(iter(parts.items()))
    held = _Held.unpacked(packed)
    if held.is_full and all(part == packed for part in parts.values()):
        return held.boxes[0][1]
    return _assemble(
        name, {first: held} | {rank: _Held.unpacked(part) for rank, part in parts.items() if rank != first}
    )


def _assemble(name: Any, parts: dict[int, _Held]) -> torch.Tensor:
    """Assemble one tensor from the boxes of the ranks in `parts`."""
    first, held = next(iter(parts.items()))
    dtypes = {box.dtype for part in parts.values() for _, box in part.boxes}
    assert len(dtypes) == 1, f"{name}: expected boxes of one dtype, got {sorted(map(str, dtypes)) or 'no boxes'}"
    full = torch.zeros(held.shape, dtype=dtypes.pop())
    owner = np.full(held.shape, -1, dtype=np.int32)
    for rank, part in parts.items():
        assert part.shape == held.shape, f"{name}: rank {rank} has shape {part.shape}, rank {first} has {held.shape}"
        for offsets, box in part.boxes:
            region = tuple(slice(start, start + length) for start, length in zip(offsets, box.shape, strict=True))
            _check_replica(name, rank, offsets, box, full[region], owner[region])
            full[region] = box
            owner[region] = rank
    if (owner < 0).any():
        gaps = np.argwhere(owner < 0)
        raise AssertionError(f"{name}: no rank holds {len(gaps)} of {owner.size} elements, such as {_index(gaps[0])}")
    return full


def _check_replica(
    name: Any, rank: int, offsets: tuple[int, ...], box: torch.Tensor, known: torch.Tensor, owner: np.ndarray
) -> None:
    assert box.shape == known.shape, f"{name}: rank {rank}'s box of {tuple(box.shape)} at {offsets} leaves the tensor"
    if not (owner >= 0).any():
        return
    differing = (torch.from_numpy(np.asarray(owner >= 0)) & (box != known) & ~(box.isnan() & known.isnan())).nonzero()
    if len(differing):
        at = _index(differing[0])
        where = tuple(start + i for start, i in zip(offsets, at, strict=True))
        raise AssertionError(
            f"{name}: replicas differ in {len(differing)} elements, first at {where}: "
            f"rank {owner[at]} has {known[at].item()!r}, rank {rank} has {box[at].item()!r}"
        )


def _index(row: torch.Tensor | np.ndarray) -> tuple[int, ...]:
    return tuple(row.tolist())
