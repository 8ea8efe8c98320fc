"""How gradients travel changes nothing: all bucket sizes, overlap and ZeRO stages give the same training.

A row of the table is one way to run one training. Rows of one training, on one number of ranks, are compared bit for
bit with each other (where the order of additions is the same for all), and to 1e-12 with one process. By default a
subset in which every value of every column, and every optimizer, occurs; `nox -s thorough` runs the whole product (of
four optimizers, one of each kind of state and loop, for tensor-parallel modules and hybrid sharding).
"""

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import TrainingRecord, assert_same_training, run_ranks

STEPS = 5
ZEROS = (0, 1, 2, 3)
BUCKETS = (1, 300, 25 * 2**20)  # one parameter each, a few, all


class Lion(torch.optim.Optimizer):
    """An element-wise optimizer that torch does not have."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(momentum.mul(fast).add_(param.grad, alpha=1 - fast).sign_(), alpha=group["lr"])
                momentum.mul_(slow).add_(param.grad, alpha=1 - slow)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adam-foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "weight_decay": 0.1}),
    "adam-fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True}),
    "sgd-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adagrad-foreach": (torch.optim.Adagrad, {"lr": 0.1, "foreach": True}),
    "adagrad-fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "rmsprop-foreach": (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
    "lion": (Lion, {}),
}


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, one without dims, and a layer that only every other call uses."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.up.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.sometimes = nn.Linear(7, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.calls = 0

    def forward(self, x):
        hidden = self.frozen(self.tied(self.down(torch.tanh(self.up(self.norm(x))))))
        self.calls += 1
        return (self.sometimes(hidden) if self.calls % 2 else hidden) * self.scale


#: Rows of 7 over 2 ranks are uneven.
PLACEMENTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "sometimes.weight": Shard(1)}


def build(tp=None):
    torch.manual_seed(1)
    model = Net().double()
    if tp is not None:
        for fqn, param in list(model.named_parameters()):
            owner, _, name = fqn.rpartition(".")
            placed = distribute_tensor(param.detach(), tp, [PLACEMENTS.get(fqn, Replicate())])
            setattr(model.get_submodule(owner), name, nn.Parameter(placed, requires_grad=param.requires_grad))
        model.tied.weight = model.up.weight
    return model


@dataclass(frozen=True)
class Training:
    """What is computed. Trainings that differ in `no_sync` add in another order."""

    optimizer: str = "adamw"
    accumulation: int = 1
    no_sync: bool = True
    clip: float | None = None

    def run(self, model, optimizer, *, coord=0, size=1, tp=None):
        for step in range(STEPS):
            for micro in range(self.accumulation):
                x, y = batch(step * 10 + micro, coord, size)
                if tp is not None:
                    x = distribute_tensor(x, tp, [Replicate()], src_data_rank=None)
                out = model(x)
                out = out.full_tensor() if isinstance(out, DTensor) else out
                local = self.no_sync and isinstance(model, DDP) and micro < self.accumulation - 1
                with model.no_sync() if local else contextlib.nullcontext():
                    (((out - y) ** 2).mean() / self.accumulation).backward()
            if self.clip is not None and size == 1 and not isinstance(optimizer, DistributedOptimizer):
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
        with model.unsharded() if getattr(model, "zero", 0) == 3 else contextlib.nullcontext():
            return TrainingRecord.collect(getattr(model, "module", model), optimizer)

    def on_one_process(self):
        model = build()
        optimizer_class, settings = OPTIMIZERS[self.optimizer]
        return self.run(model, optimizer_class([p for p in model.parameters() if p.requires_grad], **settings))

    def on_ranks(self, mesh, row):
        tp = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
        data = data_mesh(mesh)
        model = DDP(build(tp), data, per_rank=tp is not None, **row)
        optimizer_class, settings = OPTIMIZERS[self.optimizer]
        optimizer = DistributedOptimizer(optimizer_class, model=model, clip_grad_norm=self.clip, **settings)
        return self.run(model, optimizer, coord=place(data), size=data.size(), tp=tp)


def batch(index, coord, size):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 7, generator=generator, dtype=torch.float64)
    return x.chunk(size)[coord], y.chunk(size)[coord]


ROWS = tuple(
    {"zero": zero, "overlap": overlap, "bucket_bytes": bucket_bytes}
    for zero, overlap, bucket_bytes in itertools.product(ZEROS, (True, False), BUCKETS)
)
#: Every value of every column, twice.
SOME_ROWS = tuple(
    {"zero": zero, "overlap": bool((i + i // len(ZEROS)) % 2), "bucket_bytes": BUCKETS[i % 3]}
    for i, zero in enumerate(2 * ZEROS)
)
EACH_ZERO = SOME_ROWS[: len(ZEROS)]
ACCUMULATIONS = (
    {"accumulation": 1},
    {"accumulation": 3, "no_sync": True},
    {"accumulation": 3, "no_sync": False},
)
#: All rows for one optimizer, two for each of the others.
MOST = (
    (Training(**ACCUMULATIONS[2]), ROWS),
    *((Training(name), EACH_ZERO[i % 2 :: 2]) for i, name in enumerate(OPTIMIZERS)),
)
#: For the worlds that take longer.
SOME = (
    *((Training(**each), SOME_ROWS) for each in ACCUMULATIONS[1:]),
    *((Training(name, **ACCUMULATIONS[0]), EACH_ZERO) for name in ("sgd-fused", "lion")),
)
#: The norm is a sum over all elements, which ordered reduction takes in a way of its own.
CLIPPED = (Training(accumulation=3, clip=0.05), SOME_ROWS)


def mesh_of(dp, tp):
    """Return a mesh; a pair of numbers of data-parallel ranks is replicas and shards."""
    shape, names = (dp, ("replicate", "shard")) if isinstance(dp, tuple) else ((dp,), ("dp",))
    if tp == 1:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    return init_device_mesh("cpu", (*shape, tp), mesh_dim_names=(*names, "tp"))


def data_mesh(mesh):
    names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    return mesh[names]


def place(mesh):
    """Return this rank's number in a mesh, row by row."""
    return mesh.mesh.flatten().tolist().index(dist.get_rank())


def compare(expected, table, *, dp, tp=1, bitwise, reduction, prepare=lambda: None):
    """Run each training of the table in all of its rows, on the ranks of this world."""
    prepare()
    mesh = mesh_of(dp, tp)
    for training, rows in table:
        first = None
        for row in rows:
            record = training.on_ranks(mesh, row | {"reduction": reduction})
            try:
                assert_same_training(record, expected[training], rtol=1e-12)
                assert_same_training(record, first or record, bitwise=True) if bitwise else None
            except AssertionError as error:
                raise AssertionError(f"{training} in row {row}: {error}") from None
            first = first or record


@functools.cache
def on_one_process(training):
    return training.on_one_process()


def check(table, *, dp, tp=1, bitwise=True, reduction, **kwargs):
    expected = {training: on_one_process(training) for training, _ in table}
    options = {"dp": dp, "tp": tp, "bitwise": bitwise, "reduction": reduction, **kwargs}
    run_ranks(compare, math.prod(dp if isinstance(dp, tuple) else (dp,)) * tp, expected, table, timeout=1800, **options)


def thoroughly(value):
    return pytest.param(value, marks=pytest.mark.thorough)


@pytest.mark.parametrize("dp", [thoroughly(1), 2, 3, thoroughly(4)])
def test_ordered_reduction(dp):
    check([*(MOST if dp == 2 else SOME), CLIPPED], dp=dp, reduction="ordered")


@pytest.mark.parametrize("dp", [thoroughly(1), 2])
def test_the_reduction_of_the_backend_on_up_to_two_ranks(dp):
    check(SOME, dp=dp, reduction="backend")


@pytest.mark.parametrize("dp", [3, thoroughly(4)])
def test_the_reduction_of_the_backend_on_more_ranks_up_to_the_order_of_additions(dp):
    check([(Training(**ACCUMULATIONS[1]), SOME_ROWS)], dp=dp, reduction="backend", bitwise=False)


def test_hybrid_sharding():
    check([(Training(**ACCUMULATIONS[2]), SOME_ROWS), CLIPPED], dp=(2, 2), reduction="ordered")


TENSOR_PARALLEL = tuple((Training(name, accumulation=3, clip=0.05), EACH_ZERO) for name in ("adamw", "sgd"))


@pytest.mark.parametrize("dp", [thoroughly(1), 2])
def test_tensor_parallel_modules(dp):
    check(TENSOR_PARALLEL, dp=dp, tp=2, reduction="ordered")


#: The defaults, one multi-tensor and one fused loop, and an optimizer that torch does not have.
FOUR_OPTIMIZERS = ("adamw", "sgd-foreach", "adagrad-fused", "lion")


@pytest.mark.thorough
@pytest.mark.parametrize("each", ACCUMULATIONS, ids=["once", "no_sync", "every"])
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_the_whole_product(dp, reduction, each):
    bitwise = reduction == "ordered" or dp <= 2
    table = [(Training(name, **each), ROWS if bitwise else SOME_ROWS) for name in OPTIMIZERS]
    check(table, dp=dp, reduction=reduction, bitwise=bitwise)


@pytest.mark.thorough
@pytest.mark.parametrize("each", ACCUMULATIONS, ids=["once", "no_sync", "every"])
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_the_product_with_tensor_parallel_modules(dp, reduction, each):
    rows = ROWS if dp <= 2 else SOME_ROWS  # worlds of 6 and 8 ranks
    table = [(Training(name, **each), rows) for name in FOUR_OPTIMIZERS]
    check(table, dp=dp, tp=2, reduction=reduction, bitwise=reduction == "ordered" or dp <= 2)


@pytest.mark.thorough
@pytest.mark.parametrize("each", ACCUMULATIONS, ids=["once", "no_sync", "every"])
@pytest.mark.parametrize("reduction", ["ordered", "backend"])
@pytest.mark.parametrize("dp", [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)], ids=str)
def test_the_product_with_hybrid_sharding(dp, reduction, each):
    table = [(Training(name, **each), SOME_ROWS) for name in FOUR_OPTIMIZERS]
    check(table, dp=dp, reduction=reduction, bitwise=reduction == "ordered")


def add_in_an_order_that_depends_on_the_buffer():
    """Let every second buffer be added from the last rank to the first."""
    exchange = dist.all_to_all_single

    def from_the_last(received, *args, **kwargs):
        work = exchange(received, *args, **kwargs)
        if received.numel() // dist.get_world_size() % 16:  # about every second buffer
            work.wait()
            received.copy_(torch.cat(received.chunk(dist.get_world_size())[::-1]))
        return work

    pytest.MonkeyPatch().setattr(dist, "all_to_all_single", from_the_last)


def sum_norms_as_they_come():
    pytest.MonkeyPatch().setattr("vescale.optim.clip.EXACT_NORMS", ())


def test_another_order_of_additions_is_seen():
    with pytest.raises(AssertionError, match=r"in row .*differs by .*, allowed is 0"):
        check(SOME[:1], dp=3, reduction="ordered", prepare=add_in_an_order_that_depends_on_the_buffer)


def test_a_norm_that_depends_on_the_layout_is_seen():
    with pytest.raises(AssertionError, match=r"clip=0.05\) in row .*differs by .*, allowed is 0"):
        check([CLIPPED], dp=3, reduction="ordered", prepare=sum_norms_as_they_come)


def test_the_reduction_of_the_backend_depends_on_the_buckets():
    with pytest.raises(AssertionError, match=r"in row .*differs by .*, allowed is 0"):
        check(SOME[:1], dp=4, reduction="backend")
