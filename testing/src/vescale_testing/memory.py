"""The memory of all live tensors of a process."""

import contextlib
import gc
import time

import torch

__all__ = ["held_bytes", "settled_bytes"]


def held_bytes() -> int:
    """Return the bytes of all live tensors of this process; shared memory is counted once.

    Memory that only autograd keeps, such as activations, does not count.
    """
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # sparse, or a subclass that has no memory itself
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled_bytes() -> int:
    """Return `held_bytes` once it is stable: a gloo thread may hold the tensors of the last collective for a moment."""
    found = []
    for _ in range(5):
        time.sleep(0.02)
        gc.collect()
        found.append(held_bytes())
    return min(found)
