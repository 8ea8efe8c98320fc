"""`Plan(exact=8)`: unmodified Hugging Face models train with the bits of one process under every plan."""

import contextlib
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import vescale
from vescale.dtensor import UnsupportedOperator, exact, init_device_mesh, set_exact
from vescale.dtensor.extension import exact_num_blocks
from vescale.pipe import PipelineEngine, PipelinePlan
from vescale.plan import Plan
from vescale_testing import ranks, run_ranks

DECODER = {
    "vocab_size": 255,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "attention_dropout": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def gpt2():
    config = GPT2Config(vocab_size=255, n_embd=32, n_layer=2, n_head=8, n_positions=16, bos_token_id=None)
    return GPT2LMHeadModel(config)


def llama():
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4, output_router_logits=True))


FAMILIES = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


def build(family):
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(255, (8, 9), generator=generator)
        yield {"input_ids": ids, "labels": ids, "use_cache": False}


class AdamW(torch.optim.AdamW):
    """Keeps the last gradient, clipped, in its state, where a plan that cuts gradients brings it together."""

    def step(self, closure=None):
        super().step(closure)
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                self.state[param]["gradient"] = param.grad.clone()


def train_alone(family, *, steps=2, num_blocks=8):
    """Return losses and norms, and by name parameters, gradients and AdamW's state, of an unmodified loop."""
    model = build(family)
    optimizer = AdamW(model.parameters(), lr=0.01)
    found = []
    torch.manual_seed(5)
    with contextlib.nullcontext() if num_blocks is None else exact(num_blocks=num_blocks):
        for batch in batches(steps):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
            optimizer.step()
    state = optimizer.state_dict()["state"]
    parameters = dict(model.named_parameters())
    return found, {name: [parameters[name].detach(), *state[i].values()] for i, name in enumerate(parameters)}


def train(family, *, steps=2, num_blocks=8, **fields):
    plan = Plan(exact=num_blocks, clip_grad_norm=1.0, **fields)
    try:
        model, optimizer = vescale.parallelize(plan, build(family), functools.partial(AdamW, lr=0.01))
        assert exact_num_blocks() == num_blocks
        found = []
        torch.manual_seed(5)
        for batch in batches(steps):
            optimizer.zero_grad()
            loss = model(**model.local_batch(batch)).loss
            loss.backward()
            optimizer.step()
            found += [model.global_loss(loss), optimizer.grad_norm]
        state, parameters = optimizer.full_state_dict()["state"], model.state_dict()
    finally:
        set_exact(None)
    names = [name for name, each in model.named_parameters() if each.requires_grad]  # that this rank's stage owns
    return found, {name: [parameters[name], *state[i].values()] for i, name in enumerate(names)}


def num_equal(actual, expected):
    """Return how many tensors are equal, and how many there are."""
    pairs = list(zip(actual[0], expected[0], strict=True))
    for name, tensors in actual[1].items():
        pairs += zip(tensors, expected[1][name], strict=True)
    return sum(torch.equal(*pair) for pair in pairs), len(pairs)


CASES = [
    ("gpt2", {"dp": 2, "zero": 1}),
    ("llama", {"dp": 2, "zero": 3, "mode": "static"}),
    ("mixtral", {"dp": 2, "zero": 2, "num_microbatches": 2}),
    ("gpt2", {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True}),
    ("llama", {"num_microbatches": 4}),
    ("mixtral", {"dp": 2, "ep": 2}),
    ("llama", {"dp": 2, "recompute": 1}),
    ("gpt2", {"pp": 2, "num_microbatches": 4}),
    ("llama", {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"}),
    ("mixtral", {"dp": 2, "pp": 2, "zero": 3}),
]
LAYOUTS = [
    {"num_microbatches": 4},
    *({"dp": dp, "zero": zero} for dp in (2, 4, 8) for zero in range(4)),
    *({"tp": tp, "sequence_parallel": sp} for tp in (2, 4) for sp in (False, True)),
    *({"dp": 2, "tp": 2, "zero": zero} for zero in range(4)),
    {"dp": 4, "tp": 2, "zero": 3, "sequence_parallel": True},
    {"dp": 2, "tp": 4, "zero": 1},
    {"dp": 4, "dp_replicate": 2, "zero": 2},
    {"dp": 2, "num_microbatches": 2, "zero": 2},
    *({"pp": 2, "num_microbatches": 4, "schedule": schedule} for schedule in ("1f1b", "zb_h1")),
    {"pp": 2, "tp": 2, "num_microbatches": 2},
    *({"dp": 2, "pp": 2, "zero": zero} for zero in range(3)),
    {"dp": 2, "pp": 2, "tp": 2, "zero": 2, "schedule": "zb_h1"},
    {"dp": 4, "pp": 2, "dp_replicate": 2, "zero": 1},
]
SPLIT = [["model.embed_tokens"], ["model.layers.0"], ["model.layers.1"], ["model.norm", "lm_head"]]
DECODERS = [  # not GPT-2, whose stages share a weight
    {"dp": 2, "pp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "split": SPLIT},
]
EXPERTS = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "zero": 1},
    {"dp": 2, "ep": 2, "tp": 2},
    {"tp": 2, "etp": 2},
    {"dp": 2, "ep": 2, "pp": 2},
]
STEPS = 10


def world_size_of(layout):
    return math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp"))


def check(family, layout, steps):
    @ranks(world_size_of(layout), timeout=600)
    def on_every_rank():
        expected = train_alone(family, steps=steps)
        equal, count = num_equal(train(family, steps=steps, **layout), expected)
        assert equal == count

    on_every_rank()


@functools.cache
def reference(family):
    """Return what ten steps in one process have; other tests share it."""
    (found,) = run_ranks(train_alone, 1, family, steps=STEPS, timeout=600)
    return found


def train_all(family, layouts, expected, store):
    """Train by one layout after another on the same ranks, and return those whose bits differ."""
    rank, world_size, wrong = dist.get_rank(), dist.get_world_size(), []
    for number, layout in enumerate(layouts):
        dist.barrier()  # no rank is still connecting
        dist.destroy_process_group()  # and all that were made in it
        own = dist.FileStore(f"{store}.{number}", world_size)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        try:
            equal, count = num_equal(train(family, steps=STEPS, **layout), expected)
        except Exception as error:
            error.add_note(f"{family} by {layout}")
            raise
        wrong += [f"{layout}: {equal} of {count} tensors are equal"] if equal < count else []
    return wrong


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_bits_are_those_of_one_process(family, layout):
    check(family, layout, steps=2)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps_on_every_layout(family, world_size, tmp_path):
    layouts = LAYOUTS + (EXPERTS if family == "mixtral" else []) + (DECODERS if family != "gpt2" else [])
    layouts = [layout for layout in layouts if world_size_of(layout) == world_size]
    expected, store = reference(family), str(tmp_path / "store")
    timeout = 300 * len(layouts)
    for wrong in run_ranks(train_all, world_size, family, layouts, expected, store, timeout=timeout):
        assert not wrong


@ranks(2)
def test_without_the_mode_and_with_another_number_of_blocks_bits_differ():
    expected = train_alone("llama")
    equal, count = num_equal(train("llama", dp=2, num_blocks=4), expected)
    assert equal < count / 2
    outside = train_alone("llama", num_blocks=None)
    assert num_equal(outside, expected)[0] < count / 2
    assert num_equal(train("llama", dp=2, num_blocks=None), outside)[0] < count


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        ({"dp": 2}, {"loss_fn": nn.functional.mse_loss}, r"expected no loss_fn for Plan\(exact=8, dp=2\)"),
        ({"dp": 2}, {"per_rank": True}, r"expected no per_rank=True for Plan\(exact=8, dp=2\)"),
    ],
)
def test_what_cannot_be_combined_is_refused(fields, options, text):
    with pytest.raises(ValueError, match=text):
        vescale.parallelize(Plan(exact=8, **fields), build("llama"), torch.optim.AdamW, **options)


def test_other_optimizers_and_contexts_are_refused():
    with pytest.raises(ValueError, match="expected an element-wise optimizer"):
        vescale.parallelize(Plan(exact=8), build("llama"), vescale.MuonWithAdamW(lr=0.02, adamw_lr=0.01))
    with exact(num_blocks=4), pytest.raises(ValueError, match=r"of 4 blocks, got Plan\(exact=8\)"):
        vescale.parallelize(Plan(exact=8), build("llama"), torch.optim.AdamW)


def refuse_parts_of_a_batch(mesh):
    engine = PipelineEngine(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, PipelinePlan(num_microbatches=2), loss_fn=torch.sum
    )
    with (
        exact(num_blocks=8),
        pytest.raises(UnsupportedOperator, match=r"expected one micro-batch, got part 1 of 2 of a batch, .* Pipeline"),
    ):
        engine(torch.ones(8, 4))


@ranks(1)
def test_micro_batches_of_an_engine_are_refused():
    refuse_parts_of_a_batch(init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))
