"""The same loop under several layouts trains as one process does, in float64, and a wrong one does not."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale.dtensor import Replicate, Shard
from vescale.pipe import PipelinePlan
from vescale.pipe.plan import SCHEDULES
from vescale_testing import halved, ranks

MODULE_PLAN = {
    "parameter": {
        r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {r"layers\.\d+\.up\.input": [{"tp": Replicate()}], r"layers\.\d+\.down\.output": [{"tp": Replicate()}]},
}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.inner(self.up(x).tanh()))


class Net(nn.Module):
    """Four residual blocks and a head; returns predictions, the loss is a function beside it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.head(x)


def build(**kwargs):
    torch.manual_seed(0)
    return Net(**kwargs).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        yield {"x": x, "target": x[:, :2].sin()}


def train_plain(dropout=0.0):
    model = build(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses, norms = [], []
    for batch in batches():
        loss = nn.functional.mse_loss(model(batch["x"]), batch["target"])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train(plan, *, take=None, dropout=0.0):
    adamw = functools.partial(torch.optim.AdamW, lr=0.02)
    model, optimizer = vescale.parallelize(
        plan, build(dropout=dropout), adamw, clip_grad_norm=0.5, loss_fn=nn.functional.mse_loss, module_plan=MODULE_PLAN
    )
    losses, norms = [], []
    for batch in batches():
        output = model(**(take or model.local_batch)(batch))
        loss = output.loss
        torch.testing.assert_close(output.losses.mean(), loss.detach())
        assert output.losses.shape == (plan.num_microbatches,)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.global_loss(loss).item())
        norms.append(optimizer.grad_norm.item())
    return losses, norms


LAYOUTS = [
    {"dp": 4, "zero": 2},
    {"dp": 2, "tp": 2, "zero": 3, "mode": "static"},
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "zero": 3, "num_microbatches": 2},
    {"tp": 4},
    {"pp": 4, "num_microbatches": 4},
    {"dp": 2, "tp": 2, "zero": 1},
    {"dp": 2, "pp": 2, "zero": 1, "num_microbatches": 2},
    {"tp": 2, "pp": 2, "num_microbatches": 2, "schedule": "gpipe", "split": ["layers.1"]},
    {"dp": 2, "tp": 2, "num_microbatches": 4},
    {"dp": 2, "pp": 2, "num_microbatches": 2, "axis_order": ("dp", "tp", "pp")},
    {"pp": 4, "num_microbatches": 8, "schedule": "zb_h1"},
    {"dp": 2, "pp": 2, "zero": 2, "num_microbatches": 4, "schedule": "zb_h2"},
    {"dp": 2, "pp": 2, "zero": 3, "num_microbatches": 2, "schedule": "zb_v"},
    {"tp": 2, "pp": 2, "num_microbatches": 4, "schedule": "dual_pipe_v"},
    {"dp": 2, "pp": 2, "zero": 1, "num_microbatches": 4, "schedule": "interleaved_1f1b"},
    {"tp": 2, "pp": 2, "num_microbatches": 2, "schedule": "looped_bfs", "split": ["layers.1", "layers.2", "head"]},
    {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "interleaved_zero_bubble"},
    {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "auto", "stages_per_rank": 2},
    {"dp": 2, "tp": 2, "num_microbatches": 4, "mode": "static"},
    {"tp": 2, "pp": 2, "num_microbatches": 4, "mode": "static"},
    {"tp": 2, "pp": 2, "num_microbatches": 4, "schedule": "zb_v", "mode": "static"},
    {"tp": 2, "pp": 2, "num_microbatches": 2, "mode": "compile"},
]


def words(value):
    return " ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


@halved
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=words)
@ranks(4)
def test_layout_trains_as_one_process(layout, dropout, compile_with):
    compile_with("aot_eager")
    losses, norms = train(vescale.Plan(**layout), dropout=dropout)
    plain_losses, plain_norms = train_plain(dropout)
    assert losses == pytest.approx(plain_losses, rel=1e-10)
    assert norms == pytest.approx(plain_norms, rel=1e-10)


class HeadFirst(nn.Module):
    """Registers its head before the blocks that it follows."""

    def __init__(self):
        super().__init__()
        self.head, self.layers = nn.Linear(8, 2), nn.ModuleList(Block(0.0) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@ranks(2)
def test_a_head_that_is_registered_first():
    torch.manual_seed(0)
    module, batch = HeadFirst().double(), next(batches())
    expected = nn.functional.mse_loss(module(batch["x"]), batch["target"])
    options = {"loss_fn": nn.functional.mse_loss, "module_plan": MODULE_PLAN, "example_inputs": batch}
    model, _ = vescale.parallelize(vescale.Plan(pp=2, num_microbatches=2), module, torch.optim.SGD, **options)
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_knows_the_stages_of_every_schedule(schedule):
    actions = PipelinePlan(schedule=schedule, num_microbatches=4).actions(2)
    assert vescale.Plan(pp=2, schedule=schedule, num_microbatches=4).num_stages == actions.num_stages


@ranks(2)
def test_sharded_parameters_have_values_in_unsharded_and_parts_in_sharded_state_dict():
    model, _ = vescale.parallelize(vescale.Plan(dp=2, zero=3), build(), torch.optim.SGD)
    expected = build().state_dict()
    state = model.sharded_state_dict()
    assert state.keys() == expected.keys()
    with pytest.raises(RuntimeError, match=r"'clone' reads or writes the parameter 'head.weight', which has no values"):
        model.head.weight.clone()
    with model.unsharded():
        assert all(torch.equal(value, expected[fqn]) for fqn, value in model.sharded_state_dict().items())
    assert sum(value.tensor.numel() for value in state.values()) <= sum(v.numel() for v in expected.values()) // 2 + 64
    model.load_state_dict({fqn: value + 1 for fqn, value in expected.items()})
    with model.unsharded():
        assert all(torch.equal(value, expected[fqn] + 1) for fqn, value in model.sharded_state_dict().items())


@ranks(2)
def test_wrong_slice_is_noticed():
    """The comparison above can fail: here every rank takes the first half of the batch."""
    losses, _ = train(vescale.Plan(dp=2), take=lambda batch: {name: value[:8] for name, value in batch.items()})
    assert losses != pytest.approx(train_plain()[0], rel=1e-4)


@ranks(2)
def test_loss_is_the_same_on_every_stage():
    losses, _ = train(vescale.Plan(pp=2, num_microbatches=2))
    every = [None, None]
    dist.all_gather_object(every, losses)
    assert every[0] == every[1]


@ranks(2)
def test_dropout_of_one_micro_batch_at_a_time_is_noticed():
    """The comparison above can fail: here every micro-batch draws by itself."""
    losses, _ = train(vescale.Plan(pp=2, num_microbatches=2), dropout=0.2)
    adamw = functools.partial(torch.optim.AdamW, lr=0.02)
    plan = vescale.Plan(pp=2, num_microbatches=2)
    model, _ = vescale.parallelize(
        plan, build(dropout=0.2), adamw, loss_fn=nn.functional.mse_loss, module_plan=MODULE_PLAN, per_rank=True
    )
    assert model(**model.local_batch(next(batches()))).loss.item() != pytest.approx(losses[0], rel=1e-4)


@ranks(1)
def test_statistics_of_micro_batches_are_refused():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    plan = vescale.Plan(num_microbatches=2)
    model, _ = vescale.parallelize(plan, module, torch.optim.SGD, loss_fn=nn.functional.mse_loss)
    batch = {"input": torch.ones(4, 8), "target": torch.ones(4, 8)}
    text = (
        "expected that Sequential treats every row alone, since 2 micro-batches are parts of one batch, got batch_norm "
        "in module '1'"
    )
    with pytest.raises(RuntimeError, match=text):
        model(**batch)
    model.eval()
    assert model(**batch).loss.dim() == 0


@ranks(2)
def test_batch_that_does_not_divide_is_refused_on_every_rank():
    model, _ = vescale.parallelize(vescale.Plan(dp=2), build(), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"expected a multiple of dp = 2 sequences, got 3"):
        model.local_batch({"x": torch.zeros(3, 8)})
