"""Gradients that are a partial sum on each rank are reduced together, in flat buckets, while backward goes on.

A replicated parameter that meets sharded activations (a norm weight under sequence parallelism, a bias, any weight when
the batch is sharded) gets only this rank's part of its gradient. One collective for each of them costs a round trip
each. Here they are collected instead:

    backward       ... norm.weight      down.bias          norm.weight      up.bias  ...   end of the pass
    this rank          summand            summand            summand          summand
    bucket             [---------- all-reduce, launched when the last has come ----------] awaited, added to .grad

Which parameters bring a partial gradient is learned from earlier passes; before it is known, and for what did not come
this time, buckets are launched at the end of the pass. Buckets leave strictly in their order, so that all ranks issue
the same collectives (see ``_flat`` for what makes them the same). After ``backward()`` every ``.grad`` is reduced.

Note [who keeps a pass]: what a running pass has collected is held by its callback alone, which torch's engine holds. A
pass that ends with an exception takes all of it with it; nothing stale meets the next one. A backward inside a backward
(reentrant checkpointing) is a pass of its own, reduced at its own end. (What came from local leaves is in lists that
``_deliveries`` knows, too; it forgets them when the next pass begins.)

Note [whole gradients for hooks]: hooks of the user see the reduced gradient. So a parameter that has any is reduced at
once, alone, inside our own hook; likewise for ``create_graph=True`` and for ``torch.autograd.grad``, whose results
leave the engine at once.

Note [taken gradients]: data parallelism may take gradients as they are, see ``_takers``. Then nothing is done here: the
hooks pass what comes, and static mode hands it over (``_static/_handover.py``).

Note [no_sync]: inside of it the partial sums stay in ``.grad``, as a DTensor whose placements say so. Clearing
gradients forgets them, and nothing else remembers them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from .._report.ranges import Meter, profiler_range
from .backward_pass import Arrivals, Counts, Pass, accumulate, as_gradient
from .deliveries import Arriving, Delivery, hooks_of
from .flat import Bucket, has_partial, num_buckets, pack, partial_dims
from .takers import introduce, taker_of

__all__ = ["GradientSync", "has_other_hooks"]

BUCKET_BYTES = 25 * 2**20
NOTHING = object()  # where None is a value


class _Slot:
    """What is known about one parameter; it does not keep it alive.

    Attributes:
        position: order of attachment; parameters are laid out from the largest to the smallest.
        number: of its bucket.
        keys: of our two hooks in the parameter's tables.
        set_aside: ``.grad`` from before this backward, while autograd stores the new summand there.
    """

    def __init__(self, parameter: DTensor, position: int, bucket: int, sync: GradientSync):
        number, forget = id(parameter), sync.forget
        self._find_bucket = sync.bucket
        self._parameter = weakref.ref(parameter, lambda _: forget(number))
        self.position = position
        self.number = bucket
        self.keys: set[int] = set()
        self.set_aside: object = NOTHING
        self._last: tuple[object, torch.dtype | None, bool, Bucket | None] = None, None, False, None

    @property
    def parameter(self) -> DTensor | None:
        return self._parameter()

    def bucket(self, placements: Sequence[Placement], dtype: torch.dtype) -> Bucket | None:
        """Return the bucket for a gradient, None if it is not to be summed in one."""
        return self.route(placements, dtype)[1]

    def route(self, placements: Sequence[Placement], dtype: torch.dtype) -> tuple[bool, Bucket | None]:
        """Return whether a gradient has the placements of the parameter, and the bucket to sum it in, if any."""
        last, last_dtype, fits, bucket = self._last
        if placements is not last or dtype is not last_dtype:  # most often it is the very same tuple
            parameter = self._parameter()
            dims = partial_dims(placements, parameter.placements)
            fits, bucket = dims == (), None
            if dims:
                bucket = self._find_bucket(self.number, dims, parameter.device_mesh, dtype)
            self._last = placements, dtype, fits, bucket
        return fits, bucket


def has_other_hooks(parameter: DTensor, ours: Iterable[int] = ()) -> bool:
    """Tell whether a parameter has gradient or post-accumulate hooks other than those with the keys ``ours``."""
    return any(key not in ours for key in _torch.hook_keys(parameter))


class _Hook:
    """A hook of a parameter; pickling and copying the parameter leaves it out, as torch is told."""

    __torch_unserializable__ = True

    def __init__(self, function: Callable, slot: _Slot):
        self.function, self.slot = function, slot

    def __call__(self, value: Tensor | None) -> Tensor | None:
        return self.function(self.slot, value)


class GradientSync:
    """Reduces the partial gradients of the parameters of a parallelised module, and of its copies.

    A copy of this object itself, also through pickle, is a new one that knows no parameter yet.

    Args:
        bucket_bytes: size at which a bucket is closed.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.

    Example:
        >>> sync = GradientSync()
        >>> sync.attach(model)                                          # doctest: +SKIP
        >>> model(batch).sum().backward()   # .grad is reduced          # doctest: +SKIP
    """

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES):
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive")
        self.bucket_bytes = bucket_bytes
        self.synchronises = True
        self.meter: Meter | None = None
        self._slots: dict[int, _Slot] = {}
        self._buckets: dict[tuple, Bucket] = {}
        self._num_buckets = 0
        self._num_attached = 0
        self._passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._arriving = Arriving(self)
        self._expected = Arrivals()
        self._unreduced: dict[_Slot, weakref.ref[Pass] | None] = {}  # partial in .grad; the pass that has taken it

    def __reduce__(self) -> tuple:
        return _rebuild, (self.bucket_bytes,)

    # ------------------------------------------------------------------------------------------------- parameters

    def attach(self, module: nn.Module) -> None:
        """Take care of the gradients of every DTensor parameter of ``module`` that requires one.

        Called before every outermost forward, because hooks are missing in copies of a module and in parameters that
        were frozen before. The order in which parameters are attached decides their buckets.
        """
        found = [p for p in module.parameters() if isinstance(p, DTensor) and p.requires_grad]
        self._register([p for p in found if id(p) not in self._slots])
        for parameter in found:
            slot = self._slots[id(parameter)]
            if not slot.keys.issubset(_torch.hook_keys(parameter)) or not slot.keys:
                self._hook(parameter, slot)
            introduce(parameter, slot.keys)

    def _register(self, parameters: Sequence[DTensor]) -> None:
        last_first = list(reversed(parameters))
        buckets = pack(last_first, bucket_bytes=self.bucket_bytes, first=self._num_buckets)
        for offset, (parameter, bucket) in enumerate(zip(last_first, buckets, strict=True)):
            position = self._num_attached + len(parameters) - 1 - offset
            slot = self._slots[id(parameter)] = _Slot(parameter, position, bucket, self)
            if has_partial(parameter.grad) and taker_of(parameter) is None:  # a copy, made between two passes
                self._unreduced[slot] = None
        self._num_attached += len(parameters)
        self._num_buckets += num_buckets(buckets)

    def has_other_hooks(self, parameter: DTensor) -> bool:
        """Tell whether a parameter has gradient or post-accumulate hooks other than ours."""
        slot = self._slots.get(id(parameter))
        keys = slot.keys if slot is not None else ()
        introduce(parameter, keys)
        return has_other_hooks(parameter, keys)

    def forget(self, number: int) -> None:
        """Drop what is known about a parameter that is no more, by its ``id``."""
        slot = self._slots.pop(number, None)
        self._unreduced.pop(slot, None)

    def _slot(self, parameter: DTensor) -> _Slot:
        if id(parameter) not in self._slots:
            self._register([parameter])
        return self._slots[id(parameter)]

    def bucket(self, *key: object) -> Bucket:
        """Return the one object for a bucket; see :class:`Bucket` for what makes it."""
        if key not in self._buckets:
            self._buckets[key] = Bucket(*key)
        return self._buckets[key]

    def _hook(self, parameter: DTensor, slot: _Slot) -> None:
        before = parameter.register_hook(_Hook(self._before_accumulation, slot))
        after = parameter.register_post_accumulate_grad_hook(_Hook(self._after_accumulation, slot))
        slot.keys = {before.id, after.id}

    # ------------------------------------------------------------------------------------------------- eager

    def _before_accumulation(self, slot: _Slot, gradient: Tensor | None) -> Tensor | None:
        """Let autograd store a partial gradient in an empty ``.grad``; bring any other to the right placements."""
        parameter = slot.parameter
        if not isinstance(gradient, DTensor):
            return None
        fits = gradient.placements == parameter.placements
        if (fits and not self._unreduced) or taker_of(parameter) is not None:
            return None
        if not _torch.accumulates(parameter):
            return None if fits else self._reduce_alone(parameter, gradient)
        if fits or not self._may_wait(slot, gradient):
            self._make_room(slot)
            return None if fits else self._reduce_alone(parameter, gradient)
        slot.set_aside, parameter.grad = parameter.grad, None
        return None

    def _reduce_alone(self, parameter: DTensor, gradient: DTensor) -> DTensor:
        with profiler_range("gradients", self.meter):
            return gradient.redistribute(placements=parameter.placements)

    def _may_wait(self, slot: _Slot, gradient: DTensor) -> bool:
        parameter = slot.parameter
        return (
            not torch.is_grad_enabled()
            and gradient.device_mesh == parameter.device_mesh
            and slot.bucket(gradient.placements, gradient.dtype) is not None
            and not has_other_hooks(parameter, slot.keys)
        )

    def _make_room(self, slot: _Slot) -> None:
        """Before a whole gradient is added: reduce what ``no_sync`` left in its place, and let the rest follow."""
        if has_partial(slot.parameter.grad):
            slot.parameter.grad = slot.parameter.grad.redistribute(placements=slot.parameter.placements)
        self._unreduced.pop(slot, None)
        if self._unreduced and self.synchronises and (number := _torch.backward_number()) != -1:
            self.pass_of(number)

    def _after_accumulation(self, slot: _Slot, parameter: DTensor) -> None:
        if slot.set_aside is NOTHING:
            return
        summand, parameter.grad = parameter.grad, slot.set_aside
        slot.set_aside = NOTHING
        self.add(parameter, _torch.local_of(summand), summand.placements)

    # ------------------------------------------------------------------------------------------------- summands

    def add(self, parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> None:
        """Add this rank's part of a gradient to ``parameter.grad``, reduced at the end of the running backward.

        Outside of a backward, and where more than a sum over ranks is needed, it is reduced at once.

        Args:
            parameter: a DTensor that requires a gradient.
            local: the part on this rank, of the parameter's dtype; given away, it may become a part of ``.grad``.
            placements: what ``local`` is to the whole gradient, one placement per mesh dim of ``parameter``.
        """
        slot, placements = self._slot(parameter), tuple(placements)
        fits, bucket = slot.route(placements, local.dtype)
        if local.requires_grad or (bucket is None and not fits):
            gradient = as_gradient(parameter, local, placements)
            self._make_room(slot)
            accumulate(parameter, self._reduce_alone(parameter, gradient))
        elif fits:
            self._make_room(slot)
            accumulate(parameter, _torch.wrap_like(local, parameter))
        elif not self.synchronises:
            self._keep(slot, local, placements)
        elif (number := _torch.backward_number()) != -1:
            self.pass_of(number).add(slot, bucket, local)
        else:
            alone = Pass(self, Arrivals())
            alone.add(slot, bucket, local)
            alone.end()

    def hooks(self, leaves: Sequence[tuple[DTensor, Sequence[Placement]]]) -> list[Callable[[Tensor], None]]:
        """Return the post-accumulate hooks of local leaves, each of which hands its gradient to a parameter.

        Args:
            leaves: the parameter that each stands in for, and the placements of its gradients.
        """
        deliveries = []
        for parameter, placements in leaves:
            slot, placements = self._slot(parameter), tuple(placements)
            fits, bucket = slot.route(placements, parameter.dtype)
            deliveries.append(Delivery(slot, parameter, placements, bucket, fits))
        hooks = hooks_of(self._arriving, deliveries)
        self._expected = Arrivals({pair: n for pair, n in self._expected.counts.items() if not pair[1].waits})
        return hooks

    def pass_of(self, number: int) -> Pass:
        """Return what a running backward pass has collected, by its number."""
        current = self._passes.get(number)
        if current is None:
            current = self._passes[number] = Pass(self, self._expected, number)
            _torch.on_backward_end(current.end)
        return current

    def learn(self, counts: Counts) -> None:
        """Expect from now on what a pass has brought, next to what earlier ones brought."""
        merged = dict(counts)
        for (slot, bucket), count in self._expected.counts.items():
            if (slot, bucket) in counts or self._may_come(slot):
                merged[slot, bucket] = max(count, counts.get((slot, bucket), 0))
        if merged != self._expected.counts:
            self._expected = Arrivals(merged)

    def _may_come(self, slot: _Slot) -> bool:
        """Tell whether a parameter that brought nothing this time may bring a partial gradient again."""
        parameter = slot.parameter
        return parameter is not None and parameter.requires_grad and not has_other_hooks(parameter, slot.keys)

    # ------------------------------------------------------------------------------------------------- accumulation

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave partial sums in ``.grad``; the next backward outside of the context reduces their total.

        Only where ``backward()`` runs matters, not the forward. Until then ``.grad`` is a DTensor whose placements are
        partial.

        Raises:
            RuntimeError: it is entered or left during a backward.
        """
        before = self._switch(synchronises=False)
        try:
            yield
        finally:
            self._switch(synchronises=before)

    def _switch(self, *, synchronises: bool) -> bool:
        if _torch.backward_number() != -1:
            raise RuntimeError("no_sync() was entered or left during backward(); put the whole backward() inside of it")
        before, self.synchronises = self.synchronises, synchronises
        return before

    def _keep(self, slot: _Slot, local: Tensor, placements: Sequence[Placement]) -> None:
        """Add a summand to ``.grad`` without communication."""
        parameter, old = slot.parameter, slot.parameter.grad
        self._unreduced[slot] = None
        if old is not None and tuple(old.placements) == tuple(placements):
            local = _torch.local_of(old) + local
        elif old is not None and old.placements == parameter.placements:
            dims = partial_dims(placements, parameter.placements)
            if all(parameter.device_mesh.get_local_rank(dim) == 0 for dim in dims):  # one rank brings the old sum
                local = _torch.local_of(old) + local
        elif old is not None:
            accumulate(parameter, self._reduce_alone(parameter, as_gradient(parameter, local, placements)))
            return
        parameter.grad = as_gradient(parameter, local, placements)

    def reduce(self) -> None:
        """Reduce what backward passes inside of :meth:`no_sync` have left in ``.grad``; a collective.

        Raises:
            RuntimeError: inside of :meth:`no_sync`.
        """
        if not self.synchronises:
            raise RuntimeError("reduce() was called inside no_sync(); call it after the context")
        if self._unreduced:
            Pass(self, Arrivals()).end()

    def unreduced(self) -> dict[Bucket, list[_Slot]]:
        """Return the parameters whose ``.grad`` is partial, may be reduced, and that no running pass has taken."""
        if not self._unreduced or not self.synchronises:
            return {}
        found: dict[Bucket, list[_Slot]] = {}
        for slot, taken in list(self._unreduced.items()):
            gradient = slot.parameter.grad
            if taken is not None and taken() is not None:
                continue
            if not has_partial(gradient):  # cleared or replaced meanwhile
                del self._unreduced[slot]
            elif (bucket := slot.bucket(gradient.placements, gradient.dtype)) is None:
                self._make_room(slot)
            else:
                found.setdefault(bucket, []).append(slot)
        return found

    def mark_taken(self, slot: _Slot, taker: Pass) -> None:
        """Leave the partial ``.grad`` of a parameter to a pass; should that end with an exception, it is free again."""
        self._unreduced[slot] = weakref.ref(taker)

    def mark_reduced(self, slot: _Slot) -> None:
        """Say that ``.grad`` of a parameter is no longer partial."""
        self._unreduced.pop(slot, None)


def _rebuild(bucket_bytes: int) -> GradientSync:
    return GradientSync(bucket_bytes=bucket_bytes)
