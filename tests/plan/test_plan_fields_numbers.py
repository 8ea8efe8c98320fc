"""Dtypes, order of sums, hybrid sharding, offload and clipping of a plan are carried out as it says."""

import functools
import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vescale
from vescale import Plan
from vescale_testing import ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("fields_training")
sys.path.pop(0)
adamw, build, parallelize, train, train_plain = (
    training.adamw,
    training.build,
    training.parallelize,
    training.train,
    training.train_plain,
)

HYBRID = [
    {"dp": 4, "dp_replicate": 2, "zero": 2},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "units": [r"layers\.[01]"], "offload": True},
    {"dp": 4, "dp_replicate": 4, "zero": 1, "granularity": {r".*\.weight": "rows"}},
    {"dp": 2, "tp": 2, "dp_replicate": 2, "zero": 1, "num_microbatches": 2},
    {"dp": 2, "pp": 2, "dp_replicate": 2, "zero": 3, "num_microbatches": 2, "units": [r"layers\.\d"]},
    {
        "dp": 2,
        "pp": 2,
        "zero": 3,
        "reshard_after_forward": False,
        "num_microbatches": 2,
        "axis_order": ["dp", "tp", "pp"],
    },
]


def words(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items())


def on_one(dropout=0.0):
    model = build(dropout)
    return train_plain(model, adamw(model.parameters()))


@pytest.mark.parametrize("fields", HYBRID, ids=words)
def test_sharding_is_that_of_one_process(fields):
    @ranks(4)
    def on_every_rank():
        model, optimizer = parallelize(Plan(**fields), build(0.2))
        axes = model.ddp.data_axes
        shards = 1 if "dp_replicate" not in fields else fields["dp"] // fields["dp_replicate"]
        assert axes.shard.size == (shards if "dp_replicate" in fields else fields["dp"])
        assert train(model, optimizer).difference(on_one(0.2)) < 1e-10

    on_every_rank()


@ranks(4)
def test_ordered_sums_have_the_same_bits_for_every_layout():
    def record(**fields):
        return train(*parallelize(Plan(reduction="ordered", **fields), build()))

    first, *others = (
        record(dp=4),
        record(dp=4, zero=3, bucket_bytes=64),
        record(dp=4, zero=2, dp_replicate=2, bucket_bytes=300),
    )
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(value, first.state[name]) for name, value in other.state.items())


@ranks(2)
def test_dtypes_of_parameters_gradients_masters_and_state():
    plan = Plan(
        dp=2, zero=2, param_dtype="bfloat16", grad_dtype="float32", reduce_dtype="float32", state_dtype="bfloat16"
    )
    model, optimizer = parallelize(plan, build(dtype=torch.float32))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    train(model, optimizer, steps=1)
    entries = optimizer.state_dict()["state"]["head.weight"]
    assert entries["exp_avg"].tensor.dtype == torch.bfloat16
    assert entries["master_weight"].tensor.dtype == torch.float32
    assert {slot.bucket.wire_dtype for slot in model.ddp.slots().values()} == {torch.float32}
    model, optimizer = parallelize(Plan(dp=2, master_dtype="float32"), build(dtype=torch.bfloat16))
    assert optimizer.state_dict()["state"]["head.weight"]["master_weight"].tensor.dtype == torch.float32


AUTOCAST = [
    {"dp": 2},
    {"dp": 2, "zero": 3, "recompute": 1},
    {"pp": 2, "num_microbatches": 2, "recompute": 1},
    {"pp": 2, "num_microbatches": 2, "schedule": "zb_h1"},
]


@pytest.mark.parametrize("fields", AUTOCAST, ids=words)
def test_autocast_is_that_of_one_process(fields):
    """In float32: two halves of a batch, as the plans cut it, whose products of bfloat16 numbers are the same ones."""
    around = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    one, plain = build(dtype=torch.float32), build(dtype=torch.float32)
    expected = train_plain(one, torch.optim.SGD(one.parameters(), lr=0.5), parts=2, around=around)
    without = train_plain(plain, torch.optim.SGD(plain.parameters(), lr=0.5), parts=2)
    assert expected.difference(without) > 1e-3

    @ranks(2)
    def on_every_rank():
        sgd = functools.partial(torch.optim.SGD, lr=0.5)
        model, optimizer = parallelize(Plan(autocast="bfloat16", **fields), build(dtype=torch.float32), sgd)
        assert train(model, optimizer).difference(expected) < 1e-5
        assert not torch.is_autocast_enabled("cpu")

    on_every_rank()


@ranks(2)
def test_the_norm_is_measured_and_clipped():
    one = build()
    expected = train_plain(one, torch.optim.SGD(one.parameters(), lr=0.1))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    assert train(*parallelize(Plan(dp=2, zero=1), build(), sgd)).norms == pytest.approx(expected.norms, rel=1e-10)
    model, optimizer = parallelize(Plan(dp=2, clip_grad_norm=0.1), build(), sgd)
    assert train(model, optimizer).norms[0] == pytest.approx(expected.norms[0], rel=1e-10)
    assert optimizer.clip_grad_norm == 0.1
    clipped = build()
    torch.optim.SGD(clipped.parameters(), lr=0.1)
    loss = training.loss_fn(clipped(training.batch(0)["ids"]), training.batch(0)["target"])
    loss.backward()
    nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
    model, optimizer = parallelize(Plan(dp=2), build(), sgd, clip_grad_norm=0.1)
    train(model, optimizer, steps=1)
    moved = (build().head.weight - model.state_dict()["head.weight"]) / 0.1
    torch.testing.assert_close(moved, clipped.head.weight.grad, rtol=1e-9, atol=1e-12)
    assert math.isinf(parallelize(Plan(dp=2), build(), sgd)[1].clip_grad_norm)


@ranks(2)
def test_the_random_stream_is_that_of_the_plan():
    try:
        model, optimizer = parallelize(Plan(dp=2, random_stream="philox"), build(0.2))
        assert vescale.dtensor.random.current_stream() == "philox"
        vescale.dtensor.random.manual_seed(3)
        actual = train(model, optimizer)
    finally:
        vescale.dtensor.random.set_stream("torch")
    one = build(0.2)
    with vescale.dtensor.random.stream("philox", seed=3):
        expected = train_plain(one, adamw(one.parameters()))
    assert expected.difference(on_one(0.2)) > 1e-4
    assert actual.difference(expected) < 1e-10
