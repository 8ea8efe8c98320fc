"""The store by which emulated ranks find each other: a dict, where a wait for a key lets other ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .turns import current_rank

__all__ = ["EmulatedStore"]


class EmulatedStore(dist.Store):
    """A store of all ranks of one process. Its methods have the names of any store's, and those that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        if all(key in self._values for key in keys):
            return True
        current_rank().pause()  # who asks asks again
        return False

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        expected = expected.encode() if isinstance(expected, str) else bytes(expected)
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self.set(key, desired)
        return self._values.get(key, expected)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  (time stands still)
        current_rank().wait(
            lambda: all(key in self._values for key in keys), lambda: f"the keys {list(keys)} of the store"
        )

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def has_extended_api(self) -> bool:
        return True

    compareSet = compare_set  # noqa: N815
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
    multiGet = multi_get  # noqa: N815
    multiSet = multi_set  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815
