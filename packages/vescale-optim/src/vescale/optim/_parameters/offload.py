"""Shards in host memory (offload), and their copies to and from the compute device.

    home of values     (host)   --copy--> its position in the buffer (device) --all-gather--> full parameters
    home of gradients  (host)  <--copy--  mean of the reduced shard (device), which is freed then
    optimizer          (host)   state, masters and steps are where the shards are

The shard is copied to its position in the buffer that the all-gather fills. So the device never holds a separate shard,
and between uses it holds nothing of a unit. A mean that is added to a reduced gradient is added on the host.

On an accelerator homes are pinned memory. Copies are asynchronous, on one stream per direction, ordered after the work
launched so far on the current stream. So the copy of the next unit and its all-gather overlap with the computation of
this one.

    a read or write by        waits for
    device: full parameters   the all-gather, which follows the copy on its stream; with one rank the copy
    host: gradients           all copies to the host, at the end of each backward that reduces
    host: writes to values    all copies to the device, before a step or a load

On a CPU both sides are host memory, and nothing else differs: homes are separate tensors, and every copy is made.

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), section 4.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vescale.dtensor import is_deferred

from .. import _torch

__all__ = ["Awaitable", "HostMemory", "check_offload"]


class Awaitable(Protocol):
    """Work in flight on the device."""

    def wait(self) -> None:
        """Wait for it: on the CPU the process, on an accelerator its current stream."""


class HostMemory:
    """Host memory for the shards of one device, and the copies in both directions.

    Args:
        device: The compute device.
    """

    def __init__(self, device: torch.device):
        self._is_pinned = device.type != "cpu"
        self._to_device = _CopyStream(device)
        self._to_host = _CopyStream(device)

    def home_of(self, shard: Tensor) -> Tensor:
        """Return a new tensor in host memory with the values of a tensor on the device."""
        home = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=self._is_pinned)
        return home.copy_(shard)

    def bring(self, target: Tensor, home: Tensor, then: Callable[[], Awaitable | None]) -> Awaitable | None:
        """Start copying ``home`` to ``target`` on the device, then call ``then`` on the same stream.

        Returns what to wait for: the work that ``then`` has launched, or else the copy. None if nothing is in flight.
        Write to ``home`` only after `wait_before_writing`.
        """
        with self._to_device.is_current():
            target.copy_(home, non_blocking=True)
            return then() or self._to_device.mark()

    def keep(self, home: Tensor, value: Tensor) -> None:
        """Start copying ``value`` from the device to ``home``. Read ``home`` only after `wait_before_reading`."""
        with self._to_host.is_current():
            home.copy_(value, non_blocking=True)
            self._to_host.holds(value)

    def wait_before_reading(self) -> None:
        """Wait for all copies to the host."""
        self._to_host.synchronize()

    def wait_before_writing(self) -> None:
        """Wait for all copies to the device."""
        self._to_device.synchronize()


class _CopyStream:
    """A stream for copies. A CPU has no streams; there, copies are synchronous."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    @contextlib.contextmanager
    def is_current(self) -> Iterator[None]:
        """Launch on this stream, ordered after the work launched so far on the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def holds(self, tensor: Tensor) -> None:
        """Prevent reuse of a tensor's memory before this stream has reached this point."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def mark(self) -> Awaitable | None:
        """Return this point of the stream, for other streams to wait for; None on a CPU."""
        return None if self._stream is None else _Mark(self._stream.record_event(), self._module, self._device)

    def synchronize(self) -> None:
        """Make the host wait for all work on this stream."""
        if self._stream is not None:
            self._stream.synchronize()


class _Mark:
    """A point in a stream."""

    def __init__(self, event: Any, module: Any, device: torch.device):
        self._event = event
        self._module = module
        self._device = device

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)


def check_offload(offload: object, zero: int, module: nn.Module, mesh: object) -> None:
    """Reject settings and modules that cannot be offloaded.

    Raises:
        ValueError: If ``offload`` is not a bool, the stage is not 3, or a parameter is not on a device of the mesh.
    """
    if not isinstance(offload, bool):
        raise ValueError(f"offload must be True (shards are kept in host memory) or False, got {offload!r}")
    if not offload:
        return
    if zero != 3:
        raise ValueError(
            "offload=True keeps shards of parameters, gradients and state in host memory between uses, which needs "
            f"zero=3, got zero={zero}"
        )
    expected = getattr(mesh, "device_type", None)
    if expected is None or is_deferred(module):
        return
    for fqn, param in module.named_parameters():
        device = _torch.local_tensor(param).device
        if device.type not in (expected, "meta"):
            raise ValueError(
                f"expected every parameter on a device of type {expected!r}, as the mesh given to DDP, but {fqn!r} is "
                f"on {device}; call module.to({expected!r}) before DDP, or construct the module by "
                "vescale.dtensor.deferred_init. offload=True moves shards to the host itself"
            )
