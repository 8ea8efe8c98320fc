"""What a rank holds with ZeRO 3, by adding up the memory of all tensors."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import held_bytes, run_ranks, settled_bytes

WIDTH, NUM_BLOCKS = 64, 8


class Block(nn.Module):
    """The largest unit."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks, and a small root unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def num_bytes(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


def measure(zero, **settings):
    """Return the bytes held between steps, after forward, and the largest in forward and in backward."""
    gc.collect()
    before = held_bytes()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(Net(), mesh["dp"], zero=zero, per_rank=True, **settings)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    peaks = {"forward": 0, "backward": 0}

    def note(when):
        peaks[when] = max(peaks[when], held_bytes() - before)

    for layer in model.layers:
        layer.down.register_forward_hook(lambda _m, _a, out: (note("forward"), out.register_hook(see))[0])

    def see(_grad):
        note("backward")

    for _ in range(2):
        loss = model(torch.ones(2, WIDTH)).sum()
        after_forward = settled_bytes() - before
        loss.backward()
        del loss
        after_backward = settled_bytes() - before
        optimizer.step()
        optimizer.zero_grad()
    after = settled_bytes() - before
    return {**peaks, "after forward": after_forward, "after backward": after_backward, "after": after}


def test_memory_is_that_of_the_formula():
    total, unit, root = num_bytes(Net()), num_bytes(Block()), num_bytes(Net().head)
    small = 16 * 2**10  # activations, masks and counters of this test: measured, far below a unit
    assert small < unit / 4
    for size in (2, 4):
        share = 2 * total / size  # parameters and gradients
        expected = {
            "after": share,
            "after forward": share + root,
            "after backward": share,
            "forward": share + root + 2 * unit,
        }
        for record in run_ranks(measure, size, 3):
            for when, formula in expected.items():
                assert abs(record[when] - formula) < 0.02 * formula + small, (size, when, record[when], formula)
            # Besides parameters there are gradients: what autograd made, its bucket, and buckets on their way.
            assert share + root + unit < record["backward"] < 1.02 * share + 2 * (root + 2 * unit) + 2 * unit + small
    kept = run_ranks(measure, 2, 3, reshard_after_forward=False)[0]
    assert kept["after forward"] > 2 * total / 2 + 0.98 * total
    assert kept["after backward"] < 1.02 * total + small
    assert run_ranks(measure, 2, 2)[0]["after"] > 1.49 * total  # what ZeRO 2 keeps
