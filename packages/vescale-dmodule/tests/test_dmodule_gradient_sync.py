"""Partial gradients of one backward are reduced together, in flat buckets, and every ``.grad`` is full afterwards."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import no_sync, parallelize_module
from vescale.dtensor import Replicate, Shard, debug, init_device_mesh
from vescale.dtensor.extension import stand_in_for
from vescale_testing import ranks
from vescale_testing.gradient_receivers import check_gradient_receiver

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


# ------------------------------------------------------------------------------------------------- a model


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Tower(nn.Module):
    """Sequence parallel over tp, batch parallel over dp: every parameter has a gradient that is partial somewhere."""

    def __init__(self, num_layers, *, use_reentrant=None):
        super().__init__()
        self.layers, self.use_reentrant = nn.ModuleList(Layer() for _ in range(num_layers)), use_reentrant
        self.head = nn.LayerNorm(6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


SPREAD = {"dp": Shard(0), "tp": Shard(1)}
PLAN = {
    "parameter": {r".*\.up\.(weight|bias)": {"tp": Shard(0)}, r".*\.down\.weight": {"tp": Shard(1)}},
    "forward": {
        "input": [SPREAD],
        r".*\.up\.input": [{"dp": Shard(0), "tp": Replicate()}],
        r".*\.down\.output": [SPREAD],
        "output": [{"dp": Replicate(), "tp": Replicate()}],
    },
}
NUM_REDUCED_TOGETHER = 2  # one all-reduce over each axis, at the end of a pass


def build(**options):
    torch.manual_seed(0)
    return Tower(3, **options).double()


def parallel(mesh, mode="eager", **options):
    return parallelize_module(build(**options), mesh, PLAN, mode=mode)


def batch(seed):
    return torch.randn(4, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def backward(model, seed=1):
    """Run one pass and return the log of its backward."""
    loss = model(batch(seed)).square().sum()
    with debug.comm_log(model) as log:
        loss.backward()
    return log


def assert_same_gradients(model, plain):
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        assert gradient.placements == model.get_parameter(name).placements, f"{name}: {gradient.placements}"
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad, rtol=1e-11, atol=1e-13, msg=name)


@ranks(4)
def test_a_model_on_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = build(), parallel(mesh)
    logs = []
    for seed in (1, 2, 3):  # the second and the third add to the first
        plain(batch(seed)).square().sum().backward()
        logs.append(backward(model, seed))
        assert_same_gradients(model, plain)
        assert len(logs[-1].only(operator="all_reduce")) == NUM_REDUCED_TOGETHER
        assert position_of_first(logs[-1]) == len(logs[-1]) - NUM_REDUCED_TOGETHER
    assert traffic(logs[0]) == traffic(logs[1]) == traffic(logs[2])

    static = parallel(mesh, mode="static")
    static_logs = [backward(static, seed) for seed in (1, 2, 3)]
    assert [traffic(log.only(operator="all_reduce")) for log in static_logs] == [
        traffic(log.only(operator="all_reduce")) for log in logs
    ]
    for name, parameter in model.named_parameters():
        assert torch.equal(static.get_parameter(name).grad.to_local(), parameter.grad.to_local()), name


def position_of_first(log):
    return [record.operator for record in log].index("all_reduce")


def traffic(log):
    return [(record.operator, record.axis, record.num_bytes) for record in log]


@ranks(4)
def test_accumulation_without_communication():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for mode in ("eager", "static"):
        plain, model = build(), parallel(mesh, mode)
        for seed in (1, 2, 3, 4):
            plain(batch(seed)).square().sum().backward()
        backward(model, 1)  # reduced; what follows adds to it
        with no_sync(model):
            for seed in (2, 3):
                assert not backward(model, seed).only(operator="all_reduce")
        kept = model.get_parameter("head.weight").grad
        assert all(p.is_partial() for p in kept.placements)  # a label that says what it is
        with pytest.raises(AssertionError, match=r"head\.weight"):
            assert_same_gradients_of_head(model, plain)
        for other in (model, copy.deepcopy(model)):
            assert len(backward(other, 4).only(operator="all_reduce")) == NUM_REDUCED_TOGETHER
            assert_same_gradients(other, plain)
    forgotten(model)


def forgotten(model):
    with no_sync(model):
        backward(model, 5)
    model.zero_grad()  # forgets what was kept
    plain = build()
    plain(batch(6)).square().sum().backward()
    backward(model, 6)
    assert_same_gradients(model, plain)
    x = batch(7)
    x.register_hook(lambda _gradient: no_sync(model).__enter__())
    with pytest.raises(RuntimeError, match="put the whole backward"):
        model(x).sum().backward()


def assert_same_gradients_of_head(model, plain):
    gradient, parameter = model.head.weight.grad, plain.head.weight
    assert gradient.placements == model.head.weight.placements, "head.weight"
    torch.testing.assert_close(gradient.full_tensor(), parameter.grad)


# ------------------------------------------------------------------------------------------------- single parameters


class Give(torch.autograd.Function):
    """A use of a parameter whose gradient is ``gradient``."""

    @staticmethod
    def forward(ctx, _parameter, gradient):
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _one):
        return ctx.gradient, None


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, _one):
        raise ArithmeticError("in the middle")


class Held(nn.Module):
    """Parameters that are used outside of it. Its first call installs their receivers."""

    def __init__(self, tensors):
        super().__init__()
        self.parts = nn.ParameterList(tensors)

    def forward(self):
        return None


def held(mesh, tensors, layouts=None):
    """Return parameters in placements, replicated by default, without receivers yet."""
    plan = {} if layouts is None else {rf"parts\.{i}": list(placements) for i, placements in enumerate(layouts)}
    return parallelize_module(Held(tensors), mesh, {"parameter": plan})


def received(mesh, tensors, layouts=None):
    """Return the same, with the receivers of a parallelized module."""
    model = held(mesh, tensors, layouts)
    model()
    return model.parts


def summand(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def give(parameter, local, placements=(P,)):
    mesh = parameter.device_mesh
    gradient = DTensor.from_local(
        local, mesh, list(placements), run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return Give.apply(parameter, gradient)


def give_locally(parameter, local):
    """The same by a local leaf that stands in for the parameter, as in static mode."""
    leaf = parameter.to_local().detach().requires_grad_()
    stand_in_for(parameter, leaf, [P])
    return Give.apply(leaf, local)


def number_of_all_reduces(function):
    with debug.comm_log() as log:
        function()
    return len(log.only(operator="all_reduce"))


def locals_of(module):
    return [parameter.grad.to_local().clone() for parameter in module]


@ranks(4)
def test_the_result_depends_neither_on_the_mode_nor_on_the_order_of_arrival():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    shapes = [(5,), (7, 3), (64,), (2,), (33,)]

    def train(order, *, is_local, attached=range(5)):
        parts, seen = received(mesh, [torch.zeros(shapes[i]) for i in attached]), []
        module = [parts[list(attached).index(i)] for i in range(5)]
        for step in range(3):
            local = {i: summand(shapes[i], 10 * step + i) for i in order}
            uses = [give_locally(module[i], local[i]) if is_local else give(module[i], local[i]) for i in order]
            seen.append(number_of_all_reduces(sum(uses).backward))
        return seen, locals_of(module)

    counts, expected = train(range(5), is_local=False)
    assert counts == [1, 1, 1]
    for order in (range(5), [4, 2, 0, 1, 3]):
        for is_local in (False, True):
            actual_counts, actual = train(order, is_local=is_local)
            assert actual_counts == counts
            assert all(map(torch.equal, actual, expected))
    _, reordered = train(range(5), is_local=False, attached=[4, 2, 0, 1, 3])
    torch.testing.assert_close(reordered, expected)
    assert not all(map(torch.equal, reordered, expected))  # the place in the buffer decides the order of additions


@ranks(4)
def test_parameters_that_come_now_and_then():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def counts(*programs, is_local):
        module, seen = received(mesh, [torch.zeros(3) for _ in range(3)]), []
        for step, program in enumerate(programs):
            local = [(module[i], summand((3,), 10 * step + i)) for i in program]
            uses = [give_locally(p, part) if is_local else give(p, part) for p, part in local]
            module.zero_grad()
            seen.append(number_of_all_reduces(sum(uses).backward))
            for i in set(program):
                total = sum(part for parameter, part in local if parameter is module[i])
                dist.all_reduce(total)
                torch.testing.assert_close(module[i].grad.to_local(), total)
        return seen

    for is_local in (False, True):
        assert counts([0], [2, 0], [0], [1, 2, 0], is_local=is_local) == [1, 1, 1, 1]
    assert counts([0, 1], [0, 1, 0], is_local=True) == [1, 1]  # several local leaves of one parameter in one pass


@ranks(4)
def test_uneven_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [(R, R), (R, S0), (R, R), (R, S0), (R, R), (S0, S0)]
    module = received(mesh, [torch.zeros(5, 2) for _ in layouts], layouts)
    full = torch.arange(10.0).view(5, 2)
    gradients = [(P, P), (P, S0), (R, P), (P, S0), (P, R), (S0, S0)]
    for _ in range(2):
        for parameter, layout in zip(module, gradients, strict=True):
            local = sharded(full, mesh, [R if p.is_partial() else p for p in layout]).to_local()
            give(parameter, local, layout).backward()
    for parameter, layout in zip(module, gradients, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), 2 * full * 2 ** layout.count(P))


@ranks(4)
def test_every_kind_of_gradient():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases = [  # placements of the parameter and its gradient, collectives, in float64 and with uneven shards
        ((R, R), (P, P), ["all_reduce", "all_reduce"]),
        ((R, R), (R, P), ["all_reduce"]),
        ((R, S0), (P, S0), ["all_reduce"]),
        ((R, R), (P, S0), ["all_reduce", "all_gather"]),
        ((R, R), (R, S1), ["all_gather"]),
        ((R, S0), (R, P), ["reduce_scatter"]),
        ((R, S0), (R, S0), []),
        ((R, R), (R, Partial("avg")), ["all_reduce"]),
    ]
    for placements, gradient, operators in cases:
        for is_local in (False, True):
            full = torch.arange(15.0, dtype=torch.float64).view(5, 3)
            module = received(mesh, [full], [placements])
            local = sharded(full, mesh, [R if p.is_partial() else p for p in gradient]).to_local()
            total = full * 2 ** sum(p == P for p in gradient)
            with debug.comm_log() as log:
                if is_local:
                    leaf = torch.zeros_like(local, requires_grad=True)
                    stand_in_for(module[0], leaf, gradient)
                    Give.apply(leaf, local).backward()
                else:
                    give(module[0], local, gradient).backward()
            assert sorted(r.operator for r in log) == sorted(operators), (placements, gradient)
            assert module[0].grad.placements == tuple(placements)
            assert torch.equal(module[0].grad.full_tensor(), total), (placements, gradient)


def sharded(full, mesh, placements):
    replicated = DTensor.from_local(full, mesh, [R] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)


@ranks(2)
def test_passes_that_are_not_plain():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def fresh(num=3, dtype=torch.float32):
        return received(mesh, [torch.zeros(4, dtype=dtype) for _ in range(num)])

    def whole(seed, dtype=torch.float32):
        total = summand((4,), seed, dtype)
        dist.all_reduce(total)
        return total

    def use(module, *seeds):
        return sum(give(parameter, summand((4,), seed)) for parameter, seed in zip(module, seeds, strict=False))

    # a pass that ends with an exception leaves nothing behind, in the first pass and in a later one
    for is_later in (False, True):
        module = fresh()
        if is_later:
            use(module, 1, 2, 3).backward()
            module.zero_grad()
        loss = use(module, 4, 5) + Give.apply(Fail.apply(torch.zeros((), requires_grad=True)), torch.zeros(()))
        with pytest.raises(ArithmeticError, match="in the middle"):
            loss.backward()
        module.zero_grad()
        assert number_of_all_reduces(use(module, 1, 2, 3).backward) == 1
        assert [torch.equal(p.grad.to_local(), whole(s)) for p, s in zip(module, (1, 2, 3), strict=True)] == [True] * 3

    # torch.autograd.grad gives full gradients and touches no .grad
    module = fresh()
    found = torch.autograd.grad(use(module, 1, 2), [module[0], module[1]])
    assert [g.placements for g in found] == [(R,), (R,)]
    assert torch.equal(found[1].to_local(), whole(2))
    assert module[0].grad is None
    use(module, 1, 2).backward(inputs=[module[0]])
    assert torch.equal(module[0].grad.to_local(), whole(1))
    assert module[1].grad is None

    # hooks of the user see full gradients; the other parameters are reduced together all the same
    module = fresh(4)
    seen = []
    module[0].register_hook(lambda gradient: seen.append(gradient.to_local()) or 2 * gradient)
    module[1].register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.to_local().clone()))
    assert number_of_all_reduces(use(module, 1, 2, 3, 4).backward) == 3
    assert sorted(map(tuple, map(torch.Tensor.tolist, seen))) == sorted(tuple(whole(s).tolist()) for s in (1, 2))
    assert torch.equal(module[0].grad.to_local(), 2 * whole(1))

    # two uses of one parameter, dtypes apart, a copy, one that is frozen and thawed, a second use of the hooks
    model = held(mesh, [torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)])
    module, half = model.parts, model.parts[2]
    module[1].requires_grad_(False)
    model()
    loss = use(module, 1) + use(module, 2) + give(half, summand((4,), 3, torch.bfloat16), (P,))
    assert number_of_all_reduces(loss.backward) == 2
    torch.testing.assert_close(module[0].grad.to_local(), whole(1) + whole(2))
    assert torch.equal(half.grad.to_local(), whole(3, torch.bfloat16))
    module[1].requires_grad_(True)
    for other in (model, copy.deepcopy(model)):
        other.zero_grad()
        other()
        other()
        for _ in range(2):
            use(other.parts, 1, 2).backward()
        torch.testing.assert_close([p.grad.to_local() for p in other.parts[:2]], [2 * whole(1), 2 * whole(2)])

    # a gradient of which a gradient is taken
    module = fresh(1, dtype=torch.float64)
    x = torch.full((4,), float(dist.get_rank() + 1), dtype=torch.float64, requires_grad=True)
    part = DTensor.from_local(x, mesh, [P], run_check=False)
    (module[0] * part.redistribute(placements=[R])).sum().to_local().backward(create_graph=True)
    assert module[0].grad.placements == (R,)
    assert module[0].grad.to_local().tolist() == [3.0] * 4


def install_receiver(parameter):
    model = held(parameter.device_mesh, [torch.zeros(2)])
    model.parts[0] = parameter
    model()


@ranks(2)
def test_the_protocol_of_receivers():
    check_gradient_receiver(install_receiver, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing(use_reentrant):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        plain, model = build(), parallel(mesh, use_reentrant=use_reentrant)
        for seed in (1, 2):
            plain(batch(seed)).square().sum().backward()
            log = backward(model, seed)
        assert_same_gradients(model, plain)
        # a backward of its own for each layer, and one for the rest, where checkpointing is reentrant
        assert len(log.only(operator="all_reduce")) == (4 if use_reentrant else 1)

    on_every_rank()
