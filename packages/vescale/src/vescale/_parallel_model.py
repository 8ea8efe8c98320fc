"""`ParallelModel`, the result of `parallelize`: the user's model behind one interface for every layout.

    out = model(**model.local_batch(batch))         with a pipeline, micro-batches or a loss_fn: a `StepOutput`
    out.loss.backward()                             otherwise: the module's own output

``state_dict``, ``named_parameters`` and attributes are those of the user's module.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import waits_of
from vescale.optim import DDP
from vescale.pipe import PipelineEngine
from vescale.plan import Plan

from ._batch import slice_batch

LossFn = Callable[..., Tensor]


@dataclass(frozen=True)
class StepOutput:
    """Output of a forward with micro-batches, a pipeline or a ``loss_fn``.

    Attributes:
        loss: mean over the rows of this rank's part of the batch, a 0-dim tensor equal on every stage;
            ``loss.backward()`` accumulates the gradients.
        losses: loss of each micro-batch as the model or ``loss_fn`` gave it, detached, ``[num_microbatches]``, equal on
            every stage.
    """

    loss: Tensor
    losses: Tensor


class ParallelModel(nn.Module):
    """Run a parallel model as if it were the plain one; built by `vescale.parallelize`.

    Attributes:
        plan: the plan it was built from.
        mesh: device mesh with the axes "pp", "dp" and "tp".
        module: the user's module, parallelized in place. With a pipeline, modules of other stages are stubs.
        engine: the pipeline engine; ``None`` if the plan needs none.
    """

    def __init__(
        self,
        ddp: DDP,
        *,
        plan: Plan,
        mesh: DeviceMesh,
        engine: PipelineEngine | None,
        loss_fn: LossFn | None = None,
    ) -> None:
        super().__init__()
        self.ddp = ddp
        self.plan = plan
        self.mesh = mesh
        self.engine = engine
        self.loss_fn = loss_fn

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
            The module's output. With a pipeline, micro-batches or a ``loss_fn``: a `StepOutput` with the loss.

        Raises:
            RuntimeError: with micro-batches, rows are mixed, or random numbers are not drawn as in the first of them.
        """
        if self.engine is not None:
            loss = self.engine(*args, **kwargs)
            assert self.engine.losses is not None
            return StepOutput(loss, self.engine.losses)
        if self.loss_fn is None:
            return self.ddp(*args, **kwargs)
        target = [kwargs.pop("target")] if "target" in kwargs else []
        loss = self.loss_fn(self.ddp(*args, **kwargs), *target)
        return StepOutput(loss, loss.detach()[None])

    def local_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this data-parallel rank's slice of the global batch, on the plan's device.

        Args:
            batch: the model's arguments for the global batch, equal on every rank. Tensors are sliced along dim 0.

        Raises:
            ValueError: the batch does not divide by ``dp``, or into parts with equally many counted targets per row.
        """
        axis = self.mesh["dp"]
        local = slice_batch(
            batch, coord=axis.get_local_rank(), dp=self.plan.dp, num_microbatches=self.plan.num_microbatches
        )
        return {
            name: value.to(self.plan.device) if isinstance(value, Tensor) else value for name, value in local.items()
        }

    @torch.no_grad()
    def global_loss(self, loss: Tensor) -> Tensor:
        """Return the mean of ``loss`` over the data-parallel ranks, detached: the loss of one process.

        A collective over the dp axis: every rank calls it.
        """
        total = loss.detach().clone()
        if self.plan.dp > 1:
            waits_of(self.mesh["dp"].get_group()).run("all-reduce", dist.all_reduce, total)
            total /= self.plan.dp
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

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state dict, under the module's names, for this rank's stage.

        With ``zero=3`` the values of parameters are this rank's shards, see ``vescale.optim.DDP.state_dict``.
        """
        return self.ddp.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict, in place."""
        return self.ddp.load_state_dict(dict(state_dict), strict=strict, assign=assign)

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
