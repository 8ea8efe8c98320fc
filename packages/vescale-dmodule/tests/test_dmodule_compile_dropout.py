"""Dropout in compiled blocks draws what one device draws where a call is a part of a larger batch, in both streams."""

import contextlib
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.dmodule import NotLocalFriendlyError, parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, extension, init_device_mesh, random
from vescale_testing import ranks

PLAN = {
    "parameter": {r".*up\.weight": {"tp": Shard(0)}, r".*down\.weight": {"tp": Shard(1)}},
    "forward": {r".*up\.input": [{"tp": Replicate()}], r".*down\.output": [{"tp": Replicate()}]},
}


class Block(nn.Module):
    """Drops a sharded and a replicated tensor. All values are small integers: no order of additions changes a bit."""

    def __init__(self, noise):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False), nn.Dropout(0.5)
        self.noise = noise
        nn.init.ones_(self.up.weight), nn.init.ones_(self.down.weight)

    def forward(self, x):
        y = self.drop(self.down(functional.dropout(self.up(x), 0.5, self.training)))
        return x + (y + self.noise(y))


class Model(nn.Module):
    """Blocks, and dropout after them."""

    def __init__(self, noise=torch.zeros_like):
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(Block(noise) for _ in range(2)), nn.Dropout(0.5)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.drop(x)


def in_parts(model, num_parts, stream):
    """Return the outputs of two batches that run in parts, the gradient of the first weight, and the random state."""
    torch.manual_seed(7)
    x, outputs = torch.ones(2, 4, 3, 4, dtype=torch.float64, requires_grad=True), []
    with random.stream(stream, seed=3) if stream == "philox" else contextlib.nullcontext():
        for batch in x:
            with random.micro_batches(num_parts) as micro_batch:
                for index, rows in enumerate(batch.chunk(num_parts)):
                    with micro_batch(index):
                        outputs.append(model(rows))
            torch.cat(outputs[-num_parts:]).sum().backward()
        state = torch.get_rng_state()
    gradient = model.blocks[0].up.weight.grad
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return torch.cat(outputs).detach(), gradient, state


def parallel(noise=torch.zeros_like):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Model(noise), mesh, PLAN, mode="compile")


def equal(actual, expected):
    return all(map(torch.equal, actual, expected))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def round_noise(y):
    return torch.rand_like(y).round()


@ranks(2, timeout=240)
def test_masks_are_those_of_one_device(graphs, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, logger="vescale.dmodule")
    for stream in ("torch", "philox"):
        graphs.clear()
        model, expected = parallel(), in_parts(Model(), 1, stream)
        assert equal(in_parts(model, 2, stream), expected), stream
        assert len(graphs.forward) == 1, "both blocks share one graph"
        assert sum("dropout_factors" in str(node.target) for node in graphs.forward[0].graph.nodes) == 2
        model.zero_grad()
        with monkeypatch.context() as without_the_part:
            without_the_part.setattr(extension, "watched", contextlib.nullcontext)
            assert not equal(in_parts(model, 2, stream), expected)
    assert "static mode" not in caplog.text


@ranks(2, timeout=240)
def test_a_block_that_is_the_whole_program(graphs):
    """Blocks that are compiled alone inside of a model in eager mode, and a model that is one block."""
    expected = in_parts(Model(), 1, "torch")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = set_mode(parallelize_module(Model(), mesh, PLAN), "compile", r"blocks\.\d+")
    assert equal(in_parts(model, 2, "torch"), expected)
    assert graphs.forward, "the second call of each block is compiled"

    alone, graphs.forward[:] = parallelize_module(Block(torch.zeros_like), mesh, PLAN, mode="compile"), []
    x, plain = torch.ones(4, 3, 4), Block(torch.zeros_like)
    for _ in range(3):
        torch.manual_seed(7)
        here = alone(x)
        torch.manual_seed(7)
        assert torch.equal(here, plain(x))
    assert graphs.forward


@ranks(2, timeout=240)
def test_other_draws(graphs, caplog):
    caplog.set_level(logging.WARNING, logger="vescale.dmodule")

    # an operator that no graph draws for a part of the batch
    model, expected = parallel(round_noise), in_parts(Model(round_noise), 1, "torch")
    assert equal(in_parts(model, 2, "torch"), expected)
    assert not graphs.forward
    reason = "only dropout can be compiled for a part of the batch, not torch.rand_like on (2, 3, 4) (Replicate(),)"
    assert f"block 'blocks.0' is not compiled and stays in static mode: {reason}" in caplog.text

    # another mode that watches operators
    model.zero_grad()
    with Watching():
        assert equal(in_parts(model, 2, "torch"), expected)
    assert "blocks of the root module run as in static mode while a TorchDispatchMode watches operators" in caplog.text

    # a rate that was 0 in the recording
    model = parallel()
    for block in model.blocks:
        block.drop.p = 0.0
    in_parts(model, 2, "torch")
    assert graphs.forward
    model.blocks[1].drop.p = 0.5
    with pytest.raises(NotLocalFriendlyError, match=r"'blocks\.1' runs compiled on a part .* and drew random"):
        in_parts(model, 2, "torch")


@pytest.mark.thorough
@ranks(2, timeout=240)
def test_generated_kernels():
    with torch._inductor.config.patch(compile_threads=1):
        assert equal(in_parts(parallel(), 2, "torch"), in_parts(Model(), 1, "torch"))
