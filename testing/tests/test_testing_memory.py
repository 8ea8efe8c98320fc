"""The memory of a process's tensors is counted once, even if several tensors share it."""

import gc

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_testing import held_bytes, ranks


def test_views_share_and_freed_storages_hold_nothing():
    gc.collect()
    before = held_bytes()
    whole = torch.empty(1000, dtype=torch.float64)
    views = [whole[:10], whole.view(10, 100)]
    assert held_bytes() - before == 8000
    copy = views[0].clone()
    assert held_bytes() - before == 8080
    whole.untyped_storage().resize_(0)
    assert held_bytes() - before == 80
    del copy
    assert held_bytes() == before


@ranks(1)
def test_a_wrapper_has_the_memory_of_what_it_wraps():
    mesh = init_device_mesh("cpu", (1,))
    gc.collect()
    before = held_bytes()
    wrapped = DTensor.from_local(torch.empty(1000), mesh, [Replicate()])
    assert held_bytes() - before == 4000
    assert wrapped.shape == (1000,)
