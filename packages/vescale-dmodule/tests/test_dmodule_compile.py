"""Compile mode: every block is one graph with its collectives, blocks share it, and a pass is that of one process."""

import copy
import logging

import pytest
import torch
import torch._dynamo  # before ranks are forked: it takes seconds
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm, self.index = nn.LayerNorm(6, dtype=torch.float64), index
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((6, 8), (8, 6)))

    def forward(self, x: Tensor, numbered: bool = False, positive: bool = False) -> Tensor:
        y = self.norm(x)
        if positive and x.sum() > 0:  # depends on data
            y = -y
        y = x + self.down(torch.tanh(self.up(y)))
        return y * (1 + self.index) if numbered else y


class Model(nn.Module):
    def __init__(self, num_blocks=2, recomputed=False):
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.recomputed = nn.ModuleList(map(Block, range(num_blocks))), recomputed

    def forward(self, x: Tensor, **options) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options) if self.recomputed else block(x, **options)
        return x


PLAN = {
    "parameter": {
        r".*up\.(weight|bias)": {"tp": Shard(0)},
        r".*down\.weight": {"tp": Shard(1)},
    },
    "forward": {
        r"blocks\.0\.input": [{"tp": Shard(1)}],
        r".*up\.input": [{"tp": Replicate()}],
        r".*down\.output": [{"tp": Shard(1)}],
        r"output": [{"tp": Replicate()}],
    },
}


def run(model, size=5, **options):
    """Output and gradients of a pass."""
    x = torch.randn(2, size, 6, generator=torch.Generator().manual_seed(size), dtype=torch.float64).requires_grad_()
    y = model(x, **options)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return [y.detach(), x.grad, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads.values())]


def close(actual, expected):
    pairs = zip(actual, expected, strict=True)
    return all((new - old).abs().max() <= 1e-10 * old.abs().max() for new, old in pairs)


def parallel(**options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Model(**options), mesh, PLAN, mode="compile")


@ranks(2, timeout=240)
def test_blocks_of_any_kind(graphs):
    model, single = parallel(), Model()
    assert close(run(model), run(single))
    assert len(graphs.forward) == 1

    # other shapes and no gradients
    assert close(run(model, size=8), run(single, size=8))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(torch.ones(2, 4, 6).double()), single(torch.ones(2, 4, 6).double()))

    # modes at run time
    for mode in ("static", "eager", "compile"):
        set_mode(model, mode)
        assert close(run(model), run(single)), mode

    # a copy is a model of its own
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.blocks[0].down.weight.mul_(2)
    assert close(run(other), run(single))
    assert not close(run(model), run(single))
    model = other

    # hooks that come later inside of a block
    without = run(single)
    for module in (model, single):
        module.blocks[1].down.register_forward_hook(lambda _module, _args, output: 2 * output)
    assert close(run(model), run(single))
    assert not close(run(model), without)


@pytest.mark.thorough
@ranks(2, timeout=240)
def test_more_blocks_than_one_cache_holds(graphs):
    with torch._dynamo.config.patch(recompile_limit=1):
        many = {"num_blocks": 2}
        assert close(run(parallel(**many), numbered=True), run(Model(**many), numbered=True))
        assert len(graphs.forward) == 2  # each reads its own number
        assert close(run(parallel(**many)), run(Model(**many)))
        assert len(graphs.forward) == 3


@ranks(2, timeout=240)
def test_recomputed_blocks(graphs):
    graphs.differentiates = True
    assert close(run(parallel(recomputed=True)), run(Model(recomputed=True)))
    assert len(graphs.forward) == len(graphs.backward) == 1


@pytest.mark.thorough
@ranks(2, timeout=240)
def test_generated_kernels():
    with torch._inductor.config.patch(compile_threads=1):
        assert close(run(parallel()), run(Model()))


@ranks(2, timeout=240)
def test_what_a_compiler_refuses_stays_static(graphs, caplog):
    with caplog.at_level(logging.WARNING, logger="vescale.dmodule"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {**PLAN, "forward": {k: v for k, v in PLAN["forward"].items() if k != r"blocks\.0\.input"}}
        plan["forward"] |= {r".*down\.output": [{"tp": Replicate()}]}
        model = parallelize_module(Model(), mesh, plan, mode="compile")
        assert close(run(model, positive=True), run(Model(), positive=True))
    assert not graphs.forward
    assert "block 'blocks.0' is not compiled and stays in static mode: " in caplog.text


# ------------------------------------------------------------------------------------------------ random operators


class Noisy(nn.Module):
    """A block with two random operators on sharded tensors, and one on a replicated tensor."""

    def __init__(self, first, second):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.first, self.second = first(), second()
        self.noise = Bernoulli()

    def forward(self, x):  # of local shape (2, 3, 6), as the second draw
        y = self.up(self.first(x))
        start = self.second(y[:, :3])
        return x + self.noise(self.down(torch.cat([start, y[:, 3:]], 1)))


class Bernoulli(nn.Module):
    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x, 0.5))


NOISY = {
    "parameter": {r".*up\.(weight|bias)": {"tp": Shard(0)}, r".*down\.weight": {"tp": Shard(1)}},
    "forward": {
        r"0\.first\.input": [{"tp": Shard(1)}],
        r".*up\.input": [{"tp": Replicate()}],
        r".*down\.output": [{"tp": Replicate()}],
        "output": [{"tp": Replicate()}],
    },
}


def half():
    return nn.Dropout(0.5)


def noisy_step(model):
    """Output, gradients and the state of the generator after a pass."""
    torch.manual_seed(11)
    x = torch.ones(2, 6, 6, dtype=torch.float64)
    y = model(x)
    y.square().sum().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), *grads, torch.get_rng_state().double()]


@ranks(2, timeout=240)
def test_random_operators(graphs, caplog):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def made(*kinds):
        torch.manual_seed(0)
        return nn.Sequential(Noisy(*kinds)).double()

    for kinds, reason in (
        ((nn.Identity, half), None),
        ((half, nn.Identity), None),
        ((half, half), "dropout of local shape (2, 3, 6) has two layouts"),
        (
            (nn.Identity, Bernoulli),
            "only dropout can be compiled on sharded tensors, not torch.bernoulli on (2, 3, 12)",
        ),
    ):
        graphs.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="vescale.dmodule"):
            expected = noisy_step(made(*kinds))
            model = parallelize_module(made(*kinds), mesh, NOISY, mode="compile")
            assert close(noisy_step(model), expected), kinds
        assert bool(graphs.forward) == (reason is None)
        stays = f"block '0' is not compiled and stays in static mode: {reason}"
        assert (stays in caplog.text) == (reason is not None), caplog.text
        with disabled("random"):  # each rank draws for itself
            assert not close(noisy_step(parallelize_module(made(*kinds), mesh, NOISY)), expected)
