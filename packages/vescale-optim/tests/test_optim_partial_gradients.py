"""A gradient that is a partial sum over other axes is kept as it comes, and summed over them once per step."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from vescale.dtensor.extension import gradient_receiver, stand_in_for
from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._gradients.partials import Form
from vescale.optim._ranks import axis as _axis
from vescale_testing import ranks
from vescale_testing.gradient_receivers import check_gradient_receiver

R, S0, P = Replicate(), Shard(0), Partial()


class Net(nn.Module):
    """Weights that are replicated over both axes, over one, and over none."""

    def __init__(self, mesh=None, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layouts = {"first": [R, R], "second": [R, S0], "scale": [R, R], "third": [S0, R]}
        shapes = {"first": (4, 4), "second": (4,), "scale": (), "third": (4,)}
        for name, layout in layouts.items():
            value = torch.randn(shapes[name], generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(
                name, nn.Parameter(value if mesh is None else distribute_tensor(value, mesh, layout))
            )

    def forward(self, x):
        return torch.tanh(x @ self.first + self.second) * self.third * self.scale


def rows(step, coord=0, size=1):
    """8 rows of which a coord has its part."""
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x.chunk(size)[coord]


def loss_of(model, x):
    return model(x).square().sum()


def on_grid(mesh, **options):
    """Return the model on ``mesh["a", "b"]``, in DDP over ``mesh["dp"]``."""
    return DDP(Net(mesh["a", "b"]), mesh["dp"], **options)


def spread(mesh, x):
    """Cut the rows over both axes, so that gradients of what is replicated are partial sums over them."""
    return distribute_tensor(x, mesh["a", "b"], [S0, Shard(1)])


def whole_loss(model, x):
    loss = loss_of(model, x)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def counted(monkeypatch):
    """Count DDP's collectives by axis."""
    names, start = [], _axis.Axis._start

    def count(self, kind, what, *args, **kwargs):
        names.append(self.name)
        return start(self, kind, what, *args, **kwargs)

    monkeypatch.setattr(_axis.Axis, "_start", count)
    return names


@ranks(4)
def test_sums_over_several_axes(monkeypatch):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    names = counted(monkeypatch)
    for zero in range(4):
        for reduction in ("backend", "ordered"):
            model, reference = on_grid(mesh, zero=zero, reduction=reduction), Net()
            optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, clip_grad_norm=1.0)
            plain = torch.optim.SGD(reference.parameters(), lr=0.1)
            for step in range(2):
                with model.no_sync():
                    whole_loss(model, spread(mesh, rows(step))).backward()
                names.clear()
                whole_loss(model, spread(mesh, rows(step + 10))).backward()
                assert names == ["a", "b"]
                optimizer.step()
                optimizer.zero_grad()
                for each in (step, step + 10):
                    loss_of(reference, rows(each)).backward()
                nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
                plain.step()
                plain.zero_grad()
            with model.unsharded():
                for name, value in reference.named_parameters():
                    actual = model.module.get_parameter(name).full_tensor()
                    torch.testing.assert_close(actual, value, rtol=1e-11, atol=1e-13)


@ranks(4)
def test_gradients_of_several_kinds_in_one_step():
    """Full, partial over one axis, over the other, over both; by autograd and by a stand-in; and what is no sum."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    kinds = [[R, R], [P, R], [R, P], [P, P], [Partial("avg"), R], [S0, R]]
    total = torch.arange(16, dtype=torch.float64).view(4, 4)

    def gradient(placements):
        grad = distribute_tensor(total, mesh["a", "b"], [p if p.is_shard() else R for p in placements])
        local = grad.to_local().clone()
        for dim, placement in enumerate(placements):
            if placement == P:  # coord 0 has more, coord 1 the rest
                local = local * (3 if mesh["a", "b"].get_local_rank(dim) == 0 else -2)
        return DTensor.from_local(local, mesh["a", "b"], placements, run_check=False)

    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx, _weight, grad):
            ctx.grad = grad
            return torch.zeros((), dtype=torch.float64)

        @staticmethod
        def backward(ctx, _grad):
            return ctx.grad, None

    class GiveNothing(Give):
        @staticmethod
        def backward(_ctx, _grad):
            return None, None

    def give(weight, placements, by_leaf):
        grad = gradient(placements)
        if by_leaf:
            leaf = torch.zeros_like(grad.to_local(), requires_grad=True)
            stand_in_for(weight, leaf, placements)
            return Give.apply(leaf, grad.to_local())
        return Give.apply(weight, grad)

    for zero in (0, 1):
        for by_leaf in (False, True):
            model = DDP(Net(mesh["a", "b"]), mesh["dp"], zero=zero, find_unused_parameters=True)
            slot = model.slots()["first"]
            for rounds in range(2):  # what has been agreed on in the first is known in the second
                for first in kinds:
                    for second in kinds:
                        with model.no_sync():
                            give(model.module.first, first, by_leaf).backward()
                        give(model.module.first, second, by_leaf).backward()
                        message = f"{first} {second} {zero} {by_leaf} {rounds}"
                        torch.testing.assert_close(slot.kept_part, 2 * total.view(-1), msg=message)
                        give(model.module.first, first, by_leaf).backward()  # is added to a reduced gradient
                        torch.testing.assert_close(slot.kept_part, 3 * total.view(-1), msg=message)
                        model.zero_grad()

                        # one by autograd, one by a leaf, and autograd has nothing more for the parameter itself
                        with model.no_sync():
                            give(model.module.first, first, False).backward()
                        nothing = GiveNothing.apply(model.module.first, None)
                        (nothing + give(model.module.first, second, True)).backward()
                        torch.testing.assert_close(slot.kept_part, 2 * total.view(-1), msg=message)
                        model.zero_grad()


@ranks(4)
def test_dtypes_and_ranks_that_use_nothing():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "a", "b"))
    coord = mesh.get_local_rank("dp")
    model = DDP(
        Net(mesh["a", "b"], dtype=torch.bfloat16),
        mesh["dp"],
        zero=1,
        grad_dtype=torch.float32,
        reduce_dtype=torch.float64,
        reduction="ordered",
    )
    first = model.slots()["first"]
    x = spread(mesh, rows(0, coord, 2)).bfloat16()
    loss = (x @ model.module.first).square().sum() if coord == 0 else model.module.scale * 1.0  # other parameters
    loss.full_tensor().backward()
    assert first.kept_part.dtype == torch.float32
    weight = Net(dtype=torch.bfloat16).first.detach().requires_grad_()
    (rows(0, 0, 2).bfloat16() @ weight).square().sum().backward()
    whole = torch.cat([first.kept_part, torch.zeros(16 - first.kept_part.numel())])
    parts = [torch.empty_like(whole) for _ in range(2)]
    dist.all_gather(parts, whole, group=mesh.get_group("dp"))
    actual = torch.cat([parts[0][: first.part[1] - first.part[0]], parts[1]])[:16] if coord == 0 else None
    if coord == 0:
        torch.testing.assert_close(actual, weight.grad.float().view(-1) / 2, rtol=0.02, atol=0.02)


@ranks(2)
def test_copies_of_parameters_belong_to_no_ddp():
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "a", "b"))
    model = on_grid(mesh)
    assert gradient_receiver(model.module.first) is not None
    assert gradient_receiver(copy.deepcopy(model.module).first) is None


@ranks(2)
def test_the_protocol_of_receivers():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for options in ({}, {"overlap": False}, {"find_unused_parameters": False}, {"reduction": "ordered"}):

        def wrap(parameter, options=options):
            module = nn.Module()
            module.weight = parameter
            DDP(module, mesh["dp"], **options)

        check_gradient_receiver(wrap, mesh["tp"])


@ranks(2)
def test_forms():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    form = Form(distribute_tensor(torch.zeros(2, 2), mesh, [R, R]))
    assert form.dims == (0,)  # an axis of one rank has nothing to sum
    for placements, dims in (
        ((R, R), ()),
        ((P, R), (0,)),
        ((P, P), (0,)),
        ((Partial("avg"), R), None),
        ((S0, R), None),
    ):
        assert form.dims_of(placements) == dims
    assert form.admits((0,))
    form.agreed = ()
    assert not form.admits((0,))
    mask = form.take_request()
    assert (mask, form.take_request()) == (1, 0)
    form.grant(mask)
    assert form.agreed == (0,)
    assert form.is_silent == (mesh.get_local_rank("a") == 1)
    local = torch.ones(2)
    form.conform(local)
    assert local.tolist() == ([1, 1] if mesh.get_local_rank("a") == 0 else [0, 0])


@ranks(4)
def test_a_forgotten_axis_is_seen(monkeypatch):
    from vescale.optim._gradients import partials as _partials

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    finish = _partials._FlatSum.finish
    monkeypatch.setattr(_partials._FlatSum, "finish", lambda self: None if self.axis.name == "b" else finish(self))
    model, reference = on_grid(mesh), Net()
    whole_loss(model, spread(mesh, rows(0))).backward()
    loss_of(reference, rows(0)).backward()
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(model.module.scale.grad.full_tensor(), reference.scale.grad)
