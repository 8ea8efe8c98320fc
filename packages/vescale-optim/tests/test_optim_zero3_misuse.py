"""ZeRO 3: a parameter that is not there is never read, and what cannot work says so."""

import copy
import gc
import io
import pickle
import re
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

FREED = r"reads or writes the parameter '\S+', which has no values here: expected .* got .* `with model.unsharded\(\)"


class Layers(nn.Module):
    """Two layers of equal sizes, of which a call may use one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.fails = self.fails_in_backward = False

    def forward(self, x, only=None):
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            if only in (None, index):
                x = torch.tanh(layer(x))
                if self.fails:
                    raise ZeroDivisionError
                if self.fails_in_backward:
                    x.register_hook(fail)
        return x


def fail(_grad):
    raise ZeroDivisionError


def wrapped(module=None, **settings):
    torch.manual_seed(0)
    module = Layers() if module is None else module
    return DDP(module, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), zero=3, **settings)


def whole(model):
    with model.unsharded():
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


READS = {
    "add": lambda p: p + 1,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "write": lambda p: nn.init.zeros_(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "item": lambda p: p.sum().item(),
    "list": lambda p: torch.cat([p, p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 4), p),
    "equal": lambda p: torch.equal(p, p),
    "print values": lambda p: f"{p.tolist()}",
}


def refusal(read):
    try:
        read()
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


@ranks(2)
def test_reading_a_freed_parameter():
    model = wrapped()
    param = model.layers[0].weight
    for name, read in READS.items():
        message = refusal(lambda read=read: read(param))
        assert re.search(FREED, message), (name, message)
    with pytest.raises(RuntimeError, match=r"'detach' reads or writes the parameter 'first\.weight'"):
        model.module.state_dict()
    with pytest.raises(RuntimeError, match=r"'linear' reads or writes the parameter 'first\.weight'"):
        model.first(torch.ones(1, 3))
    assert repr(param) == "Sharded('layers.0.weight', shape=(4, 4), dtype=torch.float32)"
    assert (param.shape, param.dtype, param.numel(), param.requires_grad) == ((4, 4), torch.float32, 16, True)
    assert torch.zeros_like(param).shape == (4, 4)
    assert param.grad is None
    assert {param: 1}[param] == 1
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Layers().parameters())
    with model.unsharded():
        assert type(param) is nn.Parameter
        for name, read in READS.items():
            if name != "write":
                read(param)


@ranks(2)
def test_reading_a_freed_tensor_parallel_parameter():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh["tp"], [Shard(0)]))
    model = DDP(module, mesh["dp"], zero=3)
    for read in (lambda p: p + 1, lambda p: p.to_local(), lambda p: p.full_tensor(), lambda p: p._local_tensor.sum()):
        with pytest.raises(RuntimeError, match=FREED):
            read(module.weight)
    assert module.weight.placements == (Shard(0),)
    with model.unsharded():
        assert torch.equal(module.weight.full_tensor(), torch.ones(2, 2))


@ranks(2)
def test_what_is_written_while_unsharded_is_kept():
    model = wrapped()
    with model.unsharded():
        nn.init.constant_(model.layers[1].bias, 7.0)
        with model.unsharded():
            assert torch.equal(model.layers[1].bias, torch.full((4,), 7.0))
        view = model.layers[1].bias.detach()
        loss = model(torch.ones(2, 3)).sum()
    assert torch.equal(view, torch.full((4,), 7.0))  # memory with a live view is not freed
    loss.backward()
    once = {fqn: slot.grad_part.clone() for fqn, slot in model.slots().items()}
    model(torch.ones(2, 3)).sum().backward()
    for fqn, slot in model.slots().items():
        assert torch.equal(slot.grad_part, 2 * once[fqn])
    assert torch.equal(whole(model)["layers.1.bias"], torch.full((4,), 7.0))
    assert not torch.equal(whole(model)["layers.0.bias"], torch.full((4,), 7.0))


@ranks(2)
def test_a_step_while_unsharded_is_seen_and_kept():
    models = wrapped(), wrapped()
    optimizers = [DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1) for model in models]
    x = torch.ones(2, 3)
    models[0](x).sum().backward()
    optimizers[0].step()
    with models[1].unsharded():
        models[1](x).sum().backward()
        optimizers[1].step()
        assert torch.equal(models[1].first.weight, whole(models[0])["first.weight"])
    for fqn, value in whole(models[0]).items():
        assert torch.equal(whole(models[1])[fqn], value)


@ranks(2)
def test_after_an_exception_training_goes_on():
    """In forward, and in backward: the same parameters as without it, and nothing stays whole."""
    models = wrapped(), wrapped(), wrapped()
    for which, model in enumerate(models):
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
        for _ in range(2):
            model.module.fails, model.module.fails_in_backward = which == 1, which == 2
            if which:
                with pytest.raises(ZeroDivisionError):
                    model(torch.ones(2, 3)).sum().backward()
                model.module.fails = model.module.fails_in_backward = False
                optimizer.zero_grad()
                with pytest.raises(RuntimeError, match=FREED):
                    model.layers[1].weight.sum()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for model in models[1:]:
        for fqn, value in whole(models[0]).items():
            assert torch.equal(whole(model)[fqn], value)


@ranks(2)
def test_ranks_that_run_different_units():
    model = wrapped(prefetch=False, per_rank=True)
    with pytest.raises(RuntimeError, match=r"coord 1 of axis 'dp' ran other units, .* than coord 0.*larger unit"):
        model(torch.ones(2, 3), dist.get_rank()).sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"coord 1 of axis 'dp' ran other units"):
        model(torch.ones(2, 3), dist.get_rank())


@ranks(2)
def test_what_needs_parameters_after_their_unit():
    model = wrapped()
    loss = model(torch.ones(2, 3)).sum()
    with pytest.raises(NotImplementedError, match=r"create_graph=True is not available with zero=3.*use zero=2"):
        loss.backward(create_graph=True)

    class Returns(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight[0]

    model = wrapped(nn.Sequential(Returns(2, 2)))
    with pytest.raises(RuntimeError, match=r"unit '0' returns a parameter, or a view of one, of shape \(2,\)"):
        model(torch.ones(1, 2))

    class Enters(nn.Linear):
        def forward(self, x):
            with model.unsharded():
                return super().forward(x)

    model = wrapped(Enters(2, 2))
    with pytest.raises(RuntimeError, match=r"unsharded\(\) was entered during forward or backward"):
        model(torch.ones(1, 2))


@ranks(2)
def test_another_tensor_over_the_memory_of_a_parameter():
    """What `vescale.dmodule` keeps to run a module on local tensors."""
    module, execution = Layers(), types.SimpleNamespace(any_rank=None)
    vars(module)["_vescale_execution"] = execution  # what parallelize_module leaves
    model = wrapped(module, per_rank=True)
    weight = model.layers[0].weight
    with model.unsharded():
        other, copied = nn.Parameter(weight.detach()), nn.Parameter(weight.detach().clone())
        weight._vescale_memory.share(weight, other, is_view=True)
        weight._vescale_memory.share(weight, copied, is_view=False)
    for tensor in (other, copied):
        with pytest.raises(
            RuntimeError, match=r"'mul' reads or writes the parameter 'layers.0.weight', which has no v"
        ):
            tensor * 2
    for _ in range(2):  # the parameter moves each time
        with model.unsharded():
            assert other.data_ptr() == weight.data_ptr()
            assert copied.data_ptr() != weight.data_ptr()
            assert torch.equal(other, copied)
            assert getattr(pickle.loads(pickle.dumps(weight)), "_vescale_memory", None) is None
    gone = weakref.ref(other)
    del tensor, other
    gc.collect()
    assert gone() is None
    assert [execution.any_rank(flag) for flag in (False, dist.get_rank() == 1, True)] == [False, True, True]


@ranks(2)
def test_second_derivatives_while_unsharded():
    model = wrapped()
    reference = Layers()
    reference.load_state_dict(whole(model))
    with model.unsharded():
        for each in (model, reference):
            x = torch.ones(2, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=1.0)
    optimizer.step()
    for fqn, param in reference.named_parameters():
        grad = 0 if param.grad is None else param.grad
        torch.testing.assert_close(whole(model)[fqn], param.detach() - grad)


@pytest.mark.parametrize(
    "units, message",
    [
        ("layers.0", "units must be a list of module names or regular expressions, got 'layers.0'"),
        ([3], r"units must be a list of module names or regular expressions, got \[3\]"),
        (["layer.0"], r"units: 'layer.0' matches no module of Layers; near names: \['layers.0'"),
        (["(layers"], r"units: '\(layers' is neither a module nor a regular expression: missing \)"),
        (["layers"], r"units: 'layers' is a ModuleList, which is never called; name its elements, for example "),
        ([re.compile("la.*s")], "units: 'layers' is a ModuleList, which is never called"),
    ],
)
@ranks(1)
def test_units_that_are_none(units, message):
    with pytest.raises(ValueError, match=message):
        wrapped(units=units)


@ranks(1)
def test_units_of_another_stage():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="units= says which parameters are gathered together, which needs zero=3"):
        DDP(Layers(), mesh, zero=2, units=["layers.0"])
    with DDP(Layers(), mesh, zero=2).unsharded():
        pass  # nothing to do


@ranks(2)
def test_a_step_between_forward_and_backward():
    """Plain torch refuses that, too: what backward needs was overwritten."""
    model = wrapped()
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    loss, later = model(torch.ones(2, 3)).sum(), model(torch.ones(2, 3)).sum()
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"parameters of unit '\(root\)' were changed .* before its backward"):
        later.backward()


@ranks(2)
def test_writing_into_what_a_unit_returned():
    """A view takes its node out of the graph then; the backward must still find the unit."""

    class Lift(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (torch.tanh(x) @ self.weight).view(-1, 2, 2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Lift(), Lift(), Lift()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.view(-1, 4))
                x += 1
                x[0].mul_(2)
            return x

    def build():
        torch.manual_seed(0)
        return Net()

    reference, model = build(), wrapped(build(), per_rank=True)
    for each in (reference, model):
        each(torch.ones(3, 4)).square().sum().backward()
    DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for fqn, value in reference.named_parameters():
        torch.testing.assert_close(whole(model)[fqn], value.detach())


@ranks(2)
def test_units_that_differ_between_ranks():
    with pytest.raises(
        ValueError, match=r"module given to DDP, or a setting, differs .* rank 1 has '.*layers.1.*\(axis 'dp'\)"
    ):
        wrapped(units=[f"layers.{dist.get_rank()}"])


@ranks(2)
def test_a_loss_of_values_from_inside_of_units():
    """Taken out by a hook or an attribute: the backward then enters units in their middle."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            hidden = torch.tanh(self.up(x))
            out = self.down(hidden)
            self.penalty = (hidden @ self.up.weight).square().mean()  # made last, and not of the output
            return x + out

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block(), Block()])
            self.taken = []
            for layer in self.layers:
                layer.up.register_forward_hook(lambda _module, _args, out: self.taken.append(out))

        def forward(self, x):
            self.taken.clear()
            for layer in self.layers:
                x = layer(x)
            return x

        def loss(self, x, which):
            out = self(x)
            taken = sum(each.cos().sum() for each in self.taken)
            penalties = sum(layer.penalty for layer in self.layers)
            return {"out": out.sum() + taken + penalties, "taken": taken, "penalties": penalties}[which]

    def build():
        torch.manual_seed(0)
        return Net().double()

    for which in ("out", "taken", "penalties"):
        reference, model = build(), wrapped(build())
        pairs = [
            (model.module, DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)),
            (reference, torch.optim.SGD(reference.parameters(), lr=0.1)),
        ]
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            for each, optimizer in pairs:
                each.loss(x, which).backward()
                optimizer.step()
                optimizer.zero_grad()
        for fqn, value in reference.named_parameters():
            torch.testing.assert_close(whole(model)[fqn], value.detach(), rtol=1e-12, atol=1e-14)
