"""`strict()` refuses operators that would communicate on their own, and nothing else."""

import contextlib
import inspect
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

from vescale.dtensor import DTensor, ImplicitRedistributionError, Partial, Replicate, Shard, init_device_mesh, strict
from vescale_testing import ranks

X = torch.arange(24, dtype=torch.float64).view(4, 6) / 10


def line_here():
    return inspect.currentframe().f_back.f_lineno


def tp(size=2):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


@ranks(2)
def test_the_error_says_what_where_and_the_way_out(shard, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    x = shard(X, tp(), [Shard(1)])
    with CommDebugMode() as counts, pytest.raises(ImplicitRedistributionError) as info, strict():
        torch.softmax(x, dim=1)
    line = line_here() - 1
    assert str(info.value) == (
        f"aten._softmax.default, called at {Path(__file__).name}:{line} in {inspect.currentframe().f_code.co_name} "
        "(torch.softmax(x, dim=1)), would redistribute an operand of shape (4, 6) from (tp: Shard(dim=1)) to "
        "(tp: Replicate()) on mesh tp=2 (cpu) implicitly, and strict() forbids that; write "
        ".redistribute(placements=[Replicate()]) on that operand before, or choose placements that fit"
    )
    assert isinstance(info.value, RuntimeError)
    assert counts.get_total_counts() == 0  # before any communication: the ranks stay in step
    torch.testing.assert_close(torch.softmax(x, dim=1).full_tensor(), X.softmax(1))  # without the context it gathers
    with strict():
        torch.testing.assert_close(
            torch.softmax(x.redistribute(placements=[Replicate()]), 1).full_tensor(), X.softmax(1)
        )


@ranks(4)
def test_both_axes_are_named(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w = shard(X, mesh, [Shard(0), Shard(1)]), shard(X.T.contiguous(), mesh, [Shard(1), Shard(0)])
    text = r"aten\.mm\.default.*\(dp: Shard\(dim=\d\), tp: Shard\(dim=\d\)\) to \(dp: .*\) on mesh dp=2, tp=2 \(cpu\)"
    with pytest.raises(ImplicitRedistributionError, match=text), strict():
        x @ w


@ranks(2)
def test_what_is_asked_for_stays_allowed(shard):
    mesh = tp()
    rows, whole = shard(X, mesh, [Shard(0)]), shard(X, mesh, [Replicate()])
    table = shard(X, mesh, [Shard(0)])
    index, labels = torch.tensor([3, 0, 1]), torch.tensor([0, 2, -100, 1])
    with CommDebugMode() as counts, strict():
        rows.full_tensor()
        rows.redistribute(placements=[Shard(1)]).to_local()
        rows.sum(0).full_tensor()
        F.embedding(shard(index, mesh, [Replicate()]), table).redistribute(placements=[Replicate()])
        loss = F.cross_entropy(rows, shard(labels, mesh, [Shard(0)]))  # reduces the number of targets by itself
        assert rows.argmax(0).shape == (6,)  # reduces in its own way
        assert rows.sum().full_tensor().item() == X.sum().item()
        local_map(lambda t: t * 2, out_placements=[Shard(0)])(rows)
        assert (rows + whole).placements == (Shard(0),)  # cuts its part out of a replica
    assert counts.get_total_counts() >= 6
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(X, labels))


@ranks(2)
def test_free_false_refuses_cutting_a_replica_too(shard):
    rows, whole = shard(X, tp(), [Shard(0)]), shard(X, tp(), [Replicate()])
    with strict(free=False):
        rows + rows
    with pytest.raises(
        ImplicitRedistributionError, match=r"aten\.add\.Tensor.*from \(tp: Replicate\(\)\) to \(tp: Shard"
    ):
        with strict(free=False):
            rows + whole


@ranks(4)
def test_some_axes_only(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    over_dp, over_tp = shard(X, mesh, [Shard(1), Replicate()]), shard(X, mesh, [Replicate(), Shard(1)])
    with strict(axes=["tp"]):
        torch.testing.assert_close(torch.softmax(over_dp, dim=1).full_tensor(), torch.softmax(X, dim=1))
        with pytest.raises(ImplicitRedistributionError, match=r"aten\._softmax"):
            torch.softmax(over_tp, dim=1)
    with pytest.raises(ImplicitRedistributionError, match=r"aten\._softmax"), strict():
        torch.softmax(over_dp, dim=1)
    with pytest.raises(TypeError, match="axes"):
        strict(axes="tp")


@ranks(2)
def test_interleaved_shards_may_be_gathered_if_asked_for(shard):
    whole = torch.arange(48.0).view(2, 6, 4).sin()
    merged = shard(whole, tp(), [Shard(1)]).view(12, 4)  # two parts, of which each rank holds three rows
    with pytest.raises(
        ImplicitRedistributionError, match=r"aten\.median.*from \(tp: _StridedShard.*to \(tp: Replicate"
    ):
        with strict():
            merged.median()
    with strict(interleaved=True):
        torch.testing.assert_close(merged.median().full_tensor(), whole.median())
        with pytest.raises(ImplicitRedistributionError, match=r"aten\._softmax"):
            shard(X, tp(), [Shard(1)]).softmax(1)


@ranks(2)
def test_the_value_of_a_partial_scalar_is_refused(shard):
    total = shard(X, tp(), [Shard(0)]).sum()
    with pytest.raises(ImplicitRedistributionError, match=r"aten\._local_scalar_dense.*Partial\(sum\).*Replicate"):
        with strict():
            total.item()
    assert total.item() == X.sum().item()


@ranks(2)
def test_an_axis_of_one_rank_never_communicates(shard):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    x = shard(X, mesh, [Shard(1), Shard(0)])
    with strict():
        y = x.softmax(1)
    torch.testing.assert_close(y.full_tensor(), X.softmax(1))
    with pytest.raises(RuntimeError, match="Implicit redistribution"), ExplicitRedistributionContext():
        x.softmax(1)  # torch's own context counts a latency for that axis


@ranks(2)
def test_the_backward_pass_names_node_and_lines(shard):
    mesh = tp()
    x = shard(X, mesh, [Replicate()]).requires_grad_()

    with strict():  # the gradient comes back through the conjugate of an explicit redistribution
        (x.softmax(1).redistribute(placements=[Shard(1)]) * 2).sum().backward()

    def implicit():
        weight = shard(X, mesh, [Shard(1)])
        return (x.softmax(1) * weight).sum()  # cuts a replica: the gradient of softmax's result is Shard(1)

    with pytest.raises(ImplicitRedistributionError) as info, strict():
        implicit().backward()
    line = line_here() - 1
    assert re.search(
        rf"aten\._softmax_backward_data\.default, in the backward pass of SoftmaxBackward0 \(torch\.autograd\."
        rf"set_detect_anomaly\(True, check_nan=False\) makes this message name its forward line\), "
        rf"started at .*:{line} in ",
        str(info.value),
    )
    with (
        pytest.raises(ImplicitRedistributionError) as info,
        strict(),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        implicit().backward()
    assert "SoftmaxBackward0 of " in str(info.value)
    assert "(return (x.softmax(1) * weight).sum()" in str(info.value)


# A backward pass inside a backward pass, 70 times: from the 61st on they run in threads of the autograd engine. It has
# a process of its own, as a forked one would inherit an engine without its threads, and a thread with a large stack.
NESTED = """
import threading

import torch
import torch.distributed as dist
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dtensor import DTensor, ImplicitRedistributionError, Shard, init_device_mesh, strict


class DeepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth, body):
        ctx.depth, ctx.body = depth, body
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not ctx.depth:
            ctx.body()
            return grad, None, None
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            DeepBackward.apply(x, ctx.depth - 1, ctx.body).backward()
        return grad, None, None


def nested():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(1)])
    threads = []

    def body():
        threads.append(threading.get_ident())
        x.softmax(1)

    def run():
        DeepBackward.apply(torch.ones(1, requires_grad=True), 70, body).backward()

    try:
        with strict():
            run()
    except ImplicitRedistributionError as error:
        print("refused", "aten._softmax" in str(error), threads != [threading.get_ident()])
    with ExplicitRedistributionContext():
        run()
    print("torch's own context does not see them")


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
threading.stack_size(2**28)
thread = threading.Thread(target=nested)
thread.start()
thread.join()
"""


def test_threads_of_the_autograd_engine_are_watched_too():
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["refused True True", "torch's own context does not see them"], done.stderr


@ranks(2)
def test_warnings_come_once_per_line(shard, caplog):
    x = shard(X, tp(), [Shard(1)])
    with caplog.at_level(logging.WARNING, "vescale.dtensor"), strict(mode="warn"):
        for _ in range(3):
            y = x.softmax(1)
        x.cumsum(1)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "(y = x.softmax(1)), would redistribute" in caplog.records[0].getMessage()
    assert "and no line of the program shows that; write .redistribute(" in caplog.records[0].getMessage()
    assert "aten.cumsum" in caplog.records[1].getMessage()
    torch.testing.assert_close(y.full_tensor(), X.softmax(1))


@ranks(2)
def test_as_a_decorator(shard):
    x = shard(X, tp(), [Shard(1)])

    @strict()
    def forward(depth=0):
        """Say so."""
        return forward(depth - 1) if depth else x.softmax(1)

    assert (forward.__name__, forward.__doc__) == ("forward", "Say so.")
    for depth in (0, 2):
        with pytest.raises(ImplicitRedistributionError):
            forward(depth)
    x.softmax(1)


@ranks(2)
def test_the_innermost_context_decides(shard):
    x = shard(X, tp(), [Shard(1)])
    outer = strict()
    with outer:
        with ExplicitRedistributionContext(enable=False):
            x.softmax(1)
        with strict(mode="warn"):
            x.softmax(1)
        with pytest.raises(RuntimeError, match=r"^Implicit redistribution occurred"), ExplicitRedistributionContext():
            x.softmax(1)
        with outer, pytest.raises(ImplicitRedistributionError):
            x.softmax(1)
        with pytest.raises(ImplicitRedistributionError):
            x.softmax(1)
    x.softmax(1)
    with pytest.raises(RuntimeError, match=r"^Implicit redistribution occurred"), ExplicitRedistributionContext():
        x.softmax(1)


def test_another_mode_is_refused():
    with pytest.raises(ValueError, match=r"expected 'raise' or 'warn' for mode, got 'log'"):
        strict(mode="log")


@ranks(4)
def test_which_changes_communicate(shard):
    """`target` is of another operand, to which DTensor redistributes the first one."""
    r, s0, s1, p = Replicate(), Shard(0), Shard(1), Partial()
    for sizes, source, target, expected in [
        ((4,), [s0], [s1], True),
        ((4,), [p], [s0], True),
        ((4,), [r], [s0], False),
        ((4,), [r], [p], False),
        ((4,), [s0], [s0], False),
        ((2, 2), [s0, r], [s0, s0], False),
        ((2, 2), [r, s0], [s0, s0], True),  # the cuts nest the other way round
        ((4, 1), [r, s0], [s0, s0], False),
        ((2, 2), [r, s1], [s0, s1], False),
        ((2, 2), [r, s0], [s0, r], True),
    ]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
        one, other = placed(shard, mesh, source), placed(shard, mesh, target)
        with contextlib.nullcontext() if not expected else pytest.raises(ImplicitRedistributionError), strict():
            total = one + other
        if not expected:
            torch.testing.assert_close(total.full_tensor(), 2 * X)
    for sizes, source, expected in [
        ((4,), [s0], True),
        ((4,), [p], True),
        ((1, 4), [p, r], False),
        ((1, 4), [s0, r], False),
    ]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
        one = placed(shard, mesh, source)
        with contextlib.nullcontext() if not expected else pytest.raises(ImplicitRedistributionError), strict():
            result = one.softmax(0)
        if not expected:
            torch.testing.assert_close(result.full_tensor(), X.softmax(0))


def placed(shard, mesh, placements):
    """`X` in any placements; on a partial axis every rank has an equal share."""
    num_shares = math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if placement.is_partial())
    made = shard(X / num_shares, mesh, [Replicate() if p.is_partial() else p for p in placements])
    size = {"shape": X.shape, "stride": X.stride()}
    return DTensor.from_local(made.to_local(), mesh, placements, run_check=False, **size)
