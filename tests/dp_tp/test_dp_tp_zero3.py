"""Sharded parameters (ZeRO 3) of tensor-parallel modules train, in every mode, as one process does."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

WIDTH, VOCABULARY, STEPS = 8, 12, 3
WHOLE = [{"tp": Replicate()}]
PLAN = {
    "parameter": {
        r"(embed|head)\.weight": {"tp": Shard(0)},
        r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {
        "embed.output": WHOLE,
        r"layers\.\d+\.up\.input": WHOLE,
        r"layers\.\d+\.down\.output": WHOLE,
        "head.input": WHOLE,
        "head.output": WHOLE,
    },
}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


class Net(nn.Module):
    """Layers, perhaps checkpointed, between a token table and a head with the same weight."""

    def __init__(self, *, checkpoints=False, dropout=0.1):
        super().__init__()
        self.checkpoints, self.peeks = checkpoints, False
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        if self.peeks:
            x = x + self.layers[0].down.bias
        return self.head(self.norm(x))


def batches(step):
    """Return the micro-batches of a step: 2 of 4 sequences of 6 tokens."""
    return torch.randint(VOCABULARY, (2, 4, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train_on_one(**options):
    torch.manual_seed(0)
    model = Net(**options).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for tokens in batches(step):
            (loss_of(model, tokens) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach() for fqn, p in model.named_parameters()}


def build(mesh, mode, *, zero=3, checkpoints=False, dropout=0.1, **options):
    torch.manual_seed(0)
    module = parallelize_module(Net(checkpoints=checkpoints, dropout=dropout).double(), mesh["tp"], PLAN)
    set_mode(module, mode)
    return DDP(module, mesh["dp"], zero=zero, **options)


def optimizer_of(model):
    return DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)


def train_steps(model, optimizer, mesh, steps=range(STEPS)):
    coord, size = mesh.get_local_rank("dp"), mesh["dp"].size()
    for step in steps:
        first, last = batches(step)
        with model.no_sync():
            (loss_of(model, first.chunk(size)[coord]) / 2).backward()
        (loss_of(model, last.chunk(size)[coord]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    with model.unsharded():
        whole = {fqn: p.full_tensor() if isinstance(p, DTensor) else p for fqn, p in model.named_parameters()}
        return {fqn: p.detach().clone() for fqn, p in whole.items()}


def train(mesh, mode, **options):
    model = build(mesh, mode, **options)
    train_steps(model, optimizer_of(model), mesh)
    return values(model)


def distance(actual, expected):
    assert actual.keys() == expected.keys()
    return max(float((actual[fqn] - value).abs().max()) for fqn, value in expected.items())


@ranks(4, timeout=240)
def test_training_is_that_of_one_process():
    for options in ({"checkpoints": False, "dropout": 0.1}, {"checkpoints": True, "dropout": 0.1}):
        expected = train_on_one(**options)
        for shape in ((2, 2), (4, 1)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            eager, static = (train(mesh, mode, **options) for mode in ("eager", "static"))
            assert distance(eager, expected) < 1e-10
            assert distance(static, eager) == 0


@ranks(4, timeout=240)
def test_compiled_layers_train_as_one_process(compile_with, caplog):
    compile_with("aot_eager")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for checkpoints in (False, True):
        counters["stats"].clear()
        expected = train_on_one(checkpoints=checkpoints, dropout=0.0)
        assert distance(train(mesh, "compile", checkpoints=checkpoints, dropout=0.0), expected) < 1e-10
        assert counters["stats"]["unique_graphs"] == 1  # whose layers share one
    counters["stats"].clear()
    expected = train_on_one(dropout=0.0)
    units = [r"layers\.\d+\.(up|down)"]  # inside of what would be compiled: their hooks stay outside
    assert distance(train(mesh, "compile", units=units, dropout=0.0), expected) < 1e-10
    assert counters["stats"]["unique_graphs"] > 1
    expected = train_on_one()
    assert distance(train(mesh, "compile"), expected) < 1e-10
    assert "static mode" not in caplog.text


@ranks(4, timeout=120)
def test_settings_change_nothing():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = train(mesh, "static", zero=2)
    for options in (
        {"prefetch": False},
        {"reshard_after_forward": False, "checkpoints": True},
        {"units": []},
        {"units": [r"layers\.\d+\.(up|down)", "norm"]},
    ):
        assert distance(train(mesh, "static", **options), expected) == 0, options
    assert distance(train(mesh, "eager", units=["layers.1.up"]), expected) == 0


@ranks(4, timeout=120)
def test_what_comes_between_steps():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def run(modes, *, writes=0.0):
        model = build(mesh, modes[0])
        optimizer = optimizer_of(model)
        train_steps(model, optimizer, mesh, [0])
        set_mode(model.module, modes[1])
        train_steps(model, optimizer, mesh, [1])
        with model.unsharded(), torch.no_grad():  # parameters move to other memory
            for p in model.parameters():
                p.add_(writes)
            seen = model(batches(0)[0])
        with torch.no_grad():
            outs = [model(batches(step)[0]) for step in (0, 1, 2)]
        train_steps(model, optimizer, mesh, [2])
        return {**values(model), **dict(enumerate(outs)), "seen": seen}

    expected = run(["eager", "eager"], writes=0.125)
    for modes in (["static", "static"], ["eager", "static"], ["static", "eager"]):
        assert distance(run(modes, writes=0.125), expected) == 0, modes
    assert distance(run(["static", "static"]), expected) > 0.01


@ranks(4, timeout=120)
def test_a_call_that_is_new_to_some_ranks_is_rehearsed_by_all():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lengths = [(6, 6), (6, 4), (4, 6), (5, 6), (5, 3)]  # of coord 0 and 1

    def run(mode):
        model = build(mesh, mode)
        optimizer = optimizer_of(model)
        for step, length in enumerate(lengths):
            tokens = batches(step)[0].chunk(2)[mesh.get_local_rank("dp")]
            model.eval()
            loss_of(model, tokens[:, : length[mesh.get_local_rank("dp")]]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(tokens[:, : length[mesh.get_local_rank("dp")]])
        return values(model)

    assert distance(run("static"), run("eager")) == 0


@ranks(4, timeout=120)
def test_parameters_of_other_units_are_guarded_on_local_tensors():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh, "static")
    loss_of(model, batches(0)[0]).backward()
    model.module.peeks = True  # unseen by the rehearsal: the static program reads a parameter that has been freed
    with pytest.raises(
        RuntimeError, match=r"'add' reads or writes the parameter 'layers.0.down.bias', which has no val"
    ):
        model(batches(1)[0])


@ranks(4, timeout=120)
def test_values_come_from_the_gathers(monkeypatch, lost_values):
    """Without what the gathers bring, the comparison fails in every mode."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = train_on_one(checkpoints=False)
    lost_values(monkeypatch, lambda fqn: fqn.startswith("layers.1") and steps > 2)
    for mode in ("eager", "static"):
        steps = 0
        model = build(mesh, mode)
        optimizer = optimizer_of(model)
        for steps in (1, 2, 3):
            train_steps(model, optimizer, mesh, [steps - 1])
        assert distance(values(model), expected) > 1e-3
