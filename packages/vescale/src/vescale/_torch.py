"""The only file of this package with private names of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["RankWorld", "groups_by_thread", "unseen", "use_world"]


# Any: names that are assigned, or have no type
_C10D: Any = distributed_c10d
_NAMES: Any = _c10d


class RankWorld(distributed_c10d._World):
    """The process groups of one rank, where several ranks live in one process."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, Any] = {}
        self._count = 0

    pg_map = property(lambda self: self._maps.setdefault("pg_map", {}))
    pg_names = property(lambda self: self._maps.setdefault("pg_names", {}))
    pg_group_ranks = property(lambda self: self._maps.setdefault("pg_group_ranks", {}))
    pg_backend_config = property(lambda self: self._maps.setdefault("pg_backend_config", {}))
    tags_to_pg = property(lambda self: self._maps.setdefault("tags_to_pg", {}))
    pg_to_tag = property(lambda self: self._maps.setdefault("pg_to_tag", {}))

    @property
    def group_count(self) -> int:
        """The number of groups that were named by counting."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


def use_world(world: object) -> object:
    """Let torch.distributed use the groups of ``world`` from now on; return what it used before."""
    before: object = _C10D._world
    _C10D._world = world
    return before


@contextlib.contextmanager
def groups_by_thread(gloo: type[dist.ProcessGroup], store: dist.Store) -> Iterator[None]:
    """Let threads be ranks: each has its own names of groups, and finds the others by ``store``.

    Groups of the backend "gloo" are instances of ``gloo``. Ranks have the numbers of torchrun's environment variables.
    """

    def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    stock = _C10D.ProcessGroupGloo, _C10D.rendezvous
    _NAMES._set_thread_isolation_mode(True)
    _C10D.ProcessGroupGloo, _C10D.rendezvous = gloo, rendezvous
    try:
        yield
    finally:
        _C10D.ProcessGroupGloo, _C10D.rendezvous = stock
        _NAMES._set_thread_isolation_mode(False)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hide what runs from autograd, and from the function modes and dispatch modes of torch that are active."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
