"""Records of every kind of run: what a plan changes is no difference, what the program changes is named."""

import functools
import os
import signal

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import vescale
from vescale.dtensor import Replicate, Shard
from vescale_testing import run_ranks

WIDTH, ROWS = 8, 16
MODULE_PLAN = {
    "parameter": {r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)}, r"layers\.\d+\.down\.weight": {"tp": Shard(1)}},
    "forward": {r"layers\.\d+\.up\.input": [{"tp": Replicate()}], r"layers\.\d+\.down\.output": [{"tp": Replicate()}]},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.dropout(self.up(x).tanh()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(dtype=torch.float64, num_steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        yield {"x": x, "target": x[:, :2].sin()}


def adamw(model_or_parameters, lr=0.02):
    parameters = getattr(model_or_parameters, "parameters", lambda: model_or_parameters)()
    return torch.optim.AdamW(parameters, lr=lr)


def plain(record, *, dtype=torch.float64, scale=1, parts=1, num_steps=2, model=None, autocast=False):
    """Train in one process, with the batch in parts whose gradients are accumulated."""
    model = build(dtype) if model is None else model
    optimizer = adamw(model)
    with record(model, optimizer):
        for batch in batches(dtype, num_steps):
            for x, target in zip(batch["x"].chunk(parts), batch["target"].chunk(parts), strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = model(x)
                (nn.functional.mse_loss(output, target) * scale / parts).backward()
            optimizer.step()
            optimizer.zero_grad()


def by_plan(record, *, dtype=torch.float64, parts=1, lr=0.02, **fields):
    model, optimizer = vescale.parallelize(
        vescale.Plan(**fields),
        build(dtype),
        functools.partial(adamw, lr=lr),
        loss_fn=nn.functional.mse_loss,
        module_plan=MODULE_PLAN,
    )
    with record(model, optimizer):
        for batch in batches(dtype):
            for part in range(parts):
                rows = {name: value.chunk(parts)[part] for name, value in batch.items()}
                (model(**model.local_batch(rows)).loss / parts).backward()
            optimizer.step()
            optimizer.zero_grad()


def saved(folder, run, **settings):
    run(functools.partial(vescale.record, folder, **settings))
    return folder


# --- what a plan changes is no difference ---

SINGLE, HALF = {"dtype": torch.float32}, {"dtype": torch.bfloat16}
KINDS = {
    "bfloat16 parameters": (HALF, {"dp": 2, "zero": 1, **HALF}),
    "bfloat16 parameters, sharded": (HALF, {"tp": 2, **HALF}),
    "autocast": ({**SINGLE, "autocast": True}, {"dp": 2, "autocast": "bfloat16", **SINGLE}),
    "ZeRO 3 in host memory": ({}, {"dp": 2, "zero": 3, "offload": True}),
    "hybrid sharding": ({}, {"dp": 4, "dp_replicate": 2, "zero": 3}),
    "accumulation by the loop": ({"parts": 2}, {"dp": 2, "parts": 2}),
    "accumulation by the plan": ({}, {"dp": 2, "zero": 2, "num_microbatches": 4}),
    "recomputed blocks": ({}, {"dp": 2, "zero": 3, "recompute": 1}),
    "recomputed blocks, static": ({}, {"tp": 2, "recompute": 1, "mode": "static"}),
}
SLOW = ("accumulation by the plan", "recomputed blocks", "hybrid sharding")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind in SLOW)) for kind in KINDS])
def test_no_kind_of_plan_differs(kind, tmp_path):
    alone, planned = KINDS[kind]
    world = planned.get("dp", 1) * planned.get("tp", 1)
    saved(tmp_path / "a", functools.partial(plain, **alone))
    run_ranks(functools.partial(saved, tmp_path / "b", functools.partial(by_plan, **planned)), world, timeout=200)
    comparison = vescale.compare(tmp_path / "a", tmp_path / "b")
    assert comparison.is_same, str(comparison)
    assert comparison.compared >= 150
    assert not comparison.uncompared
    saved(tmp_path / "other", functools.partial(plain, **alone, scale=2))
    first = vescale.compare(tmp_path / "other", tmp_path / "b").first
    assert (first.step, first.kind, first.fqn, first.what) == (0, "output gradient", "head", "values")


def test_another_number_of_parts_is_named(tmp_path):
    a, b = saved(tmp_path / "a", plain), saved(tmp_path / "b", functools.partial(plain, parts=2))
    first = vescale.compare(a, b).first
    assert (first.what, first.fqn) == ("calls", "")
    assert "was called once in A and 2 times in B" in first.verdict


# --- models with a loss, experts over ranks ---

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = (
    {"dp": 2, "zero": 1},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "zero": 2},
    {"tp": 2, "etp": 2},
    {"pp": 2, "num_microbatches": 2},
)


def mixtral(record, swapped=False, **fields):
    """Train Mixtral, on one rank without a plan."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**CONFIG, use_cache=False)).train()
    if swapped:
        experts = model.model.layers[1].mlp.experts
        experts.down_proj.data = experts.down_proj.data.flip(0)
    if fields:
        model, optimizer = vescale.parallelize(vescale.Plan(**fields), model, adamw)
    else:
        optimizer = adamw(model)
    generator = torch.Generator().manual_seed(1)
    with record(model, optimizer):
        for _ in range(2):
            ids = torch.randint(64, (8, 9), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            model(**(model.local_batch(batch) if fields else batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("fields", EXPERTS, ids=lambda fields: " ".join(f"{k}={v}" for k, v in fields.items()))
def test_experts_and_losses(fields, tmp_path):
    vescale.emulate(
        vescale.Plan(**fields), functools.partial(saved, tmp_path / "b", functools.partial(mixtral, **fields))
    )
    comparison = vescale.compare(saved(tmp_path / "a", mixtral), tmp_path / "b")
    assert comparison.is_same, str(comparison)
    assert comparison.steps == [0, 1]
    assert comparison.compared >= 290
    first = vescale.compare(saved(tmp_path / "a", functools.partial(mixtral, swapped=True)), tmp_path / "b").first
    assert (first.kind, first.fqn) == ("initial parameter", "model.layers.1.mlp.experts.down_proj")


# --- emulated ranks ---


@pytest.mark.parametrize("fields", [{"dp": 2, "zero": 3, "recompute": 1}, {"tp": 2, "recompute": 1}], ids=["dp", "tp"])
def test_emulated_ranks_record_what_processes_do(fields, tmp_path):
    run = functools.partial(by_plan, **fields)
    run_ranks(functools.partial(saved, tmp_path / "processes", run), 2, timeout=200)
    vescale.emulate(2, functools.partial(saved, tmp_path / "threads", run))
    comparison = vescale.compare(tmp_path / "processes", tmp_path / "threads", bits=True)
    assert comparison.is_same, str(comparison)
    assert comparison.compared >= 150
    assert not comparison.uncompared
    vescale.emulate(2, functools.partial(saved, tmp_path / "other", functools.partial(run, lr=0.2)))
    first = vescale.compare(tmp_path / "processes", tmp_path / "other", bits=True).first
    assert (first.step, first.kind) == (0, "parameter")


# --- two versions of a program ---


class Renamed(Net):
    """Another version: a block's first layer has another name, and there is a norm."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.widen = layer.up
            del layer.up
            layer.forward = functools.partial(self.forward_of, layer)
        self.norm = nn.LayerNorm(WIDTH)

    @staticmethod
    def forward_of(layer, x):
        return x + layer.down(layer.dropout(layer.widen(x).tanh()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_names_of_one_version_are_listed_and_the_rest_is_compared(tmp_path):
    a = saved(tmp_path / "a", plain)
    torch.manual_seed(0)
    b = saved(tmp_path / "b", functools.partial(plain, model=Renamed().double()))
    comparison = vescale.compare(a, b)
    assert (comparison.first.kind, comparison.first.fqn) == ("input", "head")
    assert "the forward of the model, between the output of layers.2" in comparison.first.verdict
    assert comparison.uncompared["tensor of layers.*.up recorded by A only"] == 9
    assert comparison.uncompared["tensor of layers.*.widen.weight recorded by B only"] == 9
    assert comparison.uncompared["tensor of norm recorded by B only"] == 3


# --- runs that end early ---


def killed(record, at):
    model = build()
    optimizer = adamw(model)
    with record(model, optimizer):
        for step, batch in enumerate(batches(num_steps=3)):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["target"])
            if step == at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("at", [0, 2])
def test_a_killed_run_has_the_steps_that_it_ended(at, tmp_path):
    child = os.fork()
    if not child:
        saved(tmp_path / "a", functools.partial(killed, at=at))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    comparison = vescale.compare(tmp_path / "a", saved(tmp_path / "b", functools.partial(plain, num_steps=3)))
    assert comparison.is_same
    assert comparison.steps == list(range(at))
    assert comparison.uncompared["A: the record ends with no last line: the run was ended"] == 1
    assert comparison.uncompared["step recorded by B only"] == 3 - at


# --- what computes in fewer bits inside ---


class Scaled(nn.Module):
    """Rounds to float32 inside, where it is told to, or is wrong."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return x.float().double() if self.kind == "rounded" else x * 1.001 if self.kind == "wrong" else x * 1


@pytest.mark.parametrize("kind", ["rounded", "wrong"])
def test_a_difference_as_small_as_a_rounding_to_float32_is_said(kind, tmp_path):
    for each in ("right", kind):
        model = Scaled(each)
        with vescale.record(tmp_path / each, model):
            model(torch.linspace(1, 2, 64, dtype=torch.float64))
    first = vescale.compare(tmp_path / "right", tmp_path / kind).first
    assert (first.kind, first.fqn) == ("output", "")
    assert ("as small as a rounding to float32" in first.verdict) == (kind == "rounded")


# --- many steps ---


def test_a_thousand_steps_stay_within_the_bound(tmp_path):
    model = nn.Linear(2, 2)
    with vescale.record(tmp_path / "bounded", model, max_bytes=100_000), vescale.record(tmp_path / "whole", model):
        for _ in range(1000):
            model(torch.ones(1, 2))
    assert (tmp_path / "whole" / "rank00000.jsonl").stat().st_size > 1_000_000
    assert 95_000 < (tmp_path / "bounded" / "rank00000.jsonl").stat().st_size <= 100_000
    comparison = vescale.compare(tmp_path / "bounded", tmp_path / "whole")
    assert comparison.is_same
    assert 20 < len(comparison.steps) < 200
    assert comparison.uncompared["A: steps after max_bytes was reached"] == 1
    with pytest.raises(ValueError, match=r"record: expected max_bytes of at least \d+ for .* got 99"):
        vescale.record(tmp_path, model, max_bytes=99).__enter__()
