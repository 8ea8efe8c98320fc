"""A report lists every boundary with what it moves; its rows add up to all that is communicated."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from vescale.dmodule import Collective, parallelize_module, report
from vescale.dtensor import Replicate, Shard, debug, init_device_mesh
from vescale.dtensor.extension import bytes_text
from vescale_testing import ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PREFIX = "vescale.dmodule/"  # of profiler ranges


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": S0}, r"down\.weight": {"tp": S1}},
    "forward": {
        "input": [{"tp": S1}],
        r"up\.input": [{"tp": R}],
        r"down\.output": [{"tp": S1}],
        "output": [{"tp": R}],
    },
}
ACTIVATION, WIDTH = 4 * 5 * 6 * 8, 6 * 8  # bytes of a whole activation, of 5 tokens padded to 6, and of a norm weight
BOUNDARIES = {
    "input 'x'": (R, S1, S1, [], ["all_gather"]),
    "up.input 'input'": (S1, R, P, ["all_gather"], ["reduce_scatter"]),
    "down.output": (P, S1, S1, ["reduce_scatter"], ["all_gather"]),
    "output": (S1, R, R, ["all_gather"], []),
}


def build(mesh, mode):
    torch.manual_seed(0)
    return parallelize_module(Block().double(), mesh, PLAN, mode=mode)


def step(model):
    x = torch.linspace(-1, 1, 4 * 5 * 6, dtype=torch.float64).view(4, 5, 6).requires_grad_()
    model(x).square().sum().backward()
    gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    return [x.grad, *gradients]


@ranks(2)
def test_rows_are_the_boundaries_and_add_up():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for mode in ("eager", "static"):
        model = build(mesh, mode)
        expected = step(model)
        with debug.comm_log() as log:
            step(model)
        with report(model, num_steps=2) as found:
            assert all(map(torch.equal, step(model), expected))
            assert all(map(torch.equal, step(model), expected))
        assert found.num_bytes == 2 * log.total_bytes
        assert not len(found.others), mode

        assert [row.where for row in found.boundaries] == list(BOUNDARIES)
        for row in found.boundaries:
            source, target, gradient, forward, backward = BOUNDARIES[row.where]
            assert (row.source, row.target, row.gradient) == ((source,), (target,), (gradient,)), (mode, row.where)
            assert row.forward == tuple(Collective(name, "tp", 2 * ACTIVATION * 6 // 5, 2) for name in forward)
            assert row.backward == tuple(Collective(name, "tp", 2 * ACTIVATION * 6 // 5, 2) for name in backward)
            assert row.count == 2
            assert row.shape == (4, 5, 6)
            assert row.forward_seconds > 0
            assert row.backward_seconds > 0
        assert found.gradients == (Collective("all_reduce", "tp", 2 * 2 * WIDTH, 2),)  # norm weight and bias

        lines = str(found).splitlines()
        header = "boundary placements gradient forward backward calls bytes forward ms backward ms"
        assert " ".join(lines[0].split()) == header
        line = next(line for line in lines if line.startswith("up.input"))
        assert "[S(1)] -> [R]" in line
        assert f"all_gather tp {bytes_text(ACTIVATION * 6 / 5)} " in line
        assert f"reduce_scatter tp {bytes_text(ACTIVATION * 6 / 5)} " in line
        assert lines[-1].split()[:2] == ["total", bytes_text(log.total_bytes).split()[0]]


@ranks(2)
def test_compiled_blocks_run_in_static_mode_while_they_are_measured():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    static, model = build(mesh, "static"), build(mesh, "compile")
    expected = step(static)
    with report(model):
        assert all(map(torch.equal, step(model), expected))
    with report(model) as found:
        assert all(map(torch.equal, step(model), expected))
    assert [row.where for row in found.boundaries] == list(BOUNDARIES)
    with debug.comm_log() as log:
        step(static)
    assert found.num_bytes == log.total_bytes


@ranks(2)
def test_what_is_no_boundary_is_listed_too():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build(mesh, "eager")
    with report(model) as found:
        step(model)
        DTensor.from_local(torch.ones(3), mesh, [P], run_check=False).full_tensor()
        with (
            pytest.raises(RuntimeError, match="a report of this module is open already; close"),
            report(model),
        ):
            pass
    assert [(r.operator, r.num_bytes) for r in found.others] == [("all_reduce", 12)]
    assert "other: (outside)" in str(found)
    num_rows = len(found.boundaries)
    step(model)  # closed: nothing is added
    assert len(found.boundaries) == num_rows
    assert found.boundaries[0].count == 1


def test_a_module_that_is_not_parallelized_is_refused():
    with pytest.raises(ValueError, match="expected a parallelized module, got a Block that is none"):
        report(Block())


@ranks(1)
def test_over_one_rank_there_is_nothing_to_report():
    model = build(init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), "static")
    with report(model) as found:
        model(torch.ones(4, 5, 6, dtype=torch.float64)).sum().backward()
    assert found.num_bytes == 0
    assert str(found).splitlines()[-1].split() == ["total", "0", "B"]


@ranks(2)
def test_num_steps_must_be_positive():
    model = build(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "eager")
    with pytest.raises(ValueError, match="expected an integer of 1 or more for num_steps, got 0"):
        report(model, num_steps=0)


@ranks(2)
def test_every_boundary_is_a_profiler_range():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for mode in ("eager", "static"):
        model = build(mesh, mode)
        expected = step(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert all(map(torch.equal, step(model), expected))
        counts = {e.key.removeprefix(PREFIX): e.count for e in profile.key_averages() if e.key.startswith(PREFIX)}
        names = {"gradients"} | {f"{w}{side}" for w in BOUNDARIES for side in ("", " backward")}
        assert counts == dict.fromkeys(names, 1), mode
