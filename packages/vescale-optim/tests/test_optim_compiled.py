"""Modules given to ``torch.compile`` are compiled where nothing draws, and draw their part of the batch where something
does.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.rate = rate

    def forward(self, x):
        return x + F.dropout(torch.tanh(self.linear(x)), self.rate, self.training)


def build(rate, kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(Block(rate), Block(rate)).double()


class Repeated(nn.Sequential):
    """Runs its first block again in backward."""

    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=False))


class Backend:
    """Counts the graphs that it is given."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, _inputs):
        self.num_graphs += 1
        return graph.forward

    def whole(self, module):
        return torch.compile(module, backend=self)

    def parts(self, module):
        for name, part in list(module.named_children()):
            setattr(module, name, torch.compile(part, backend=self))
        return module

    def calls(self, module):
        for part in module:
            part.compile(backend=self)
        return module


def train(call, optimizer, take=lambda x: x):
    torch.manual_seed(3)
    outs = []
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        out = call(take(x))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outs.append(out.detach())
    return outs


def errors(rate, zero, compiled=lambda module: module, around=lambda model: model, kind=nn.Sequential):
    """Return by how much the outputs of four steps differ from those of one process."""
    torch._dynamo.reset()
    module = build(rate, kind)
    expected = train(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model = DDP(compiled(build(rate, kind)), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=zero)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    outs = train(around(model), optimizer, lambda x: x.chunk(2)[dist.get_rank()])
    return [(out - all_.chunk(2)[dist.get_rank()]).abs().max() for out, all_ in zip(outs, expected, strict=True)]


@ranks(2, timeout=180)
def test_what_draws_nothing_is_compiled():
    for zero in (0, 1, 3):
        assert max(errors(0.0, zero, (backend := Backend()).whole)) < 1e-14
        assert backend.num_graphs >= 1
        assert max(errors(0.0, zero, (backend := Backend()).parts)) < 1e-14
        assert backend.num_graphs == 2


@ranks(2, timeout=180)
def test_what_draws_draws_its_part():
    for zero in (0, 1, 3):
        for way in (Backend.whole, Backend.parts, Backend.calls):
            backend = Backend()
            assert max(errors(0.5, zero, lambda module, backend=backend, way=way: way(backend, module))) < 1e-14
            assert backend.num_graphs == 0
            repeated = errors(0.5, zero, lambda module, backend=backend, way=way: way(backend, module), kind=Repeated)
            assert max(repeated) < 1e-14
        assert max(errors(0.5, zero, around=Backend().whole)) < 1e-14


@ranks(2, timeout=180)
def test_a_compiler_that_draws_unseen_is_seen(fault):
    patch = pytest.MonkeyPatch()
    fault(patch, "whether a module draws", lambda _draws: lambda *_: False)
    with pytest.raises(RuntimeError, match="or a module in it, drew random numbers"):
        errors(0.5, 0, Backend().whole)
    fault(patch, "the check for draws that were not watched", lambda _check: lambda *_: None)
    with pytest.raises(RuntimeError, match="rows are mixed, or drawn for, together"):  # in the recording
        errors(0.5, 0, Backend().whole)
