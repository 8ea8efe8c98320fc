"""Dropout on a part of the batch draws its slice of the mask of the global batch, however the module is called."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale.dtensor import random
from vescale.optim import DDP
from vescale_testing import ranks, run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return nn.functional.dropout(self.drop(torch.tanh(self.lift(x))), 0.3, training=self.training)


class Net(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.first = Block()
        self.last = nn.Linear(6, 4)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute is None:
            return self.last(self.first(x))
        if self.recompute == "function":
            return self.last(self.own_code(x))
        repeated = self.own_code if "function" in self.recompute else self.first
        return self.last(checkpoint(repeated, x, use_reentrant="reentrant" in self.recompute))

    def own_code(self, x):
        return nn.functional.dropout(self.first(nn.functional.dropout(x, 0.2)), 0.4)


def build(recompute=None):
    torch.manual_seed(0)
    return Net(recompute).double()


def batch():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(call, module, x):
    torch.manual_seed(7)
    for _ in range(2):
        call(x).square().mean().backward()
    grads = {fqn: p.grad.clone() for fqn, p in module.named_parameters()}
    return grads, torch.get_rng_state()


def on_ranks(recompute, through):
    module = build(recompute)
    model = DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), bucket_bytes=100)
    x = batch().chunk(2)[dist.get_rank()].detach().requires_grad_()  # reentrant recomputation needs a gradient
    return gradients(model if through == "wrapper" else module, module, x)


def records_nothing(*_args, **_settings):
    return SimpleNamespace(covers_rows=False, attach=lambda: None)


def check(recompute, through):
    reference = build("function" if recompute and "function" in recompute else None)
    expected, state = gradients(reference, reference, batch())
    for grads, rank_state in run_ranks(on_ranks, 2, recompute, through):
        for fqn, grad in expected.items():
            torch.testing.assert_close(grads[fqn], grad, rtol=1e-12, atol=1e-14)
        assert torch.equal(rank_state, state)


@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_dropout(through):
    check(None, through)


@pytest.mark.parametrize("recompute", ["saved", "reentrant", "function, saved", "function, reentrant"])
def test_dropout_that_is_recomputed_in_backward(recompute):
    check(recompute, "wrapper")


def test_local_masks_are_seen(monkeypatch):
    monkeypatch.setattr(
        "vescale.optim.ddp.rows_program", lambda _module: records_nothing
    )  # so that no recording finds it
    monkeypatch.setattr("vescale.optim.ddp.attach_local_batch", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        check(None, "wrapper")


def test_masks_that_differ_in_the_recomputation_are_seen(monkeypatch):
    """Only hooks, or what a checkpoint remembers of its first run, reach the second forward, in backward."""

    def around_the_wrapper_only(module, meshes, **_):
        forward = module.forward

        def in_context(x):
            with random.local_batch(*meshes):
                return forward(x)

        module.forward = in_context

    monkeypatch.setattr("vescale.optim.ddp.rows_program", lambda _module: records_nothing)
    monkeypatch.setattr("vescale.optim.ddp.attach_local_batch", around_the_wrapper_only)
    check(None, "wrapper")
    check("saved", "wrapper")
    monkeypatch.setattr("vescale.dtensor._torch.recompute.carriers", [])
    with pytest.raises(AssertionError):
        check("saved", "wrapper")


@ranks(2)
def test_the_context_ends_with_an_exception():
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3, dtype=torch.float64))
    torch.manual_seed(0)
    mask = nn.functional.dropout(torch.ones(8), 0.5)
    torch.manual_seed(0)
    assert torch.equal(mask, nn.functional.dropout(torch.ones(8), 0.5))
    masks = [torch.empty(8), torch.empty(8)]
    dist.all_gather(masks, mask)
    assert torch.equal(*masks)  # no longer slices of a global mask
