"""Asynchronous tensor parallelism: compiled blocks compute while they communicate, in pieces.

A column parallel layer needs the gathered input, and a row parallel one reduces and scatters its output. Torch's
compiler can make one operator of the collective and the matrix product: it cuts both in one piece per rank and moves a
piece through memory that the devices share while it multiplies another::

    gather | multiply              piece 0 multiply | piece 1 multiply | ...
                         ->        piece 1 gather   | piece 2 gather   | ...

The compiler finds these pairs by the operators between the two. Along the first dim there are none; along others it
looks for chunks that are joined. So, where this is on, that is what conversions are made of while a compiler looks
(else one copy through a permuted view, which is less for a processor to launch). Values are the same.

It serves boundaries that gather or scatter (sequence parallelism), and layers without a bias. Sums of ranks are added
up in another order than without. It is off unless it is switched on, in all ranks alike: torch offers it on CUDA
devices of one host that reach each other's memory, by private names.

Source: "Introducing Async Tensor Parallelism in PyTorch" (PyTorch developers' forum, 2024).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch

__all__ = ["check", "compiler_options", "is_on", "prepare"]

ENABLED = False  # read when conversions are made and when blocks are compiled, so set before the first call


def is_on() -> bool:
    """Tell whether compiled blocks shall do this."""
    return ENABLED


def prepare(group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Let compiled blocks share memory with the ranks of a group that conversions go over."""
    if ENABLED and _torch.async_tp_obstacle(mesh.device_type) is None:
        _torch.share_memory(group)


def compiler_options() -> dict[str, object]:
    """Return the options of ``torch.compile`` for it."""
    return _torch.ASYNC_TP_OPTIONS if ENABLED else {}


def check(mesh: DeviceMesh) -> None:
    """Refuse what cannot be done, before anything communicates.

    Raises:
        RuntimeError: it is on, and torch does not offer it on the devices of the mesh.
    """
    obstacle = _torch.async_tp_obstacle(mesh.device_type) if ENABLED else None
    if obstacle is not None:
        raise RuntimeError(
            f"asynchronous tensor parallelism was switched on, but {obstacle}; switch it off, compiled blocks then "
            "wait for each collective"
        )
