"""Data parallelism with optional sharding of gradients, optimizer state (ZeRO 1, 2) and parameters (ZeRO 3).

Each rank of a mesh axis holds the module and runs it on its part of the batch; gradients are averaged over the axis in
flat buckets while backward runs. State after ``backward()``:

    zero   param.grad                    kept per rank between steps            collective of a bucket
    0      the averaged gradient         gradients                              all-reduce
    1      a placeholder that raises     gradients + 1/N of reduced gradients   reduce-scatter
    2      a placeholder that raises     1/N of reduced gradients               reduce-scatter
    3      a placeholder that raises     1/N of gradients and of parameters     reduce-scatter, gathers of parameters

``reduction="ordered"`` replaces these collectives: an all-to-all, a sum in the order of coords, and for ZeRO 0 an
all-gather of the sums. An element's sum then has the same bits for any bucket size, overlap and stage. The table of
costs is in `_gradients/reduction.py`, the dtypes of gradients and of sums in `_gradients/rules.py`.

With ZeRO 1 and 2 ``DistributedOptimizer`` updates this rank's part of the parameters, with 1/N of the optimizer state,
and gathers them while the next forward runs (`_parameters/gathers.py`). With ZeRO 3 it updates the shard, and the next
forward gathers (`_parameters/zero3.py`).

The rows of the ranks are those of one device. The first training call with new shapes is recorded on the rows of all
ranks (`vescale.dmodule.rows`): operators that mix rows, such as BatchNorm, the loss of a router or a mean over targets
that are not ignored, then communicate, and random operators draw this rank's part wherever the rows are. All other code
runs as it is. The mean over ranks of the losses is the loss of one device, and so are its gradients. It needs local
batches of equal size, so ranks compare their rows, and the random state where they draw, at the end of each backward
(`_forward/local_calls.py`).

On a mesh of two axes (hybrid sharding) N is the size of the second: shards lie along it, replicas of them along the
first, and the sums of shards are all-reduced over that one (`_ranks/data_axes.py`).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019), section 5.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import CheckedInside, Count, Fact, checked

from . import _torch
from ._checks import blocks_of, refuse_local_statistics, rows_program
from ._forward.global_mean import global_mean_scale
from ._forward.ignored_outputs import IgnoredOutputs
from ._forward.local_batch import attach_local_batch
from ._forward.local_calls import LocalCalls
from ._gradients.bucket import FlatSlot
from ._gradients.reducer import Reducer
from ._options import Options, as_tuple
from ._parameters.gathers import ParameterGathers
from ._parameters.unit_plan import matching_names
from ._state.module_state import full_values, load_pieces, sharded_parameters, state_of_pieces
from ._wrap import WrappedModule

__all__ = ["DDP"]


class DDP(_torch.UnmovableModule):
    r"""Wrap a module for data parallelism over a mesh axis, or over two: shards over one, replicas over the other.

    Parameters are plain tensors, or DTensors over other axes (tensor parallelism); they stay the same objects. At
    construction a deferred module is materialized, and parameters and buffers of coord 0 overwrite those of the other
    coords. Tied parameters are reduced once, frozen ones not at all. Gradients are reduced in any ``backward()`` that
    reaches the parameters, including one that a pipeline engine runs without calling this wrapper. Partial gradients
    are summed over the other axes once per step (`_gradients/partials.py`). Each rank's forward computes its part of
    what one device computes for the rows of all ranks; see ``per_rank`` and `islands`. With a plan of
    `vescale.dmodule` the rows are one more mesh axis of the module's programs; experts and local regions run on this
    rank's rows. In modules with parts compiled by ``torch.compile``, and in pipelines, what mixes rows is refused; so
    are calls of a module of which only a part has a plan, or with DTensors without a plan.

    Attributes it does not have are those of the module; state dicts and parameters have the names of the module.
    Copies of the module (``copy.deepcopy(model.module)``) are plain modules; the wrapper itself cannot be copied.

    Args:
        module: Module with at least one trainable parameter, on its final device and with its final dtype.
        mesh_axis: 1-D mesh, for example ``mesh["dp"]``, or a 2-D one for hybrid sharding, for example
            ``mesh["replicate", "shard"]``: gradients, state and parameters are sharded over its second axis and
            replicated over its first; gathers of parameters stay within the second. Every rank has a part of the batch:
            parts are in the order of ranks along the first axis, then along the second, and means of gradients are over
            all. With one rank nothing is communicated.
        zero: 0, 1, 2 or 3, see above. From 1 on parameters become views of flat buffers. With 3 each rank keeps 1/N of
            them, and unshards them, unit by unit, while they are used. Otherwise they have no values, and reading one
            is an error: see `unsharded` and `state_dict`. All ranks must run the same units in the same order.
        bucket_bytes: Size at which a gradient bucket is closed, in the dtype of its parameters.
        overlap: Reduce buckets while backward runs, and with ZeRO 1 and 2 gather parameters while the next forward
            runs, with a wait for each bucket at its first use. If False, do all of it at the end of backward and of
            step. The result is the same.
        reduction: Order in which the gradients of ranks are added. ``"backend"`` leaves it to the backend, where it may
            depend on an element's position in its bucket. ``"ordered"`` adds in the order of coords, so that gradients,
            and with them parameters and state of element-wise optimizers, have the same bits for any ``bucket_bytes``,
            ``overlap``, ``zero`` and mesh of the same ranks. Both send, per rank of N and reduction, 2 (N-1)/N of the
            bytes of the gradients with ZeRO 0, and (N-1)/N with others (gloo has no reduce-scatter: ``"backend"`` sends
            twice that there). With hybrid sharding ``"ordered"`` sends more between replicas.
            ``"ordered"`` needs up to three more buffers of ``bucket_bytes`` during backward, and adds N - 1 times a
            shard in torch. `clip_grad_norm_` then takes its norm of order 1 or 2 exactly, too, whatever the layout.
        grad_dtype: Dtype in which gradients are kept, and added over several backwards; ``param.grad`` has it, too. By
            default each parameter's own. A gradient is rounded to it once, as autograd delivers it.
        reduce_dtype: Dtype of gradients on the wire and of the sum over ranks; by default that in which they are kept.
            Local gradients are rounded to it, added in it, divided by the number of ranks in the wider of both dtypes,
            and rounded to ``grad_dtype``. With one rank it has no effect.
        param_dtype: Dtype of the computation, typically ``torch.bfloat16``: parameters of more bits are cast to it, in
            place; buffers and inputs are not. ``DistributedOptimizer`` then keeps master weights in the original dtype,
            which begin from the values before rounding; until then this wrapper holds the values of this rank's parts.
            By default no dtype changes.
        find_unused_parameters: Find, in each backward, the parameters that no rank has used: they keep ``grad`` None,
            as in one process. It takes one small all-reduce that the host waits for. If False, every trainable
            parameter must get a gradient on every rank in each synchronizing backward; a missing one is an error.
        units: With ``zero=3``: names of modules, or regular expressions for full names, whose parameters are
            unsharded and freed together. By default the elements of the outermost ``nn.ModuleList`` and
            ``nn.Sequential`` containers. The rest, and what several units share, stays unsharded from the beginning of
            the forward to the end of the backward.
        reshard_after_forward: With ``zero=3``: free a unit after its forward and gather it again for its backward.
            False keeps it, which takes the memory of all parameters and saves a third of the communication; a pipeline
            then gathers it once for all micro-batches.
        prefetch: With ``zero=3``: gather the next unit while one runs.
        granularity: Where parameters may be cut into shards (zero 1 to 3), by name or regular expression for full
            names: ``"tensor"`` (nowhere), ``"rows"`` (between indices of dim 0), ``("dim0", n)`` (between groups of n
            such), ``"expert"`` (the same as rows, of a stack of matrices) or a number of elements of a block. Applies
            to this rank's local tensor. By default parameters are cut anywhere. Shards stay equal in size, with
            padding between parameters, so no shard is smaller than a block. A warning lists the buffers that this makes
            much larger than their parameters.
        offload: With ``zero=3``: keep shards of parameters (frozen ones, too) and gradients, and so the optimizer's
            state and masters, in host memory, pinned if there is an accelerator; the optimizer steps there. A unit's
            shard is copied to the device before its gather, that of its gradient back after its reduction, both beside
            the computation. Also on an axis of one rank parameters are on the device only while they are used. The
            module is given on its device, or deferred. Tensors of state dicts and of `sharded_parameters` are in host
            memory: collectives of a backend for devices only need ``.to(device)`` first.
        watch_draws: Watch every call of every module for random operators, which takes the host some microseconds per
            operator. By default only in those modules whose own code draws in their first call (in training, and in
            evaluation), in torch's dropout modules, and in modules that hold a `torch.Generator`. A draw of another
            module is an error when its call ends. A draw from a generator that is held elsewhere is not detected.
        per_rank: Let every rank be a world of its own, as in torch's ``DistributedDataParallel``: statistics, losses of
            routers, means over targets and random numbers are those of its rows alone. By default the first training
            call with new shapes runs a few more times, forward and without side effects, to find the operators that mix
            rows, and a call that cannot run on the rows of all ranks is refused.
        row_wise: Names of modules, or regular expressions for full names, that treat every row alone although their
            code sorts or selects rows, as a mixture's experts do: ``[r".*\.experts"]``. By default such operators run
            on the rows of all ranks, on every rank. What these modules return is compared with that on the rows of all
            ranks, in the first call with new shapes; they must draw no random numbers.

    Attributes:
        module: The module.
        mesh_axis: The mesh.
        data_axes: Its axes, grouped by what their ranks share: parts of the batch, shards, or replicas.
        zero: The stage.
        reduction: The order of sums.
        originals: Values before the cast to ``param_dtype``, until the optimizer takes them.
        spreads: How each parameter is distributed over the ranks.
        parameter_order: Names of the parameters of all stages of a pipeline, in order, for norms in exact mode.

    Raises:
        ValueError: If ``mesh_axis`` is neither 1-D nor 2-D with ranks that ascend along its axes, ``zero`` or
            ``reduction`` is unknown, a dtype is not a floating-point one, nothing is trainable, a parameter has no
            storage, is not a floating-point number, is on another device, is a DTensor over these axes, shares memory
            with another (ZeRO 1 to 3), has a gradient of another dtype or has been wrapped before; if ``granularity``
            names no parameter, or does not fit its shape; if ``units`` or ``row_wise`` name no module; if ``offload``
            is given with another stage than 3, or the module is not on the devices of the mesh then; or if modules or
            settings differ between ranks.

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

    @checked
    def __init__(
        self,
        module: nn.Module,
        mesh_axis: CheckedInside[DeviceMesh],
        *,
        zero: CheckedInside[int] = 0,
        bucket_bytes: Count = 25 * 2**20,
        overlap: bool = True,
        reduction: CheckedInside[str] = "backend",
        grad_dtype: CheckedInside[torch.dtype | None] = None,
        reduce_dtype: CheckedInside[torch.dtype | None] = None,
        param_dtype: CheckedInside[torch.dtype | None] = None,
        find_unused_parameters: bool = True,
        units: CheckedInside[Iterable[str | re.Pattern] | None] = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        granularity: CheckedInside[Mapping[str | re.Pattern, str | int | tuple[str, int]] | None] = None,
        offload: CheckedInside[bool] = False,
        watch_draws: bool = False,
        per_rank: bool = False,
        row_wise: CheckedInside[Iterable[str | re.Pattern]] = (),
    ):
        super().__init__()
        options = Options(
            zero=zero,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            reduction=reduction,
            grad_dtype=grad_dtype,
            reduce_dtype=reduce_dtype,
            param_dtype=param_dtype,
            find_unused_parameters=find_unused_parameters,
            units=as_tuple(units),
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            granularity=granularity,
            offload=offload,
            watch_draws=watch_draws,
            per_rank=per_rank,
            row_wise=as_tuple(row_wise),
        )
        wrapped = WrappedModule.of(module, mesh_axis, options)
        self.module = module
        self.mesh_axis = mesh_axis
        self.zero = zero
        self.reduction = reduction
        self.data_axes = axes = wrapped.data_axes
        self.originals = wrapped.originals
        self.spreads = wrapped.spreads
        self.parameter_order: Sequence[str] = ()
        self._order = {fqn: position for position, fqn in enumerate(wrapped.names)}
        self._sharded = sharded = wrapped.sharded
        settings = {"overlap": overlap, "find_unused": find_unused_parameters}
        self._reducer = Reducer(wrapped.buckets, wrapped.frozen, axes.all, **settings)
        self._gathers = ParameterGathers(module, wrapped.buckets if sharded is None else (), overlap=overlap)
        self._calls = self._rows = None
        row_wise = matching_names(module, options.row_wise, setting="row_wise")
        if axes.all.size > 1:
            axes.all.failures.can_meet()
            self._attach_forward(module, options, row_wise)
        self._reducer.blocks_of = functools.partial(blocks_of, type(module).__name__, self._rows is not None)
        if sharded is not None:
            settings = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
            sharded.attach(synchronizes=lambda: self._reducer.synchronizes, **settings)
            self._reducer.begin_units = sharded.begin_step

    def _attach_forward(self, module: nn.Module, options: Options, row_wise: list[str]) -> None:
        """Make the forward of the module, on this rank's rows, that of one device on the rows of all ranks."""
        axes, reducer = self.data_axes, self._reducer
        calls = self._calls = LocalCalls(axes.all.device_type, backward_ran=reducer.take_received, meet=self._meet)
        if options.per_rank or (program := rows_program(module)) is None:
            return
        self._rows = program(module, axes.one_mesh, meet=self._meet, row_wise=row_wise)
        refuse_local_statistics(module, self._rows)
        attach_local_batch(module, axes.meshes, watch_draws=options.watch_draws, rows=self._rows)
        calls.attach(module)
        self.compare_in_backward(calls.facts)
        reducer.checks.watch(IgnoredOutputs(module, is_scaled=lambda: calls.is_scaled))
        self._rows.attach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on this rank's part of the batch; inside of ``vescale.dtensor.exact`` on the rows of all."""
        self._reducer.num_blocks = self._reducer.blocks_of(self._reducer)
        self._gathers.waits_in_step |= torch.compiler.is_compiling()
        return self.module(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a DDP cannot be copied or pickled, as it has the process groups of its ranks: copy `model.module` (with "
            "zero=3 inside of `model.unsharded()`), or save `model.state_dict()`"
        )

    @contextlib.contextmanager
    def no_sync(self, *, reshard: bool = False) -> Iterator[None]:
        """Accumulate gradients locally: a ``backward()`` inside this context does not reduce.

        The next ``backward()`` outside reduces the sum. Only where ``backward()`` runs matters, not the forward; a step
        of a pipeline must run inside, too. With ``zero=2`` it keeps full gradients meanwhile; without this context each
        backward adds to the reduced shard, or with ``zero=0`` to the reduced gradient, which takes the memory of all
        gradients once more during backward.
        ``DistributedOptimizer.step`` and ``clip_grad_norm_`` refuse gradients that have not been reduced.

        Args:
            reshard: With ``zero=3``, free parameters after each use inside, too. By default they are gathered once and
                stay unsharded until a backward outside has ended.

        Raises:
            RuntimeError: If it is entered, or left, during a backward.

        Example:
            >>> with model.no_sync():                      # doctest: +SKIP
            ...     for batch in micro_batches[:-1]:
            ...         loss(model(batch)).backward()
            >>> loss(model(micro_batches[-1])).backward()  # doctest: +SKIP
        """
        before = self._switch(synchronizes=False)
        kept = None if self._sharded is None else self._sharded.keep(not reshard)
        try:
            yield
        finally:
            self._switch(synchronizes=before)
            if self._sharded is not None:
                self._sharded.keep(kept)

    def _switch(self, *, synchronizes: bool) -> bool:
        if _torch.backward_number() != -1:
            raise RuntimeError("no_sync() was entered or left during backward(); put the whole backward() inside of it")
        before, self._reducer.synchronizes = self._reducer.synchronizes, synchronizes
        return before

    def islands(self) -> dict[str, str]:
        """Return the operators that run on the rows of all ranks, and what each communicates in a forward.

        It is empty before the first call in training, and where nothing mixes rows. `vescale.dtensor.debug.comm_log`
        shows every collective of a step.

        Example:
            >>> model(x)                                                              # doctest: +SKIP
            >>> model.islands()                                                       # doctest: +SKIP
            {"torch.nn.functional.batch_norm on (8, 6) (Shard(dim=0),), ... in module '1'": '2 collectives, 96 B'}
        """
        return {} if self._rows is None else self._rows.islands()

    def global_mean_scale(self, count: int | float | torch.Tensor) -> float:
        """Return the factor by which to multiply a local *sum* of losses, for the loss to be the mean over the batch.

        Ranks may hold different numbers of terms, which a mean over ranks of local means would weigh differently. The
        mean of ``local sum * scale`` is the sum of all losses over the sum of all counts. Every rank, even one without
        terms, calls it once per optimizer step, before the first forward, and the host waits.

        Ranks may have different numbers of rows from then on, and compare them in every call of the module. A call with
        different numbers runs on this rank's rows alone; if the module mixes rows, it is an error.

        Args:
            count: Number of terms (or sum of weights) in all of this rank's micro-batches of the step.

        Raises:
            ValueError: On every rank, if the count of any rank is not a finite number of 0 or more, or all are 0.

        Example:
            >>> scale = model.global_mean_scale(sum((y != -100).sum() for _, y in micro_batches))  # doctest: +SKIP
            >>> for x, y in micro_batches:                                                         # doctest: +SKIP
            ...     losses = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
            ...     (losses * scale).backward()  # the last one outside of no_sync()
        """
        if self._calls is not None:
            self._calls.is_scaled = True
        if self._rows is not None:
            self._rows.is_uneven = True
        return global_mean_scale(count, self.data_axes.all)

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Unshard all parameters (``zero=3``): to read, write or export them, or to call parts of the module.

        All ranks enter and leave it. A write to a parameter, equal on all ranks, is kept. It needs the memory of all
        parameters; a view made inside keeps its memory. With other stages parameters are never sharded.

        Raises:
            RuntimeError: If it is entered during forward or backward.

        Example:
            >>> with model.unsharded():                          # doctest: +SKIP
            ...     torch.save(model.state_dict(), "full.pt")
        """
        with contextlib.nullcontext() if self._sharded is None else self._sharded.unsharded():
            yield

    def slots(self) -> dict[str, FlatSlot]:
        """Return each trainable parameter's slot in the flat buffers, by name, in registration order."""
        return dict(sorted(((s.fqn, s) for s in self._reducer.slots), key=lambda item: self._order[item[0]]))

    def gather_parameters(self, num_views: Mapping[int, int] | None = None) -> None:
        """Start the all-gathers of the parts that the optimizers of all ranks have updated (ZeRO 1, 2).

        A read or write of a parameter waits for its all-gather; with ``overlap=False`` this method waits for all. With
        ZeRO 3 full parameters are freed, and the next forward gathers them.

        Args:
            num_views: By index of a bucket: how many tensors the optimizer has over its parameters.
        """
        self._reducer.has_reduced = False
        if self._sharded is not None:
            self._sharded.values_changed()
        else:
            self._gathers.launch(num_views or {})

    def wait_for_parameters(self) -> None:
        """Wait until the parameters have the values of the last step (ZeRO 1, 2), and offloaded shards can be written.

        Every read through torch waits without this call. Call it before a C++ extension that is not an operator of
        torch reads a parameter outside the forward of the module that holds it.

        Raises:
            RuntimeError: If a gather has failed, naming it and the ranks that are gone.
        """
        self._gathers.settle()
        if self._sharded is not None:
            self._sharded.settle()

    def compare_in_backward(self, source: Callable[[], Iterable[Fact]]) -> None:
        """Compare facts over the data-parallel ranks at the end of every backward that reduces.

        Args:
            source: A bound method that returns the facts; it is forgotten together with its object.
        """
        self._reducer.checks.add(source)

    def check_reduced(self) -> None:
        """Raise RuntimeError if a gradient has been accumulated and not reduced, or if some ranks ran no backward."""
        self._reducer.check_reduced()
        if not self._reducer.has_reduced:
            self._meet(
                "optimizer.step() or clip_grad_norm_ without a backward since the last step; run every backward on all "
                "ranks or on none"
            )

    def _meet(self, what: str) -> None:
        """Wait until all ranks are about to do this, as far as ranks are compared at all."""
        if self.data_axes.all.size > 1 and self._reducer.checks.is_on:
            self._gathers.finish()
            self.data_axes.all.failures.meet(what)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and discard the reduction of a backward that ended with an exception."""
        self._reducer.reset()
        if self._sharded is not None:
            self._sharded.backward_failed()
        with _torch.plain_functions():  # gradients need no values of parameters that are in flight
            super().zero_grad(set_to_none)

    def sharded_parameters(self) -> dict[str, DTensor]:
        """Return this rank's part of each parameter as a DTensor over the data-parallel axis, by name.

        The placement is `vescale.dtensor.RaggedShard` where parameters, or with ZeRO 1 and 2 their optimizer state, are
        sharded, otherwise ``Replicate``; a tensor-parallel parameter is a DTensor over the axes of both. With
        ``zero=3``, a parameter without dims, which one rank owns, has the shape (1,) here. The tensors share the memory
        that the optimizer updates: after a write to them, call `gather_parameters`. `load_state_dict` takes them.

        Raises:
            NotImplementedError: See `StatePiece.to_dtensor`.

        Example:
            >>> shards = model.sharded_parameters()                             # doctest: +SKIP
            >>> shards["layers.0.weight"].full_tensor()  # on all ranks alike   # doctest: +SKIP
        """
        self.wait_for_parameters()
        parts = {slot.param: slot.value_part for slot in self._reducer.slots if self.zero}
        if self._sharded is not None:
            parts = {param: part for param, (_, part) in self._sharded.parts.items()}
        return sharded_parameters(dict(self.named_parameters()), parts, self.spreads, full=self.zero < 3)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's state dict, under the module's names.

        With ``zero=3`` a parameter's value is a `StatePiece`, this rank's part of it, which checkpoints store and
        reshard; inside `unsharded` it is the full tensor.
        """
        if self._sharded is None or self._sharded.is_unsharded or kwargs.get("keep_vars"):
            return self.module.state_dict(*args, **kwargs)
        return state_of_pieces(self.module, self._sharded.parts, self.spreads, *args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict, in place; with ``zero=3`` values of parameters may be pieces or full tensors.

        Values of parameters may be DTensors over the data-parallel axis, such as those of `sharded_parameters`: then
        all ranks call it alike.

        Raises:
            ValueError: For ``assign=True``, which would replace the parameters that this wrapper manages.
        """
        if assign:
            raise ValueError("assign=True would replace the parameters that DDP manages; load in place (assign=False)")
        if self._sharded is None or not self._sharded.frees:
            params = dict(self.module.named_parameters(remove_duplicate=False))
            full = _torch.with_metadata(full_values(state_dict, params, self.spreads), state_dict)
            return self.module.load_state_dict(full, strict=strict)
        parts, spreads = self._sharded.parts, self.spreads
        self._sharded.settle()
        try:
            return load_pieces(self.module, parts, spreads, state_dict, strict=strict)
        finally:
            self._sharded.values_changed()

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
