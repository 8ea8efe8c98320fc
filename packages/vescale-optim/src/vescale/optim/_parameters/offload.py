"""Shards in host memory (offload), and their copies to and from the compute device.

    home of values     (host)   --copy--> own place in the whole buffer (device) --all-gather--> whole parameters
    home of gradients  (host)  <--copy--  mean of the reduced shard (device), which is freed then
    optimizer          (host)   state, masters and steps are where the shards are

The shard is copied to its own place in the buffer that the all-gather fills, so the device never holds a shard by
itself: between uses it holds nothing of a unit. A mean that is added to a reduced gradient is added on the host.

On an accelerator homes are pinned and copies asynchronous, on one stream per direction, behind what had been launched
on the current stream: so the copy of the next unit, and its gather, run beside the computation of this one.

    a read or write by        waits for
    device: full parameters   the all-gather, which follows the copy on its stream; with one rank the copy
    host: gradients           all copies to the host, at the end of each backward that reduces
    host: writes to values    all copies to the device, before a step or a load

On a CPU both sides are the same memory, but nothing else differs: homes are tensors of their own, every copy is made.

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
    """The host memory in which shards of one device are at home.

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
        """Start copying ``home`` to ``target``, on the device, and what is to follow; return what to wait for.

        Write to ``home`` only after `wait_before_writing`.
        """
        with self._to_device.is_current():
            target.copy_(home, non_blocking=True)
            return then() or self._to_device.mark()

    def keep(self, home: Tensor, value: Tensor) -> None:
        """Start copying ``value``, from the device, to ``home``, whose values are there after `wait_before_reading`."""
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
    """A stream of copies beside the current one; on a CPU, which has none, copies are made at once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    @contextlib.contextmanager
    def is_current(self) -> Iterator[None]:
        """Launch on this stream, behind what has been launched on the current one so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def holds(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor from being used for another until this stream has come to here."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def mark(self) -> Awaitable | None:
        """Return what has been launched here, for other streams to wait for."""
        return None if self._stream is None else _Mark(self._stream.record_event(), self._module, self._device)

    def synchronize(self) -> None:
        """Let the host wait for everything that has been launched here."""
        if self._stream is not None:
            self._stream.synchronize()


class _Mark:
    """A place in a stream."""

    def __init__(self, event: Any, module: Any, device: torch.device):
        self._event = event
        self._module = module
        self._device = device

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)


def check_offload(offload: object, zero: int, module: nn.Module, mesh: object) -> None:
    """Refuse what cannot be offloaded.

    Raises:
        ValueError: If ``offload`` is no bool, or is given with another stage than 3, which keeps whole parameters on
            the device; or if a parameter is elsewhere than on the devices of the mesh.
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
                f"{fqn!r} is on {device}, and the mesh given to DDP is of devices of type {expected!r}, which compute; "
                f"offload=True brings shards to the host by itself: move the module before (module.to({expected!r})), "
                "or construct it by vescale.dtensor.deferred_init: each rank then makes its share there"
            )
