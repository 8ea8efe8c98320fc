"""`ParallelModel`, the result of `parallelize`: the user's model behind one interface for every layout.

    output = model(**model.local_batch(batch))      a `StepOutput`; without a loss, the module's own output
    output.loss.backward()
    logits = model.outputs(**inputs, select=...)    rows of the module's output, without gradients

Attributes, ``named_parameters`` and the names of ``state_dict`` are those of the user's module.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import exact_num_blocks, waits_of
from vescale.optim import DDP
from vescale.pipe import PipelineEngine
from vescale.plan import Plan

from ._batch import slice_batch
from ._output import StepOutput, loss_in
from ._state import full_state, load_state

LossFn = Callable[..., Tensor]


class ParallelModel(nn.Module):
    """Run a parallel model as if it were the plain one; built by `vescale.parallelize`.

    Attributes:
        plan: the plan it was built from.
        mesh: device mesh with the plan's axes.
        module: the user's module, parallelized in place. With a pipeline, modules of other stages are stubs.
        engine: the pipeline engine; ``None`` if the plan needs none.
        recomputed: names of the modules whose activations are computed again in backward.
    """

    def __init__(
        self,
        ddp: DDP,
        *,
        plan: Plan,
        mesh: DeviceMesh,
        engine: PipelineEngine | None,
        loss_fn: LossFn | None = None,
        state_names: Sequence[str] = (),
        recomputed: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.ddp = ddp
        self.plan = plan
        self.mesh = mesh
        self.engine = engine
        self.loss_fn = loss_fn
        self.recomputed = tuple(recomputed)
        self._state_names = tuple(state_names)

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.ddp.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this rank's part of the batch.

        Args:
            *args: positional arguments of the module.
            **kwargs: keyword arguments of the module; with a ``loss_fn`` also ``target``, which goes to it alone.

        Returns:
            A `StepOutput`: the loss, and what the module returned besides where this rank has it. Without a ``loss_fn``
            and without a loss in the module's output: that output.

        Raises:
            RuntimeError: with micro-batches, rows are mixed, or random numbers are not drawn as in the first of them.
            TypeError: with a pipeline or micro-batches, the module's output has no loss.
        """
        if self.engine is not None:
            loss = self.engine(*args, **kwargs)
            assert self.engine.losses is not None
            return StepOutput(loss, self.engine.losses)
        with autocast(self.plan):
            target = [kwargs.pop("target")] if self.loss_fn is not None and "target" in kwargs else []
            output = self.ddp(*args, **kwargs)
            found = loss_in(output) if self.loss_fn is None else self.loss_fn(output, *target)
        return output if found is None else StepOutput(found, found.detach()[None], output)

    @torch.no_grad()
    def outputs(
        self, *args: Any, select: Callable[[Any], Tensor] | None = None, gather: bool = False, **kwargs: Any
    ) -> Tensor:
        """Run this rank's part of the batch forward and return a tensor of the module's output, under every plan.

        Args:
            *args: positional arguments of the module.
            select: returns the tensor, of as many rows (dim 0) as the inputs; the output itself by default. In a
                pipeline it runs on every stage, and must use what the last one computes.
            gather: return the rows of all data-parallel ranks, in the order of the global batch.
            **kwargs: keyword arguments of the module.

        Returns:
            The rows, ``[num_rows, ...]``, without a gradient, equal on all stages and tensor-parallel ranks.

        Raises:
            TypeError: the output, or what ``select`` returns, is no tensor.

        Example:
            >>> logits = model.outputs(input_ids=tokens, select=lambda output: output.logits)    # doctest: +SKIP
        """
        if self.engine is not None:
            rows = self.engine.outputs(*args, select=select, **kwargs)
        else:
            with autocast(self.plan):
                output = self.ddp(*args, **kwargs)
                rows = output if select is None else select(output)
            if not isinstance(rows, Tensor):
                raise TypeError(
                    f"outputs: expected a tensor in the module's output, got {type(rows).__name__}; pass "
                    "select=lambda output: output.logits"
                )
        full = rows.full_tensor() if isinstance(rows, DTensor) else rows
        axis = self.ddp.data_axes.all
        if not gather or axis.size == 1 or axis.group is None:
            return full
        parts = full.new_empty((axis.size * full.shape[0], *full.shape[1:]))
        waits_of(axis.group).run("all-gather", dist.all_gather_into_tensor, parts, full.contiguous())
        return parts

    def local_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this data-parallel rank's slice of the global batch, on the plan's device.

        Args:
            batch: the model's arguments for the global batch, equal on every rank. Tensors are sliced along dim 0.

        Raises:
            ValueError: the batch does not divide by the data-parallel ranks, or into parts with equally many counted
                targets per row.
        """
        axis = self.ddp.data_axes.all
        parts = {"num_microbatches": self.plan.num_microbatches, "ep": self.plan.ep}
        local = slice_batch(batch, coord=axis.coord, dp=axis.size, **parts)
        return {
            name: value.to(self.plan.device) if isinstance(value, Tensor) else value for name, value in local.items()
        }

    @torch.no_grad()
    def global_loss(self, loss: Tensor) -> Tensor:
        """Return the mean of ``loss`` over the data-parallel ranks, detached: the loss of one process.

        A collective over the dp axis: every rank calls it. With ``Plan(exact=...)`` every rank has that loss already.
        """
        total = loss.detach().clone()
        axis = self.ddp.data_axes.all
        if axis.size > 1 and axis.group is not None and exact_num_blocks() is None:
            waits_of(axis.group).run("all-reduce", dist.all_reduce, total)
            total /= axis.size
        return total

    def no_sync(self) -> Any:
        """Return a context that accumulates gradients locally; see ``vescale.optim.DDP.no_sync``."""
        return self.ddp.no_sync()

    def unsharded(self) -> Any:
        """Return a context with full parameters (``zero=3``); see ``vescale.optim.DDP.unsharded``."""
        return self.ddp.unsharded()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""
        self.ddp.zero_grad(set_to_none)

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return the state dict of one process: full, plain tensors in host memory, the same on every rank.

        A collective: every rank calls it. ``vescale.save`` stores what ranks hold instead, see `sharded_state_dict`.

        Args:
            prefix: goes before each name.
            keep_vars: not supported; `named_parameters` has the parameters.

        Raises:
            ValueError: ``keep_vars`` is True.
        """
        if keep_vars:
            raise ValueError(
                "state_dict: expected keep_vars=False, since values are brought together from ranks, got True; take "
                "parameters from named_parameters()"
            )
        state = full_state(self.ddp, self.mesh["pp"], self._state_names)
        for name in [*state] if prefix else ():
            state[prefix + name] = state.pop(name)
        return state

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank's stages, of which each value is what this rank holds; no communication.

        Values are DTensors of tensor parallelism and, with ``zero=3``, shards (see ``vescale.optim.DDP.state_dict``).
        """
        return self.ddp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state dict of one process, or what `sharded_state_dict` returned, in place.

        Raises:
            RuntimeError: ``strict``, and names are missing or unexpected.
            ValueError: ``assign`` is True, or a value has another shape.
        """
        if assign:
            raise ValueError(
                "load_state_dict: expected assign=False, since parameters lie in flat buffers, got True; load in place"
            )
        return load_state(self.ddp, state_dict, self._state_names, strict=strict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's named parameters, under the module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the module's named buffers, under the module's names."""
        return self.module.named_buffers(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the plan's first line, for ``print(model)``."""
        return str(self.plan).splitlines()[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "ddp":
                raise
            return getattr(self.module, name)

    def _apply(self, fn: Any, recurse: bool = True) -> "ParallelModel":  # noqa: ARG002 - torch's signature
        raise RuntimeError(
            "expected device and dtype to be final, got a conversion of a parallel model, whose parameters lie in flat "
            "buffers; convert the model before parallelize"
        )


def autocast(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a plan runs forward."""
    if plan.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(plan.device, dtype=getattr(torch, plan.autocast))
