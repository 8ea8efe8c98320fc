"""Ranks of a mesh that call a module with different inputs, seeds or shapes: the same error on every rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, check_ranks, deferred_init
from vescale.dtensor.extension import Failures
from vescale_testing import ranks

PLAN = {
    "parameter": {r"up\.weight": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {"input": [[Replicate()]], "output": [[Replicate()]]},
}
MODES = ["eager", "static"]


class Block(nn.Module):
    """A feed-forward with dropout of replicated values."""

    def __init__(self, p=0.0, hidden=8):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden, bias=False), nn.Linear(hidden, 4, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.down(self.up(self.dropout(x)))


def parallel(mode, p=0.0):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return parallelize_module(Block(p), mesh["tp"], PLAN, mode=mode), mesh


def rows(seed, num_rows=4):
    return torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(seed))


def others(mesh):
    """Return the two ranks of this rank's axis tp."""
    return mesh["tp"].mesh.tolist()


@pytest.mark.parametrize("mode", MODES)
@ranks(4)
def test_rows_that_differ_over_tp(mode):
    model, mesh = parallel(mode)
    first, second = others(mesh)
    expected = (
        r"^the values of input 0 must be equal on all ranks: expected values with checksum \w+ as on rank "
        rf"{first}, got values with checksum \w+ on rank {second}; give all ranks of these axes the same inputs"
    )
    with pytest.raises(ValueError, match=expected):
        model(rows(dist.get_rank()))


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_rows_in_another_order(mode):
    model, mesh = parallel(mode)
    with pytest.raises(ValueError, match="the values of input 0 must be equal"):
        model(rows(0).roll(mesh.get_local_rank("tp"), 0))


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_rows_that_differ_later(mode):
    check_ranks(every=2)
    model, mesh = parallel(mode)
    for step in range(2):
        model(rows(step)).sum().backward()
    with pytest.raises(ValueError, match="the values of input 0 must be equal"):
        model(rows(7 + mesh.get_local_rank("tp")))


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_shapes_that_differ_in_the_first_call(mode):
    model, mesh = parallel(mode)
    with pytest.raises(
        ValueError, match=r"input 0 must be equal .* shape \(4, 4\) as on rank 0, got .* shape \(5, 4\)"
    ):
        model(rows(0, 4 + mesh.get_local_rank("tp")))


@ranks(2)
def test_shapes_that_differ_in_a_later_call_of_eager_mode():
    model, mesh = parallel("eager")
    model(rows(0))
    with pytest.raises(
        ValueError, match=r"input 0 must be equal on all ranks: .* got float32 of shape \(5, 4\) on rank 1"
    ):
        model(rows(0, 4 + mesh.get_local_rank("tp")))


@pytest.mark.usefixtures("quick_failures")
@ranks(2)
def test_shapes_that_differ_in_a_later_call_of_static_mode():
    model, mesh = parallel("static")
    model(rows(0))
    with pytest.raises(RuntimeError, match=r"rank 1: was waiting in a call with new shapes .* shape \(5, 4\)"):
        model(rows(0, 4 + mesh.get_local_rank("tp")))


@pytest.fixture
def quick_failures(monkeypatch):
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


@pytest.mark.parametrize("mode", MODES)
@ranks(4)
def test_seeds_that_differ_where_dropout_draws(mode):
    model, mesh = parallel(mode, p=0.5)
    first, second = others(mesh)
    torch.manual_seed(1337 + dist.get_rank())
    expected = (
        rf"the state of the random generator must be equal on all ranks: expected seed {1337 + first}, state \w+ as on "
        rf"rank {first}, got seed {1337 + second}, state \w+ on rank {second}; call torch.manual_seed with one seed"
    )
    with pytest.raises(ValueError, match=expected):
        model(rows(0))


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_seeds_that_differ_where_nothing_draws(mode):
    model, _ = parallel(mode)
    torch.manual_seed(1337 + dist.get_rank())
    model(rows(0)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
@ranks(4)
def test_equal_ranks_raise_nothing(mode):
    check_ranks(every=1)
    model, mesh = parallel(mode, p=0.5)
    for step in range(3):
        model(rows(10 * mesh.get_local_rank("dp") + step)).sum().backward()  # rows differ over dp
    with torch.no_grad():
        model.eval()(rows(0, 3))


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_switched_off(mode):
    check_ranks(every=0)
    model, mesh = parallel(mode)
    model(rows(mesh.get_local_rank("tp")))


# ------------------------------------------------------------------------------------------------- construction


def mesh_of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@ranks(2)
def test_parameters_that_differ():
    rank, mesh = dist.get_rank(), mesh_of_two()
    expected = r"up.weight must be equal on all ranks: expected float32 of shape \(8, 4\), .* shape \(10, 4\)"
    with pytest.raises(ValueError, match=expected):
        parallelize_module(Block(hidden=8 + 2 * rank), mesh, PLAN)
    with pytest.raises(ValueError, match=r"up.weight must be equal .* got float64 of shape \(8, 4\)"):
        parallelize_module(Block().to(torch.float64 if rank else torch.float32), mesh, PLAN)


@ranks(2)
def test_deferred_modules_of_different_seeds():
    torch.manual_seed(1337 + dist.get_rank())
    module = deferred_init(Block)
    with pytest.raises(ValueError, match=r"the state of the random generator must be .* seed 1337, .* got seed 1338,"):
        parallelize_module(module, mesh_of_two(), PLAN)
    torch.manual_seed(3)
    parallelize_module(deferred_init(Block), mesh_of_two(), PLAN)


@ranks(2)
def test_buffers_that_differ():
    module = nn.BatchNorm1d(4, track_running_stats=dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"running_mean must be equal .* \(4,\), .* on rank 0, got nothing on rank 1"):
        parallelize_module(module, mesh_of_two(), {})
