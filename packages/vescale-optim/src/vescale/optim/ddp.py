"""Data parallelism with optional sharding of gradients and optimizer state (ZeRO 1 and 2).

Each rank of a mesh axis holds the module and runs it on its part of the batch; gradients are averaged over the axis in
flat buckets while backward runs. What is left after ``backward()``:

    zero   param.grad                    kept per rank between steps            collective of a bucket
    0      the averaged gradient         gradients                              all-reduce
    1      a placeholder that raises     gradients + 1/N of reduced gradients   reduce-scatter
    2      a placeholder that raises     1/N of reduced gradients               reduce-scatter

With ZeRO 1 and 2 ``DistributedOptimizer`` updates this rank's part of the parameters, with 1/N of the optimizer state,
and gathers them. The mean over ranks of the gradients of local means is the gradient of the mean over the global batch:
the convention of torch's DistributedDataParallel, for local batches of equal size.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019), section 5.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import is_deferred, materialize

from . import _torch
from ._axis import Axis
from ._buckets import BucketPlan, ParamInfo, plan_buckets
from ._checks import check_module, check_zero, mark_wrapped, refuse_local_statistics
from ._flat import FlatBucket, FlatSlot
from ._local_batch import attach_local_batch
from ._reduce import Reducer

__all__ = ["DDP"]

logger = logging.getLogger("vescale.optim")


class DDP(_torch.UnmovableModule):
    """Wrap a module for data parallelism over one mesh axis.

    Parameters are plain tensors, or DTensors over other axes (tensor parallelism); they stay the same objects. At
    construction a deferred module is materialized, and parameters and buffers of coord 0 overwrite those of the other
    coords. Tied parameters are reduced once, frozen ones not at all. Gradients are reduced in any ``backward()`` that
    reaches the parameters, also one that a pipeline engine runs without calling this wrapper. Dropout draws, on each
    rank, its slice of the mask that one device would draw for the global batch.

    Attributes the wrapper does not have are looked up in the module; ``state_dict``, ``load_state_dict`` and
    ``named_parameters`` use the module's names.

    Args:
        module: Module with at least one trainable parameter, on its final device and with its final dtype.
        mesh_axis: 1-D mesh, for example ``mesh["dp"]``. With one rank nothing is communicated.
        zero: 0, 1 or 2, see above. With 1 and 2 parameters become views of flat buffers.
        bucket_bytes: Size at which a gradient bucket is closed.
        overlap: Reduce buckets while backward runs, or all at its end. The result is the same.
        find_unused_parameters: Find out, in each backward, which parameters no rank has used: they keep ``grad`` None,
            as in one process. It takes one small all-reduce that the host waits for. If False, every trainable
            parameter must get a gradient on every rank in each synchronising backward; a missing one is an error.

    Raises:
        ValueError: If ``mesh_axis`` is not 1-D, ``zero`` is unknown, nothing is trainable, a parameter has no storage,
        is
            not a floating-point number, is on another device, is a DTensor over this axis, shares memory with another
            (ZeRO 1, 2) or has been wrapped before; or if modules or settings differ between ranks.
        NotImplementedError: For ``zero=3``.

    Note:
        ``param.grad`` is a view of a flat buffer that the next backward overwrites: clone a gradient to keep it.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from vescale.optim import DistributedOptimizer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does it for many
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> model = DDP(nn.Linear(4, 2), mesh["dp"], zero=2)
        >>> optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=3e-4)
        >>> model(torch.ones(3, 4)).mean().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        mesh_axis: DeviceMesh,
        *,
        zero: int = 0,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
        find_unused_parameters: bool = True,
    ):
        super().__init__()
        check_zero(zero)
        if is_deferred(module):
            materialize(module)
        axis = Axis.of(mesh_axis, role="DDP(mesh_axis=...)")
        trainable = {fqn: p for fqn, p in module.named_parameters() if p.requires_grad}
        frozen = {fqn: p for fqn, p in module.named_parameters() if not p.requires_grad}
        check_module(module, trainable, axis, moves_parameters=zero > 0)
        plan = plan_buckets(
            [ParamInfo(fqn, _torch.local_tensor(p).numel(), p.dtype) for fqn, p in trainable.items()],
            num_shards=axis.size,
            bucket_bytes=bucket_bytes,
        )
        settings = f"zero={zero} find_unused_parameters={find_unused_parameters}"
        axis.check_same(f"{settings}\n{_describe(module, plan)}", what="the modules given to DDP")
        logger.debug("zero=%d over %r\n%s", zero, axis, plan)
        tensors = [*trainable.values(), *frozen.values(), *module.buffers()]
        axis.broadcast_([_torch.local_tensor(t.detach()) for t in tensors], chunk_bytes=bucket_bytes)

        self.module = module
        self.mesh_axis = mesh_axis
        self._axis = axis
        self.zero = zero
        mark_wrapped(trainable.values())
        self._order = {fqn: position for position, fqn in enumerate(trainable)}
        buckets = [FlatBucket(b, [trainable[s.fqn] for s in b.slots], axis, zero=zero) for b in plan.buckets]
        self._reducer = Reducer(buckets, frozen, axis, overlap=overlap, find_unused=find_unused_parameters)
        refuse_local_statistics(module, axis)
        attach_local_batch(module, mesh_axis)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on this rank's part of the batch."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a ``backward()`` inside this context does not reduce.

        The next ``backward()`` outside reduces the sum. Only where ``backward()`` runs matters, not the forward. With
        ``zero=2`` it keeps full gradients meanwhile; without this context each backward adds to the reduced shard.
        ``DistributedOptimizer.step`` and ``clip_grad_norm_`` refuse gradients that have not been reduced.

        Raises:
            RuntimeError: If it is entered, or left, during a backward.

        Example:
            >>> with model.no_sync():                      # doctest: +SKIP
            ...     for batch in micro_batches[:-1]:
            ...         loss(model(batch)).backward()
            >>> loss(model(micro_batches[-1])).backward()  # doctest: +SKIP
        """
        before = self._switch(synchronises=False)
        try:
            yield
        finally:
            self._switch(synchronises=before)

    def _switch(self, *, synchronises: bool) -> bool:
        if _torch.backward_number() != -1:
            raise RuntimeError("no_sync() was entered or left during backward(); put the whole backward() inside of it")
        before, self._reducer.synchronises = self._reducer.synchronises, synchronises
        return before

    def slots(self) -> dict[str, FlatSlot]:
        """Return each trainable parameter's place in the flat buffers, by name, in registration order."""
        return dict(sorted(((s.fqn, s) for s in self._reducer.slots), key=lambda item: self._order[item[0]]))

    def gather_parameters(self) -> None:
        """Fill the parameters with what the optimizers of all ranks have made of their parts (ZeRO 1, 2)."""
        works = [bucket.gather_values() for bucket in self._reducer.buckets if bucket.sharded]
        for work in works:
            if work is not None:
                work.wait()

    def check_reduced(self) -> None:
        """Raise RuntimeError if a gradient has been accumulated and not reduced."""
        self._reducer.check_reduced()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and forget a backward that ended with an exception."""
        self._reducer.reset()
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's state dict, under the module's names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict, in place.

        Raises:
            ValueError: For ``assign=True``, which would replace the parameters that this wrapper manages.
        """
        if assign:
            raise ValueError("assign=True would replace the parameters that DDP manages; load in place (assign=False)")
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's named parameters, under the module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Return the module's named buffers, under the module's names."""
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _describe(module: nn.Module, plan: BucketPlan) -> str:
    """Return everything that must be the same on all ranks of the axis, as lines."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [
        f"{fqn}: {tuple(_torch.local_tensor(t).shape)} {t.dtype} trainable={t.requires_grad}" for fqn, t in tensors
    ]
    return "\n".join([*shapes, str(plan)])
