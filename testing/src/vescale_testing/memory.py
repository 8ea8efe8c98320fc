"""How much memory the tensors of a process hold."""

import contextlib
import gc

import torch

__all__ = ["held_bytes"]


def held_bytes() -> int:
    """Return the bytes of the memory behind all tensors that Python knows of; what several share counts once.

    Memory that only autograd keeps, such as activations, does not count.
    """
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            storage = each.untyped_storage()
            with contextlib.suppress(RuntimeError):  # a tensor subclass that has no memory itself
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
