"""Gradients that are partial sums over tp lie in DDP's buckets as they come, and are summed once per step."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import DTensor, Partial, Replicate, Shard, debug, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer, clip_grad_norm_
from vescale.optim._gradients import partials as _partials
from vescale.optim._gradients import reducer as _reduce
from vescale_testing import ranks

WIDTH, LENGTH, MICROS, STEPS = 6, 12, 3, 2
S1, WHOLE = [{"tp": Shard(1)}], [{"tp": Replicate()}]
PLAN = {
    "parameter": {r".*up\.(weight|bias)": {"tp": Shard(0)}, r".*down\.weight": {"tp": Shard(1)}},
    "forward": {"input": S1, r".*up\.input": WHOLE, r".*down\.output": S1, "output": WHOLE},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x, skip=False):
        return x + self.down(self.up(x if skip else self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, skip=False):
        for block in self.blocks:
            x = block(x, skip)
        return x


def plain():
    torch.manual_seed(0)
    return Net().double()


def build(mesh, mode="eager", **options):
    return DDP(parallelize_module(plain(), mesh["tp"], PLAN, mode=mode), mesh["dp"], **options)


def batch(index, mesh=None):
    x = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
    return x if mesh is None else x.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def loss_of(model, x, **arguments):
    return model(x, **arguments).square().mean() / MICROS


def grid(dp=2, tp=2):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def train(model, optimizer, mesh=None, *, penalty=None):
    """Return the parameters after some steps, and the norms of their gradients."""
    norms = []
    for step in range(STEPS):
        for micro in range(MICROS):
            waits = mesh is not None and micro < MICROS - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = loss_of(model, batch(10 * step + micro, mesh))
                if penalty is not None:
                    loss = loss + penalty(model)
                loss.backward()
        norms.append(optimizer.grad_norm_ if mesh is None else None)
        optimizer.step()
        if mesh is not None:
            norms[-1] = optimizer.grad_norm
        optimizer.zero_grad()
    with model.unsharded() if mesh is not None else contextlib.nullcontext():
        values = {fqn: whole(p).detach().clone() for fqn, p in model.named_parameters()}
    return {**values, "norms": torch.stack([torch.as_tensor(norm) for norm in norms])}


class _Clipping(torch.optim.SGD):
    """Plain SGD that clips first."""

    @property
    def grad_norm_(self):
        return nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)


def one_process(**options):
    model = plain()
    return train(model, _Clipping(model.parameters(), lr=0.5), **options)


def on_ranks(mesh, mode="eager", *, penalty=None, **options):
    model = build(mesh, mode, **options)
    return train(
        model, DistributedOptimizer(torch.optim.SGD, model=model, lr=0.5, clip_grad_norm=0.1), mesh, penalty=penalty
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(actual, expected):
    assert actual.keys() == expected.keys()
    return max(float((actual[fqn] - value).abs().max()) for fqn, value in expected.items())


def squares(model):
    """A penalty on all parameters, read outside of the module."""
    return 0.01 * sum(whole(p.square().sum()) for p in model.parameters())


@ranks(4, timeout=240)
def test_training_is_that_of_one_process(compile_with):
    compile_with("eager")
    mesh, expected = grid(), one_process()
    for zero in range(4):
        eager, static, compiled = (on_ranks(mesh, mode, zero=zero) for mode in ("eager", "static", "compile"))
        assert distance(eager, expected) < 1e-10, zero
        assert distance(static, eager) == 0, zero
        assert distance(compiled, expected) < 1e-10, zero


@ranks(4, timeout=120)
def test_parameters_with_two_gradients_in_one_backward():
    """One comes through the module, the other from a penalty outside of it, or from another reader of the weight."""
    mesh, expected = grid(), one_process(penalty=squares)
    assert distance(expected, one_process()) > 1e-3
    for mode in ("eager", "static"):
        for zero in (0, 2):
            assert distance(on_ranks(mesh, mode, zero=zero, penalty=squares), expected) < 1e-10, (mode, zero)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", _read_twice)
        expected = one_process(penalty=squares)
        assert distance(on_ranks(mesh, "static", zero=1, penalty=squares), expected) < 1e-10


def _read_twice(self, x, _skip=False):
    return x + self.down(self.up(self.norm(x)).relu() * self.up.weight.sum(1))


@ranks(4)
def test_a_step_without_the_sum_is_seen(monkeypatch):
    monkeypatch.setattr(_reduce, "sum_partials", lambda _slots: None)
    assert distance(on_ranks(grid(), "static", zero=1), one_process()) > 1e-3


def logs_of(model, mesh):
    """Return the collectives of a backward that reduces nothing, and of one that does, of the second step."""
    for step in range(2):
        logs = []
        for context in (model.no_sync(), contextlib.nullcontext()):
            with context:
                loss = loss_of(model, batch(step, mesh))
                with debug.comm_log() as log:
                    loss.backward()
                logs.append(log)
        model.zero_grad()
    return logs


@ranks(4)
def test_one_sum_per_step():
    mesh = grid()
    for mode in ("eager", "static"):
        for zero in (0, 1):
            local, synchronizing = logs_of(build(mesh, mode, zero=zero), mesh)
            assert len(local.only(axis="dp")) == 0
            num_of_activations = len(local.only(axis="tp"))
            assert num_of_activations == 2 * 2  # of the input of `up` and of the output of `down`, in two blocks
            assert len(synchronizing.only(axis="tp")) == num_of_activations + 1, (mode, zero)
            assert len(synchronizing.only(axis="dp")) == 2  # the bucket, and which parameters were used

    model = build(mesh, "static")
    seen = []
    model.module.blocks[0].norm.weight.register_hook(lambda grad: seen.append(grad.placements))
    local, _ = logs_of(model, mesh)
    assert len(local.only(axis="tp")) == num_of_activations + 1  # the hook sees a whole gradient
    assert set(seen) == {(Replicate(),)}


@ranks(4)
def test_a_weight_carries_one_accumulation_hook():
    """The receiver's own, whichever packages take part; in static mode the local parameter has another."""
    mesh = grid()
    for mode in ("eager", "static"):
        for calls_first in (False, True):  # the default receiver is there before DDP
            module = parallelize_module(plain(), mesh["tp"], PLAN, mode=mode)
            if calls_first:
                module(batch(0)).sum().backward()
                module.zero_grad()
            model, leaves = DDP(module, mesh["dp"]), []
            norm = model.module.blocks[0].norm
            norm.register_forward_hook(lambda norm, _args, _output, leaves=leaves: leaves.append(norm.weight))
            for step in range(2):
                loss_of(model, batch(step, mesh)).backward()
                model.zero_grad()
            for weight in model.parameters():
                assert [len(weight._backward_hooks), len(weight._post_accumulate_grad_hooks)] == [1, 1], (mode, step)
            if mode == "static":
                assert not isinstance(leaves[-1], DTensor)
                assert len(leaves[-1]._post_accumulate_grad_hooks) == 1
                assert not leaves[-1]._backward_hooks


@ranks(6, timeout=240)
def test_ordered_sums_have_the_same_bits_in_every_layout(monkeypatch):
    mesh = grid(2, 3)
    expected = on_ranks(mesh, reduction="ordered")
    assert distance(expected, one_process()) < 1e-10
    for zero in range(4):
        for mode, options in (
            ("eager", {"bucket_bytes": 100}),
            ("static", {"bucket_bytes": 400}),
            ("static", {"overlap": False}),
        ):
            assert distance(on_ranks(mesh, mode, zero=zero, reduction="ordered", **options), expected) == 0, zero
    monkeypatch.setattr(_partials, "GATHERED_BYTES", 0)  # sums where they are needed first, then gathers them
    assert distance(on_ranks(mesh, zero=1, reduction="ordered"), expected) == 0
    backwards = functools.partial(_in_turn, _partials.ScatteredSum)
    monkeypatch.setattr(_partials, "ScatteredSum", backwards)
    assert distance(on_ranks(mesh, zero=1, reduction="ordered"), expected) > 0


def _in_turn(scattered_sum, *args, order, **options):
    return scattered_sum(*args, order=list(reversed(order)), **options)


@ranks(4)
def test_what_is_seen_between_backwards():
    mesh = grid()
    for mode in ("eager", "static"):
        model = build(mesh, mode)
        weight = model.module.blocks[1].norm.weight
        with model.no_sync():
            loss_of(model, batch(0, mesh)).backward()
        assert weight.grad.placements == (Partial(),)
        reference = plain()
        loss_of(reference, batch(0, mesh)).backward()
        torch.testing.assert_close(weight.grad.full_tensor(), reference.blocks[1].norm.weight.grad)
        with pytest.raises(RuntimeError, match="is this rank's alone: it was accumulated inside no_sync"):
            clip_grad_norm_(model, 1.0)
        loss_of(model, batch(1, mesh)).backward()
        assert weight.grad.placements == (Replicate(),)
        for zeroed in (False, True):  # reduced gradients get more
            reference.zero_grad()
            if zeroed:
                model.zero_grad(set_to_none=False)
            else:
                for index in (0, 1):
                    loss_of(reference, batch(index)).backward()
            loss_of(model, batch(2, mesh)).backward()
            loss_of(reference, batch(2)).backward()
            for fqn, param in model.named_parameters():
                expected = reference.get_parameter(fqn).grad
                torch.testing.assert_close(param.grad.full_tensor(), expected, rtol=1e-11, atol=1e-14)


@ranks(4)
def test_ranks_of_dp_that_take_other_paths():
    """A norm that only one rank of dp uses, in the first step or in a later one."""
    mesh = grid()
    for zero, skips in ((0, (True, False)), (1, (False, True)), (3, (True, False)), (3, (False, True))):
        model, reference = build(mesh, zero=zero, per_rank=True), plain()
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.5)
        base = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step, skip in enumerate(skips):
            here = skip and mesh.get_local_rank("dp") == 1
            loss_of(model, batch(step, mesh), skip=here).backward()
            for coord in range(2):
                (loss_of(reference, batch(step).chunk(2)[coord], skip=skip and coord == 1) / 2).backward()
            for each in (optimizer, base):
                each.step()
                each.zero_grad()
        with model.unsharded():
            for fqn, param in model.named_parameters():
                torch.testing.assert_close(param.full_tensor(), reference.get_parameter(fqn), rtol=1e-11, atol=1e-13)


@ranks(4)
def test_other_ways_to_differentiate():
    mesh = grid()
    for zero in (0, 1):
        model, reference = build(mesh, zero=zero), plain()
        x = batch(0, mesh)
        params, named = list(model.parameters()), dict(reference.named_parameters())
        loss_of(model, batch(1, mesh)).backward()
        before = [param.grad for param in params]
        found = torch.autograd.grad(loss_of(model, x), params)
        assert all(param.grad is grad for param, grad in zip(params, before, strict=True))
        expected = torch.autograd.grad(loss_of(reference, x), list(named.values()))
        for grad, param, value in zip(found, params, expected, strict=True):
            assert grad.placements == param.placements
            torch.testing.assert_close(grad.full_tensor(), value, rtol=1e-11, atol=1e-14)

        # a backward that fails half-way leaves nothing behind
        model.zero_grad()
        y = x.clone().requires_grad_()
        y.register_hook(lambda _grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, y).backward()
        model.zero_grad()
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.5)
        loss_of(model, batch(2, mesh)).backward()
        optimizer.step()
        loss_of(reference, batch(2)).backward()
        torch.optim.SGD(reference.parameters(), lr=0.5).step()
        for fqn, param in model.named_parameters():
            torch.testing.assert_close(param.full_tensor(), named[fqn], rtol=1e-11, atol=1e-13)
