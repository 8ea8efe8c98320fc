"""With ZeRO 3, micro-batches of a stage share its gathers if it keeps them; ranks compare them once per step."""

import pytest
import torch
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._parameters.units import Unit, Units
from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import run_ranks

MICROBATCHES, STEPS = 4, 3


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 16, 6, generator=generator, dtype=torch.float64).unbind()


def train_plain():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach() for fqn, p in model.named_parameters()}


def train(schedule, reshards):
    """Return this rank's parameters, and in the last step: gathers by unit, comparisons, units that are left."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    module = build()
    plan = PipelinePlan(schedule, num_microbatches=MICROBATCHES)
    engine = PipelineEngine(module, mesh["pp"], plan, loss_fn=nn.functional.mse_loss)
    model = DDP(module, mesh["dp"], zero=3, reduction="ordered", reshard_after_forward=reshards)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.5, momentum=0.9)
    gathers, comparisons = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "launch", _counted(Unit.launch, lambda unit: gathers.setdefault(unit.name, []).append(1)))
        patch.setattr(Units, "check_same", _counted(Units.check_same, lambda _: comparisons.append(1) or True))
        for step in range(STEPS):
            gathers.clear()
            comparisons.clear()
            x, y = (each.chunk(2)[mesh["dp"].get_local_rank()] for each in batch(step))
            loss = engine(x, target=y)
            left = [unit.name for unit in model._sharded.units.all if unit.frees and unit.state.name != "SHARDED"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with model.unsharded():
        own = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    return own, {name: len(each) for name, each in gathers.items()}, len(comparisons), left


def _counted(function, note):
    def counted(self):
        found = function(self)
        if found is not False:
            note(self)
        return found

    return counted


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_units_are_gathered_once_and_compared_once(schedule):
    plain = train_plain()
    freed, kept = (run_ranks(train, 4, schedule, reshards) for reshards in (True, False))
    for one, other in zip(freed, kept, strict=True):
        for fqn, value in one[0].items():
            torch.testing.assert_close(value, plain[fqn], rtol=1e-10, atol=1e-12)
            assert torch.equal(value, other[0][fqn])
        assert set(other[1].values()) == {1}
        assert min(one[1].values()) >= MICROBATCHES
        assert one[2] == other[2] == 1
        assert one[3] == other[3] == []
