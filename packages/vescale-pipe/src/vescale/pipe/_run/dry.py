"""Dry runs: one process runs the part of one rank in a pipeline whose other ranks do not exist.

On a process group of torch's backend "fake" nothing is sent, and zeros arrive. So no other rank tells what its calls
return. A twin does: a copy of the whole model, which runs all stages on this rank and records the program::

    rank 5 of 64    the units of its stages    all micro-batches, by the schedule
    its twin        all units                  one micro-batch of each signature

The twin of a model with tensors on the meta device has no data (its tensors are fake ones), and costs no memory. That
of another model shares the data of its parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._stages.shadow import emptied, shadow_of
from .._torch import fake_tensors
from .generators import Generators
from .microbatch import Inputs
from .tree import map_leaves
from .values import PipelineError


class Engine(Protocol):
    """An engine that runs all stages of its model."""

    model: nn.Module


AnEngine = TypeVar("AnEngine", bound=Engine)


class Twin(Generic[AnEngine]):
    """Records programs for a dry run.

    Args:
        model: the whole model, which is copied.
        device_type: of the pipeline.
        engine_of: makes an engine of the copy over a mesh of one rank.
    """

    def __init__(
        self, model: nn.Module, device_type: str, engine_of: Callable[[nn.Module, DeviceMesh], AnEngine]
    ) -> None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._mode = fake_tensors() if any(tensor.is_meta for tensor in tensors) else None
        alone = DeviceMesh(device_type, [dist.get_rank()], mesh_dim_names=("pp",))
        self._engine = engine_of(shadow_of(model, self._mode), alone)

    def run(self, call: Callable[..., Any], inputs: Inputs, *, model: nn.Module, generators: Generators) -> AnEngine:
        """Run a micro-batch, and return the engine, which has recorded it.

        Args:
            call: a method of an engine.
            inputs: positional and keyword arguments.
            model: the part of this rank.
            generators: those of this process; they stay where they are.

        Raises:
            PipelineError: the model cannot run without data, or has changed since it was copied.
        """
        self._check_same(model)
        args, kwargs = inputs if self._mode is None else map_leaves(self._emptied, inputs)
        if self._engine.model.training != model.training:
            self._engine.model.train(model.training)
        before = generators.read()
        try:
            call(self._engine, *args, **kwargs)
        except Exception as error:
            if self._mode is None or isinstance(error, PipelineError):
                raise
            raise PipelineError(
                "dry run: expected a model that runs without data, since some of it is on the meta device, got "
                f"{type(error).__name__}: {error}; give it data before the engine is made: "
                "model.to_empty(device='cpu'), and zeros for its parameters"
            ) from error
        finally:
            generators.write(before)
        return self._engine

    def _check_same(self, model: nn.Module) -> None:
        known = dict(self._engine.model.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            before, now = _form_of(known[name]), _form_of(parameter)
            if before != now:
                raise PipelineError(
                    f"dry run: expected parameter `{name}` as it was when the engine was made, {before}, got {now}; "
                    "make the engine last, after parallelize_module for instance"
                )

    def _emptied(self, leaf: Any) -> Any:
        assert self._mode is not None
        return emptied(leaf, self._mode)


def _form_of(parameter: nn.Parameter) -> str:
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    return f"{parameter.dtype}" + (f" with placements {placements}" if placements else "")
