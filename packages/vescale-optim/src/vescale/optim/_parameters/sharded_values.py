"""Parameter values of a bucket of which each rank keeps 1/N: unsharded for use, freed after it, and guarded in between.

    shard        | part |                        this coord's part, always there: what the optimizer updates
    values       | slot | slot | slot |pad|      memory exists while the parameters are in use; they are views of it

With offload (`offload.py`) the shard is in host memory, and copied to its place in ``values`` before the gather.

The parameters stay the same objects, and the storage object of ``values`` stays the same, too: freeing resizes it to
zero bytes. So the parameters, or views of them, that autograd has saved for backward have their values again when the
bucket is gathered for the backward.

Note: a parameter without values
    A read of freed memory would crash the process or return garbage. So the guard of the bucket is closed from `free`
    to `finish`, and a read raises (`guard.py`).

Note: writes to full parameters
    A forward, or code between micro-batches, may write to parameters that are unsharded, in place or by ``param.data =
    tensor``. Before the full parameters are freed, and before a step reads the shard, `keep_writes` copies this coord's
    part to the shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import _torch
from .._buckets.plan import Bucket
from .._ranks.axis import Axis
from .guard import MEMORY, Guard, Memory, Refuse
from .home import Home, bring_home
from .offload import Awaitable, HostMemory

__all__ = ["ShardedValues"]


class ShardedValues:
    """The values of one bucket's parameters. With one rank and no offload they are never freed.

    Args:
        plan: Layout.
        params: The parameters of ``plan.slots``, in that order; their memory moves into the buffer.
        axis: The axis over which they are sharded, with a process group for gathers.
        host: Host memory for the shard; None keeps it on the device of the parameters.

    Attributes:
        shard: This coord's part.
        parts: This coord's part of each parameter: a flat view of ``shard``, perhaps empty.
        frees: Whether they are ever freed.
    """

    def __init__(self, plan: Bucket, params: Sequence[nn.Parameter], axis: Axis, host: HostMemory | None = None):
        self.plan = plan
        self.params = list(params)
        self.axis = axis
        self.frees = axis.size > 1 or host is not None
        self._shapes = [_torch.local_tensor(param).shape for param in self.params]
        self._host = host
        self._values = torch.zeros(plan.numel, dtype=plan.dtype, device=_torch.local_tensor(params[0]).device)
        named = {slot.fqn: param for slot, param in zip(plan.slots, self.params, strict=True)}
        self.guard = Guard(named, Refuse(axis.ranks[axis.coord]))
        for view, param in zip(self._views(), self.params, strict=True):
            local = _torch.local_tensor(param)
            view.copy_(local.detach())
            local.data = view
            if self.frees:
                setattr(param, MEMORY, Memory(self.guard, frees=True))
        start, stop = plan.shard(axis.coord)
        self._own = slice(start, stop)
        own = self._values[start:stop]
        self.shard = host.home_of(own) if host is not None else own.clone() if self.frees else own
        self.parts = []
        for slot, part in zip(plan.slots, plan.parts(axis.coord), strict=True):
            first, last = (min(max(slot.start + at - start, 0), len(self.shard)) for at in (part.start, part.stop))
            self.parts.append(self.shard[first:last])
        self.label = f"the parameters {plan.slots[0].fqn!r} and {len(plan.slots) - 1} more"
        self._pending: Awaitable | None = None
        places = [(_torch.local_tensor(p), slot.start) for slot, p in zip(plan.slots, self.params, strict=True)]
        self._watched = [local for local, _ in places if local.numel()]
        self._offsets = [start * plan.dtype.itemsize for local, start in places if local.numel()]
        self._versions = self._count_writes()
        self.free()

    def _views(self) -> list[Tensor]:
        """Return the view of each parameter in the buffer."""
        places = zip(self.plan.slots, self._shapes, strict=True)
        return [self._values[slot.start : slot.start + slot.numel].view(shape) for slot, shape in places]

    def launch(self) -> None:
        """Start the all-gather of the full parameters."""
        self._values.untyped_storage().resize_(self.plan.num_bytes)
        if self._host is None:
            self._pending = self._gather(self.shard)
        else:
            own = self._values[self._own]
            self._pending = self._host.bring(own, self.shard, then=lambda: self._gather(own))

    def _gather(self, shard: Tensor) -> Awaitable | None:
        return self.axis.all_gather(self._values, shard, what=self.label)

    def finish(self) -> None:
        """Wait for the all-gather, and open the guard."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self.guard.open()
        self._versions = self._count_writes()

    def _count_writes(self) -> list[int]:
        return [*map(_torch.version, self._watched), *map(_torch.version, self.guard.leaves())]

    def _is_written(self) -> bool:
        """Return whether the full parameters were written to, or are in other memory, since they were gathered."""
        first = self._values.data_ptr()
        return (
            [first + offset for offset in self._offsets] != list(map(Tensor.data_ptr, self._watched))
            or not all(map(Tensor.is_contiguous, self._watched))
            or self._count_writes() != self._versions
        )

    def _bring_home(self) -> None:
        places = zip(self.plan.slots, self.params, self._views(), strict=True)
        bring_home([Home(slot.fqn, param, view) for slot, param, view in places])

    def keep_writes(self) -> None:
        """Let the shard have what was written to the full parameters, if they are there.

        Raises:
            RuntimeError: If ``param.data`` was replaced by a tensor that does not fit.
        """
        if self._pending is not None or self.guard.is_closed or not self._is_written():
            return
        self._bring_home()
        self._store()
        self._versions = self._count_writes()

    def _store(self) -> None:
        if self._host is not None:
            self._host.wait_before_writing()
        if self.frees:
            self.shard.copy_(self._values[self._own])

    def free(self) -> None:
        """Free the memory of the full parameters, and close the guard."""
        if not self.frees:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._values.untyped_storage().resize_(0)
        self.guard.close()

    def give_away(self) -> None:
        """Copy this coord's part of the full parameters to the shard; existing views keep their memory."""
        if not self.frees:
            return
        self._bring_home()
        self._store()
        self._values = torch.empty_like(self._values)
        for view, param, slot in zip(self._views(), self.params, self.plan.slots, strict=True):
            _torch.local_tensor(param).data = view
            for leaf in self.guard.views_of(slot.fqn):
                leaf.data = view
        self.free()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view of the full parameters."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device != self._values.device:
            return False  # a wrapper without memory of its own, or a freed parameter
        first = self._values.data_ptr()
        return first <= tensor.data_ptr() < first + self.plan.num_bytes
