"""The default gradient receivers: partial gradients are summed over the ranks once per backward pass.

A replicated parameter on sharded activations (a norm weight under sequence parallelism, a bias, any weight when the
batch is sharded) gets only this rank's part of its gradient. These partial gradients are collected while backward runs
and summed at its end, all together::

    backward     norm.weight      down.bias      up.weight         norm.bias   ...    end of the pass
                  partial          partial        full              partial
    pass         [ collected ................... to ``.grad`` ................. ]
    at the end                                                   one collective per axis and dtype, added to ``.grad``

After ``backward()`` every ``.grad`` has the placements of its parameter. `vescale.optim.DDP` takes the place of these
receivers, parameter by parameter; see `vescale.dtensor.extension`.

Note: lifetime of a pass
    Torch's engine holds the callback at the end of a pass, and only that callback holds what the pass has collected. A
    pass that ends with an exception takes all of it along, and nothing stale meets the next one. A backward inside a
    backward (reentrant checkpointing) is a pass of its own, reduced at its own end.

Note: what does not wait for the end
    A full gradient is added to ``.grad`` at once. So is a gradient with a history (``create_graph=True``), and one that
    needs more than a sum over ranks, after it is redistributed to the placements of its parameter.

Note: no_sync
    Inside of it partial sums stay in ``.grad``, a DTensor with Partial placements. Clearing gradients forgets them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale.dtensor.extension import (
    aligned_gradient,
    as_gradient,
    attach_gradient_receiver,
    gradient_receiver,
)

from .. import _torch
from .._report.ranges import Meter, profiler_range
from .partial_sums import MeshAxis, PartialGradient, has_partial, partial_dims, sum_over_ranks

__all__ = ["GradientSync"]


class GradientSync:
    """Sums the partial gradients of the parameters of a parallelized module.

    Attributes:
        synchronizes: whether partial gradients are summed at the end of a pass; False inside of :meth:`no_sync`.
        meter: notes reductions while a report is open.

    Example:
        >>> sync = GradientSync()
        >>> sync.attach(model)                                          # doctest: +SKIP
        >>> model(batch).sum().backward()   # .grad is reduced          # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.synchronizes = True
        self.meter: Meter | None = None
        self.unreduced: dict[_Receiver, None] = {}  # whose ``.grad`` no_sync may have left partial
        self._num_attached = 0
        self._axes: dict[tuple[DeviceMesh, int], MeshAxis] = {}
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()

    @_torch.unseen
    def attach(self, module: nn.Module) -> None:
        """Receive the gradients of every DTensor parameter of ``module`` that requires one and has no receiver.

        Called before every outermost forward: copies of a module have no receivers, and parameters may have been
        frozen before. The order of attachment decides the order in flat buffers.
        """
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad and gradient_receiver(parameter) is None:
                receiver = _Receiver(self, parameter, self._num_attached)
                self._num_attached += 1
                attach_gradient_receiver(parameter, receiver)
                if has_partial(parameter.grad):  # a copy, made between two passes
                    self.unreduced[receiver] = None

    def mesh_axis(self, mesh: DeviceMesh, dim: int) -> MeshAxis:
        """Return the one object for an axis of a mesh."""
        if (mesh, dim) not in self._axes:
            self._axes[mesh, dim] = MeshAxis(mesh, dim)
        return self._axes[mesh, dim]

    def running_pass(self) -> _Pass | None:
        """Return what the running backward pass has collected, None outside of a backward pass."""
        number = _torch.backward_number()
        current = self._passes.get(number)
        if current is None and number != -1:
            current = self._passes[number] = _Pass(self)
            _torch.on_backward_end(current.end)
        return current

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave partial sums in ``.grad``; the next backward outside of the context reduces their total.

        Only where ``backward()`` runs matters, not the forward. Until then ``.grad`` is a DTensor whose placements are
        partial.

        Raises:
            RuntimeError: it is entered or left during a backward.
        """
        before = self._switch(synchronizes=False)
        try:
            yield
        finally:
            self._switch(synchronizes=before)

    def _switch(self, *, synchronizes: bool) -> bool:
        if _torch.backward_number() != -1:
            raise RuntimeError("no_sync() was entered or left during backward(); put the whole backward() inside of it")
        before, self.synchronizes = self.synchronizes, synchronizes
        return before


class _Receiver:
    """Takes the gradients of one parameter, which it does not keep alive.

    Attributes:
        position: order of attachment; parameters are laid out from the largest to the smallest.
    """

    def __init__(self, sync: GradientSync, parameter: DTensor, position: int):
        self.sync, self.position = sync, position
        self._parameter = weakref.ref(parameter, lambda _: sync.unreduced.pop(self, None))
        self._last: tuple[object, tuple[int, ...] | None] = None, None
        self._axes: dict[tuple[int, ...], tuple[MeshAxis, ...]] = {}  # by dims

    @property
    def parameter(self) -> DTensor:
        return self._parameter()

    def dims_of(self, placements: Sequence[Placement]) -> tuple[int, ...] | None:
        """Return the mesh dims over which a gradient must be summed; None if it needs more than a sum."""
        last, dims = self._last
        if placements is not last:  # most often it is the very same tuple
            dims = partial_dims(placements, self.parameter.placements)
            self._last = placements, dims
        return dims

    def receive(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Collect a partial gradient until the end of the pass; add a full one to ``.grad``."""
        sync, dims = self.sync, self.dims_of(placements)
        if sync.unreduced and sync.synchronizes:
            sync.running_pass()  # whose end reduces them
        if dims is None or local.requires_grad:
            self.add(aligned_gradient(self.parameter, local, placements))
        elif not dims:
            self.add(local)
        elif sync.synchronizes:
            sync.running_pass().collect(self, dims, local)
        else:
            self._keep(local, placements)

    def add(self, local: Tensor) -> None:
        """Add a gradient in the placements of the parameter to ``.grad``, as autograd does."""
        parameter = self._parameter()
        old = parameter.grad
        if old is None and not local.requires_grad:
            parameter.grad = _torch.wrap_like(local, parameter)
            return
        if has_partial(old):
            parameter.grad = old = old.redistribute(placements=parameter.placements)
            self.sync.unreduced.pop(self, None)
        if local.requires_grad:
            new = as_gradient(parameter, local, parameter.placements)
            parameter.grad = new if old is None else old.redistribute(placements=parameter.placements) + new
        elif old.placements != parameter.placements:  # assigned by the user
            new = _torch.wrap_like(local, parameter)
            parameter.grad = old.redistribute(placements=parameter.placements) + new
        else:
            with torch.no_grad():
                _torch.local_of(old).add_(local)
            torch.autograd.graph.increment_version(old)

    def _keep(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Add a partial gradient to ``.grad`` without communication."""
        parameter = self.parameter
        old = parameter.grad
        if old is not None and tuple(old.placements) == placements:
            local = _torch.local_of(old) + local
        elif old is not None and old.placements == parameter.placements:
            dims = self.dims_of(placements)
            if all(parameter.device_mesh.get_local_rank(dim) == 0 for dim in dims):  # one rank brings the old sum
                local = _torch.local_of(old) + local
        elif old is not None:  # partial over other axes
            self.add(aligned_gradient(parameter, local, placements))
            return
        parameter.grad = as_gradient(parameter, local, placements)
        self.sync.unreduced[self] = None

    def take_kept(self) -> tuple[tuple[int, ...], Tensor] | None:
        """Return the dims and the local tensor of a ``.grad`` that is partial; None where none is left to be summed."""
        gradient = self.parameter.grad
        if not has_partial(gradient):  # cleared or replaced since
            return None
        dims = self.dims_of(tuple(gradient.placements))
        if dims is None:
            self.parameter.grad = gradient.redistribute(placements=self.parameter.placements)
            return None
        return dims, _torch.local_of(gradient)

    def partial_gradient(self, local: Tensor, dims: tuple[int, ...]) -> PartialGradient:
        """Return a gradient as what is summed over the axes of ``dims``."""
        axes = self._axes.get(dims)
        if axes is None:
            mesh = self.parameter.device_mesh
            axes = self._axes[dims] = tuple(self.sync.mesh_axis(mesh, dim) for dim in dims)
        return PartialGradient(local, axes)

    def add_total(self, total: Tensor) -> None:
        """Add a gradient that has been summed, contiguous, to ``.grad``, which has the strides of the parameter."""
        like = _torch.local_of(self.parameter)
        if self.parameter.grad is None and total.stride() != like.stride():
            total = torch.empty_like(like, dtype=total.dtype).copy_(total)
        self.add(total)


class _Pass:
    """The partial gradients of one backward pass; see the note on its lifetime."""

    def __init__(self, sync: GradientSync):
        self.sync = sync
        self.partial: dict[tuple[_Receiver, tuple[int, ...]], Tensor] = {}

    def collect(self, receiver: _Receiver, dims: tuple[int, ...], local: Tensor) -> None:
        """Keep a gradient that is partial over mesh dims until the end."""
        key = receiver, dims
        self.partial[key] = self.partial[key] + local if key in self.partial else local

    def end(self) -> None:
        """Sum over the ranks what is partial, and add it to ``.grad``."""
        with torch.no_grad():
            replaced = self._join_kept() if self.sync.synchronizes else []
            if self.partial:
                with profiler_range("gradients", self.sync.meter):
                    self._sum_partial(replaced)

    def _join_kept(self) -> list[_Receiver]:
        """Let the sums join what ``no_sync`` has left in ``.grad``; return the parameters of which it did."""
        replaced = []
        for receiver in list(self.sync.unreduced):
            if (kept := receiver.take_kept()) is None:
                self.sync.unreduced.pop(receiver, None)
                continue
            dims, local = kept
            key = receiver, dims
            self.partial[key] = local + self.partial[key] if key in self.partial else local
            replaced.append(receiver)
        return replaced

    def _sum_partial(self, replaced: Sequence[_Receiver]) -> None:
        keys = sorted(self.partial, key=lambda key: (-key[0].position, key[1]))
        totals = sum_over_ranks(
            [receiver.partial_gradient(self.partial[receiver, dims], dims) for receiver, dims in keys]
        )
        self.partial.clear()
        for receiver in replaced:
            receiver.parameter.grad = None
            self.sync.unreduced.pop(receiver, None)
        for (receiver, _), total in zip(keys, totals, strict=True):
            receiver.add_total(total)
