"""`debug.comm_log()` records every collective with operator, bytes, axis, module, source line and cause."""

import csv
import dataclasses
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vescale.dtensor import (
    ImplicitRedistributionError,
    Replicate,
    Shard,
    debug,
    distribute_tensor,
    init_device_mesh,
    strict,
)
from vescale_testing import ranks

X = torch.arange(32, dtype=torch.float64).view(4, 8) / 10


def here(offset=0):
    return f"{__file__.rpartition('/')[2]}:{inspect.currentframe().f_back.f_lineno + offset}"


def fields(record, *names):
    return tuple(getattr(record, name) for name in names)


class Block(nn.Module):
    """Two linear layers, and an operator of the block itself that needs whole rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False).double(), nn.Linear(16, 8, bias=False).double()

    def forward(self, x):
        return self.down(self.up(x).relu()).softmax(-1)


def sharded_net(mesh):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    for block in net:
        for layer, dim in ((block.up, 0), (block.down, 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Replicate(), Shard(dim)]))
    return net


@ranks(4)
def test_a_tensor_parallel_step(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, x = sharded_net(mesh), shard(X[:2], mesh, [Shard(0), Replicate()])
    with debug.comm_log(net) as log:
        y = net(x)
        y.square().sum().backward()
        line = here(-1)
        net[1].up.weight.grad.full_tensor()
    forward = log.only(phase="forward", implicit=True)
    # a row-parallel product is a sum over tp, and softmax needs its value: 1 of 2 rows, 8 columns, 8 bytes each; of two
    # rows on a rank, torch 2.14 would give one to each rank of tp
    assert [fields(r, "operator", "axis", "module", "num_bytes", "shape", "group_size", "cause") for r in forward] == [
        ("all_reduce", "tp", "0", 64, (1, 8), 2, "aten._softmax.default"),
        ("all_reduce", "tp", "1", 64, (1, 8), 2, "aten._softmax.default"),
    ]
    assert {r.source.text for r in forward} == {"return self.down(self.up(x).relu()).softmax(-1)"}
    backward = log.only(phase="backward")
    assert ("all_reduce", "tp", "0") in {fields(r, "operator", "axis", "module") for r in backward}
    assert {r.line for r in backward} == {line}
    last = log[-len(log.only(implicit=False)) :]
    assert {fields(r, "operator", "axis", "module", "phase", "cause") for r in last} == {
        ("all_reduce", "dp", "", "forward", ""),
        ("all_gather", "tp", "", "forward", ""),
    }
    assert all(r.dtype is torch.float64 for r in log)


@ranks(2)
def test_every_form_of_a_collective():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pair = dist.new_group([0, 1])
    x, parts = torch.ones(3), [torch.ones(3) for _ in range(2)]
    other = 1 - dist.get_rank()
    with debug.comm_log() as log:
        dist.all_reduce(x)
        dist.all_gather(parts, x)
        dist.all_gather_into_tensor(torch.empty(6), x)
        dist.reduce_scatter_tensor(x, torch.ones(6))
        dist.all_to_all_single(torch.empty(2), torch.ones(2))
        dist.broadcast(x, 0, group=pair)
        dist.reduce(x, 0)
        dist.scatter(x, parts if other else None, src=0)
        dist.barrier()
        requests = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(3), other)]
        for work in dist.batch_isend_irecv(requests):
            work.wait()
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor()
    found = [fields(r, "operator", "num_bytes", "axis") for r in log]
    assert found == [
        ("all_reduce", 12, "world"),
        ("all_gather", 24, "world"),
        ("all_gather", 24, "world"),
        ("reduce_scatter", 24, "world"),
        ("all_to_all", 8, "world"),
        ("broadcast", 12, "ranks 0 1"),
        ("reduce", 12, "world"),
        ("scatter", 24 if dist.get_rank() == 0 else 12, "world"),
        ("barrier", 0, "world"),
        ("send", 12, "world"),
        ("recv", 12, "world"),
        ("scatter", 16 if dist.get_rank() == 0 else 8, "tp"),
        ("all_gather", 16, "tp"),
    ]
    assert log.total_bytes == sum(num_bytes for _, num_bytes, _ in found)
    assert not any(r.implicit for r in log)
    assert {r.source.function for r in log} == {"test_every_form_of_a_collective"}


@ranks(2)
def test_nothing_is_recorded_or_installed_outside(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net, x = nn.Linear(8, 8).double(), shard(X, mesh, [Shard(1)])
    with debug.comm_log(net) as log:
        x.softmax(1)
    assert len(log) == 1
    x.softmax(1)
    net(X)
    dist.barrier()
    assert len(log) == 1
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    with pytest.raises(ZeroDivisionError), debug.comm_log(net):
        raise ZeroDivisionError
    assert not net._forward_hooks


@ranks(2)
def test_values_and_gradients_stay_the_same():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def grads():
        net = sharded_net(mesh)
        net(distribute_tensor(X, mesh, [Replicate(), Replicate()])).square().sum().backward()
        return [p.grad.full_tensor() for p in net.parameters()]

    plain = grads()
    with debug.comm_log():
        logged = grads()
    assert all(torch.equal(a, b) for a, b in zip(plain, logged, strict=True))


@ranks(2)
def test_recomputation_is_the_backward_of_its_module(shard):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net, x = sharded_net(mesh), shard(X, mesh, [Replicate(), Replicate()]).requires_grad_()
    with debug.comm_log(net) as log:
        net[1](checkpoint(net[0], x, use_reentrant=False)).sum().backward()
    softmax = log.only(cause="aten._softmax.default")
    assert [fields(r, "module", "phase") for r in softmax] == [("0", "forward"), ("1", "forward"), ("0", "backward")]


@ranks(2)
def test_the_buckets_of_ddp():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = DistributedDataParallel(net)
    with debug.comm_log(net) as log:
        model(torch.ones(3, 4)).sum().backward()
    (bucket,) = log
    assert fields(bucket, "operator", "phase", "axis", "num_bytes") == (
        "all_reduce",
        "backward",
        "world",
        4 * (16 + 4 + 8 + 2),
    )


@ranks(2)
def test_the_rules_of_this_package_are_told_apart(shard):
    """Reading a partial scalar is implicit; the reduction inside a loss is a part of it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(X, mesh, [Shard(0)])
    labels = shard(torch.tensor([0, 1, -100, 2]), mesh, [Shard(0)])
    with debug.comm_log() as log:
        x.sum().item()
        nn.functional.cross_entropy(x, labels)
    assert [fields(r, "implicit", "cause") for r in log] == [(True, "aten._local_scalar_dense.default"), (False, "")]


@ranks(2)
def test_it_agrees_with_strict(shard):
    """What the log calls implicit is what `strict()` refuses, for stock rules and for those of this package."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    operators = {
        "softmax": lambda x: x.softmax(1),
        "sort": lambda x: x.sort(1),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 1],
        "argmax": lambda x: x.argmax(1),
        "equal": lambda x: torch.equal(x, x),
        "bool": lambda x: bool((x > 1).any()),
        "product": lambda x: x @ x.T,
        "cat": lambda x: torch.cat([x, x], 1),
        "sum": lambda x: x.sum(1),
        "copy into a replica": lambda x: shard(X.clone(), mesh, [Replicate()]).copy_(x),
        "full": lambda x: x.full_tensor(),
    }
    seen = set()
    for name, operator in operators.items():
        for dim in (0, 1):
            x = shard(X, mesh, [Shard(dim)])
            with debug.comm_log() as log:
                operator(x)
            try:
                with strict():
                    operator(x)
                refused = False
            except ImplicitRedistributionError:
                refused = True
            assert refused == any(r.implicit for r in log), (name, dim, list(map(str, log)))
            seen.add((refused, bool(log)))
    assert seen == {(True, True), (False, True), (False, False)}


@ranks(2)
def test_axes_without_names_and_meshes_over_the_world(shard):
    named, unnamed = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), init_device_mesh("cpu", (2, 1))
    tensor = shard(X, unnamed, [Shard(0), Shard(0)])
    with debug.comm_log() as log:
        tensor.full_tensor()
    assert [r.axis for r in log] == ["axis 0"]
    with debug.comm_log(mesh=named) as log:
        dist.all_reduce(torch.ones(1), group=named.get_group())
    assert [r.axis for r in log] == ["x"]


def record(operator="all_reduce", num_bytes=2048, **changes):
    values = {
        "operator": operator,
        "num_bytes": num_bytes,
        "dtype": torch.bfloat16,
        "shape": (32, 32),
        "num_tensors": 1,
        "axis": "tp",
        "group_size": 4,
        "module": "layers.0",
        "phase": "forward",
        "source": None,
        "implicit": False,
        "cause": "",
    }
    return debug.CommRecord(**values | changes)


def test_tables_and_files(tmp_path):
    log = debug.CommLog(
        [
            record(),
            record(implicit=True, cause="aten.mm.default", num_bytes=1024),
            record("all_gather", 2**20, axis="dp", module=""),
        ]
    )
    assert log.summary() == str(log)
    assert str(log) == (
        "operator    axis  module    count  implicit  bytes\n"
        "----------  ----  --------  -----  --------  -----\n"
        "all_gather  dp                  1            1 MiB\n"
        "all_reduce  tp    layers.0      2         1  3 KiB\n"
        "----------  ----  --------  -----  --------  -----\n"
        "total                           3         1  1 MiB"
    )
    assert "aten.mm.default" in log.summary(by=("cause",))
    assert repr(log) == "CommLog(3 collectives, 1 MiB)"
    assert str(log[1]) == ("all_reduce over tp 1 KiB bfloat16[32, 32] forward layers.0 IMPLICIT in aten.mm.default")
    assert len(log.only(operator="all_reduce")) == 2
    assert log[:2].total_bytes == 3072
    text = log.to_csv(tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text() == text
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["num_bytes"] for row in rows] == ["2048", "1024", "1048576"]
    assert rows[0].keys() == {field.name for field in dataclasses.fields(debug.CommRecord)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        log[0].num_bytes = 1


def test_names_that_are_no_field_are_refused():
    log = debug.CommLog([record()])
    with pytest.raises(ValueError, match=r"a record has no axes; it has operator, num_bytes, .*, line"):
        log.summary(by=("axes",))
    with pytest.raises(ValueError, match="a record has no op; it has operator"):
        log.only(op="all_reduce")
