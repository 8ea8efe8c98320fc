"""ZeRO 3: the parameters of a module in shards, unsharded only while they are used.

    unit_plan         which parameters form a unit, and where they lie in the flat buffers
    sharded_values    the values of one buffer: shard, full, guarded
    units             the states of a unit, and how long it stays unsharded
    unit_hooks        when forward and backward use a unit
    units_of_step     the same for the micro-batches of a pipeline
    offload           shards in host memory
    this file         construction, and the calls of DDP

Gradients are those of ZeRO 2: a bucket is reduce-scattered as soon as its last gradient is there. Buckets do not cross
units, so a unit's gradients leave when its backward is done. Per rank remain, of P parameters on N ranks:

    parameters    P/N + the root unit + the unit that runs and the one that is gathered meanwhile
    gradients     P/N + those of the root unit and of the units whose reduction is in flight

With offload P/N of both are in host memory, and with them the optimizer's state.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019), section 5.3;
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023), on prefetch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from vescale.dtensor import materialize
from vescale.dtensor.extension import generator_fact, group_of_ranks

from .. import _torch
from .._buckets.granularity import param_info
from .._buckets.plan import Bucket
from .._checks import check_shared_memory
from .._gradients.bucket import FlatBucket
from .._gradients.rules import ReduceRules
from .._ranks.axis import Axis
from .._ranks.data_axes import DataAxes
from .offload import HostMemory
from .sharded_values import ShardedValues
from .unit_hooks import UnitHooks
from .unit_plan import choose_units, plan_units
from .units import Unit, Units
from .units_of_step import UnitsOfStep

__all__ = ["ShardedModule", "materialize_in_shards"]


class _Bucket(FlatBucket):
    """A bucket of ZeRO 2 whose parameter values are sharded, too.

    Args:
        plan, params, axes, rules: As in `FlatBucket`.
        gathers: The axis for gathers of parameters.
        host: Host memory for shards; None keeps them on the device.
        is_last: Whether it is the last bucket of the plan.
    """

    def __init__(
        self,
        plan: Bucket,
        params: list[nn.Parameter],
        axes: DataAxes,
        rules: ReduceRules,
        *,
        gathers: Axis,
        host: HostMemory | None,
        is_last: bool,
    ):
        self._gathers = gathers
        self._host = host
        self._is_last = is_last
        super().__init__(plan, params, axes, zero=3, rules=rules)

    def _adopt_parameters(self) -> None:
        self.sharded_values = ShardedValues(self.plan, [slot.param for slot in self.slots], self._gathers, self._host)
        self._home = self.grad_shard
        if self._host is not None:
            self._home = self._host.home_of(self.grad_shard)
            self.grad_shard = None  # none on the device: each reduction gives its sum in new memory
        for slot, part in zip(self.slots, self.sharded_values.parts, strict=True):
            slot.value_part = part
            start = part.storage_offset() - self.sharded_values.shard.storage_offset()
            slot.grad_part = self._home[start : start + part.numel()]

    def store(self, mean: Tensor, *, is_whole: bool = False) -> None:
        """Store the mean of this coord's shard, on the host with offload, or add it to the reduced gradient."""
        if self._host is None:
            super().store(mean, is_whole=is_whole)
            return
        if self.accumulates:
            mean = mean.to(self._home.device)  # the host waits
            for slot in self.slots:
                self._add(slot, mean, is_whole=is_whole)
        else:
            self._host.keep(self._home, mean)
        for slot in self.slots:
            slot.unreduced, slot.reduced = False, True
        self.release()
        if self._is_last:  # buckets are finished in the order of the plan, each once per reduction
            self._host.wait_before_reading()


class ShardedModule:
    """The sharded parameters of a module.

    Args:
        module: The module.
        axes: The data-parallel axes.
        units: As in `choose_units`.
        bucket_bytes: Bucket size of the root unit.
        shards: Values of parameters that have none themselves, see `materialize_in_shards`.
        blocks: Elements that must stay together, by name of the parameter.
        offload: Keep shards in host memory.

    Attributes:
        frees: Whether parameters are freed between uses.
        plan: Buckets of the trainable parameters.
        buckets: The buckets, once `make` has run.
        frozen: Values of frozen parameters: name -> this rank's flat part.
    """

    def __init__(
        self,
        module: nn.Module,
        axes: DataAxes,
        *,
        units: Iterable[str | re.Pattern] | None,
        bucket_bytes: int,
        shards: dict[str, Tensor],
        blocks: Mapping[str, int],
        offload: bool = False,
    ):
        self.module = module
        self.axes = axes
        self.axis = axis = axes.shard
        self.specs = choose_units(module, units)
        self.params = dict(module.named_parameters())
        check_shared_memory(module, self.params)
        self._shards = shards
        self.frees = offload or axis.size > 1
        device = next(_torch.local_tensor(p).device for p in self.params.values())
        self._host = HostMemory(device) if offload else None
        infos = {
            trains: [param_info(fqn, p, blocks) for fqn, p in self.params.items() if p.requires_grad == trains]
            for trains in (True, False)
        }
        layout = {"num_shards": axis.size, "bucket_bytes": bucket_bytes}
        self.plan, self._homes = plan_units(self.specs, infos[True], **layout, num_pieces=axes.replicate.size)
        self._frozen_plan, self._frozen_homes = plan_units(self.specs, infos[False], **layout)
        self.frozen: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self.buckets: list[FlatBucket] = []

    def __str__(self) -> str:
        return "\n".join([*map(str, self.specs), str(self._frozen_plan)])

    def make(self, rules: ReduceRules) -> list[FlatBucket]:
        """Move the parameters into flat buffers, one bucket after the other, and free what other ranks keep."""
        self._gathers = self._gather_axis()
        values: dict[str, list[ShardedValues]] = {spec.name: [] for spec in self.specs}
        for plan, home in zip(self._frozen_plan.buckets, self._frozen_homes, strict=True):
            held = ShardedValues(plan, self._fill(plan), self._gathers, self._host)
            values[home].append(held)
            for part, tensor in zip(plan.parts(self.axis.coord), held.parts, strict=True):
                self.frozen[part.fqn] = ((part.start, part.stop), tensor)
        for plan, home in zip(self.plan.buckets, self._homes, strict=True):
            place = {"gathers": self._gathers, "host": self._host, "is_last": plan is self.plan.buckets[-1]}
            bucket = _Bucket(plan, self._fill(plan), self.axes, rules, **place)
            values[home].append(bucket.sharded_values)
            self.buckets.append(bucket)
        units = [
            Unit(index, spec.name, self.module.get_submodule(spec.name), values[spec.name])
            for index, spec in enumerate(self.specs)
        ]
        self.units = Units(units, self._gathers)
        return self.buckets

    def attach(self, *, synchronizes: Callable[[], bool], reshard_after_forward: bool, prefetch: bool) -> None:
        """Let calls of modules unshard and free the units."""
        settings = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
        self.hooks = UnitHooks(self.units, synchronizes=synchronizes, **settings)

    def begin_step(self, parameters: Iterable[Tensor]) -> UnitsOfStep:
        """Hold the units for a step of a pipeline, which computes gradients of these parameters."""
        return UnitsOfStep(self.units, holds=not self.hooks.reshard_after_forward, parameters=parameters)

    def _gather_axis(self) -> Axis:
        """Return the axis with a process group of its own: gathers and reductions need no order among each other."""
        if self.axis.size == 1:
            return self.axis
        return dataclasses.replace(self.axis, group=group_of_ranks(self.axis.ranks, purpose="gathers of parameters"))

    def _fill(self, plan: Bucket) -> list[nn.Parameter]:
        """Return a bucket's parameters, with values."""
        params = [self.params[slot.fqn] for slot in plan.slots]
        for slot, param in zip(plan.slots, params, strict=True):
            if slot.fqn in self._shards:
                param.data = self._shards.pop(slot.fqn).full_tensor()
        return params

    # ------------------------------------------------------------------------------------------------ for DDP

    @property
    def frozen_buckets(self) -> tuple[Bucket, ...]:
        """Where frozen parameters lie."""
        return self._frozen_plan.buckets

    @property
    def parts(self) -> dict[nn.Parameter, tuple[tuple[int, int], Tensor]]:
        """By parameter, the range of its flat local tensor that this rank keeps, and that part."""
        self.units.keep_writes()
        trained = {slot.param: (slot.part, slot.value_part) for bucket in self.buckets for slot in bucket.slots}
        return {**trained, **{self.params[fqn]: part for fqn, part in self.frozen.items()}}

    def values_changed(self) -> None:
        """Free full parameters: their shards have new values. Inside `unsharded`, gather them again."""
        self.units.version += 1
        self.hooks.reset()
        if self.units.pinned:
            self.units.gather_all()

    def settle(self) -> None:
        """Wait until shards in host memory can be read and written; let them have what was written to full parameters.

        Raises:
            RuntimeError: If ``param.data`` was replaced by a tensor that does not fit.
        """
        self.units.keep_writes()
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        if self._host is not None:
            self._host.wait_before_reading()
            self._host.wait_before_writing()

    def backward_failed(self) -> None:
        """Free the units that a failed backward has left unsharded."""
        if self.hooks.in_backward:
            self.hooks.reset()
            self._wait_for_copies()

    def keep(self, keeps: bool) -> bool:
        """Leave units unsharded after their use, or free them again; return what was set."""
        before, self.units.keeps = self.units.keeps, keeps
        return before

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Unshard all parameters; writes to them are kept."""
        units = self.units
        if units.is_running or _torch.backward_number() != -1:
            raise RuntimeError(
                "unsharded() was entered during forward or backward, expected a call between steps; the unit that "
                "runs has its full parameters"
            )
        units.keep_writes()
        units.pinned += 1
        try:
            if units.pinned == 1:
                units.gather_all()
            yield
        finally:
            units.pinned -= 1
            if units.pinned == 0:
                units.give_away()
                self.hooks.reset()

    @property
    def is_unsharded(self) -> bool:
        """Whether the user sees full parameters: inside `unsharded`, or where they are never freed."""
        return self.units.pinned > 0 or not self.frees


def materialize_in_shards(module: nn.Module, axes: DataAxes) -> dict[str, Tensor]:
    """Materialize a deferred module so that each rank computes and holds only its part of each parameter.

    Returns:
        The parameters as DTensors, by name. The module then has plain parameters of the same shapes without memory.

    Raises:
        ValueError: If the ranks' random states differ, so that their parts would be of different parameters; or if two
            parameters share memory.
    """
    axes.all.check_facts([generator_fact(axes.all.device_type)], what="the random state of a deferred module")

    def rows(_fqn: str, tensor: Tensor) -> tuple[Shard] | None:
        return (Shard(0),) if isinstance(tensor, nn.Parameter) and tensor.ndim else None

    materialize(module, axes.meshes[-1], rows)  # the shards' axis: it has more than one rank
    made = {fqn: p for fqn, p in module.named_parameters() if isinstance(p, DTensor)}
    check_shared_memory(module, made)
    hollow = {id(param): _hollow(param) for param in made.values()}
    for part in module.modules():
        table = _torch.own_parameters(part)
        for key, param in table.items():
            table[key] = hollow.get(id(param), param)
    return {fqn: param.detach() for fqn, param in made.items()}


def _hollow(like: DTensor) -> nn.Parameter:
    """Return a plain parameter with the global shape of a DTensor, its attributes, and no memory."""
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.to_local().device)
    empty.untyped_storage().resize_(0)
    param = nn.Parameter(empty, requires_grad=like.requires_grad)
    vars(param).update({key: value for key, value in vars(like).items() if not key.startswith("_")})
    return param
