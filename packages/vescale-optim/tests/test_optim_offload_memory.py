"""With offload a device holds nothing of a unit between its uses, and shards are where the optimizer updates them."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import RankFailure, held_bytes, ranks, run_ranks, settled_bytes

WIDTH, NUM_BLOCKS = 32, 6


class Block(nn.Module):
    """The largest unit; the second layer may be frozen."""

    def __init__(self, *, frozen):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH).requires_grad_(not frozen)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks, one partly frozen, and a small root unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(frozen=index == 1) for index in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def num_bytes(module, *, trained=False):
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad or not trained)


def wrapped(size, **settings):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = DDP(Net(), mesh["dp"], zero=3, per_rank=True, **settings)
    return model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)


def storages(tensors):
    """Return the bytes of the memory of tensors, by its address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def homes(model, optimizer):
    """Return the memory of shards of values, of gradients and of state."""
    values = storages(part for _, part in model._sharded.parts.values())
    grads = storages(slot.grad_part for slot in model.slots().values())
    state = storages(t for entries in optimizer.state.values() for t in entries.values() if t.numel() > 1)
    return values, grads, state


def on_device(model):
    """Return the bytes of everything that lies on the compute device for parameters and gradients."""
    values = [b for unit in model._sharded.units.all for b in unit.buckets]
    buffers = [bucket._values for bucket in values] + [bucket.grads for bucket in model._sharded.buckets]
    return sum(storages(buffers).values())


def check_memory(size, **settings):
    gc.collect()
    before = held_bytes()
    model, optimizer = wrapped(size, offload=True, **settings)
    unit, root = num_bytes(model.layers[0]), num_bytes(model.head)
    small = 8 * 2**10
    peak = 0

    def note(*_args):
        nonlocal peak
        peak = max(peak, on_device(model))

    for layer in model.layers:
        layer.down.register_forward_hook(note)
    for _ in range(2):
        assert on_device(model) == 0
        loss = model(torch.ones(2, WIDTH)).sum()
        assert root <= on_device(model) <= root + small  # which stays to the end of the backward
        loss.backward()
        del loss
        assert on_device(model) == 0
        optimizer.step()
        optimizer.zero_grad()
    assert root + 2 * unit <= peak <= root + 2 * unit + small
    found = homes(model, optimizer)
    total, trained = num_bytes(model.module), num_bytes(model.module, trained=True)
    for memory, expected in zip(found, (total, trained, 2 * trained), strict=True):
        assert abs(sum(memory.values()) - expected / size) < 0.02 * expected / size
    held = sum(sum(memory.values()) for memory in found)
    assert held <= settled_bytes() - before < held + small  # and nothing else


def test_a_device_holds_what_is_in_use_and_the_host_one_share_of_everything():
    for size in (1, 2):
        run_ranks(check_memory, size, size)
    with pytest.raises(RankFailure, match=r"on_device\(model\) <= root"):
        run_ranks(check_memory, 1, 1, reshard_after_forward=False)


def check_homes(model, optimizer):
    """Raise AssertionError if a home is in the memory of a whole buffer, or is not what the optimizer updates."""
    values, grads, _ = homes(model, optimizer)
    updated = storages(piece.tensor for piece in optimizer.pieces)
    assert updated.keys() <= values.keys()
    buffers = [bucket._values for bucket in model._sharded.units.all[0].buckets]
    with model.unsharded():
        assert not values.keys() & storages(buffers).keys()
    assert not values.keys() & grads.keys()
    assert all(bucket.grad_shard is None for bucket in model._sharded.buckets)


@ranks(2)
def test_homes_are_tensors_of_their_own():
    check_homes(*wrapped(2, offload=True))
    with pytest.raises(AssertionError):  # without offload gradients have a shard on the device
        check_homes(*wrapped(2))


@ranks(2)
def test_each_use_and_each_reduction_is_a_copy(monkeypatch, fault):
    copied = {"bring": 0, "keep": 0}

    def counted(name):
        def make(copy):
            def counting_copy(host, target, source, **then):
                copied[name] += target.nbytes
                assert target.data_ptr() != source.data_ptr()
                return copy(host, target, source, **then)

            return counting_copy

        return make

    fault(monkeypatch, "a shard is copied to the device", counted("bring"))
    fault(monkeypatch, "a gradient is copied to the host", counted("keep"))
    model, optimizer = wrapped(2, offload=True)
    values, grads, _ = (sum(memory.values()) for memory in homes(model, optimizer))
    root = sum(bucket.shard.nbytes for bucket in model._sharded.units.all[-1].buckets)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert copied["bring"] == 2 * values - root  # which stays from forward to backward
    assert copied["keep"] == grads
    model(torch.ones(2, WIDTH)).sum().backward()  # adds to a reduced gradient, on the host
    assert copied["keep"] == grads
    wrapped(2)[0](torch.ones(2, WIDTH)).sum().backward()
    assert copied["keep"] == grads
