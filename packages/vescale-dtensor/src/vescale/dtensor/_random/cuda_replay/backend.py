"""The interface of a device for the replay: its geometry, its generator and its native operators.

The rest of this sub-package runs on any backend, a simulated one in tests included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._torch.dispatch import Op
from .geometry import Grid

__all__ = ["CUDA", "Backend", "PhiloxGenerator"]

aten = torch.ops.aten


class PhiloxGenerator(Protocol):
    """The part of ``torch.Generator`` that a generator of a CUDA device has."""

    def initial_seed(self) -> int:
        """Return the seed."""

    def get_offset(self) -> int:
        """Return the number of words consumed, a multiple of 4."""

    def set_offset(self, offset: int) -> object:
        """Set the number of words consumed."""


class Backend(Protocol):
    """A device that draws with Philox in grid-stride loops."""

    def serves(self, device: torch.device) -> bool:
        """Return whether this backend draws tensors of ``device``."""

    def name(self, device: torch.device) -> str:
        """Return the model of the device."""

    def grid(self, device: torch.device) -> Grid:
        """Return the launch geometry."""

    def generator(self, device: torch.device, generator: torch.Generator | None) -> PhiloxGenerator | None:
        """Return the generator that an operator on ``device`` uses when it is given ``generator``; None: it raises."""

    def is_capturing(self) -> bool:
        """Return whether launches are captured into a graph; generators cannot be read or set then."""

    def fill(
        self,
        op: Op,
        tensor: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        generator: PhiloxGenerator,
    ) -> None:
        """Run an in-place operator."""

    def dropout(self, tensor: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """Run ``native_dropout`` in training, with the default generator."""

    def bernoulli(self, out: Tensor, p: Tensor, generator: PhiloxGenerator) -> None:
        """Fill ``out`` by ``bernoulli_`` with the probabilities ``p``."""


class _Cuda:
    """The CUDA devices of this process."""

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.is_initialized()

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def grid(self, device: torch.device) -> Grid:
        properties = torch.cuda.get_device_properties(device)
        return Grid(properties.multi_processor_count, properties.max_threads_per_multi_processor)

    def generator(self, device: torch.device, generator: torch.Generator | None) -> torch.Generator | None:
        index = torch.cuda.current_device() if device.index is None else device.index
        if generator is None:
            return torch.cuda.default_generators[index]
        return generator if generator.device == torch.device("cuda", index) else None

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def fill(self, op, tensor, args, kwargs, generator) -> None:
        op(tensor, *args, generator=generator, **kwargs)

    def dropout(self, tensor: Tensor, p: float) -> tuple[Tensor, Tensor]:
        return aten.native_dropout.default(tensor, p, True)

    def bernoulli(self, out: Tensor, p: Tensor, generator: torch.Generator) -> None:
        aten.bernoulli_.Tensor(out, p, generator=generator)


CUDA: Backend = _Cuda()
