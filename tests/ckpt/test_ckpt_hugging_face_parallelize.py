"""Weights of a hub's folder go into a model of `vescale.parallelize`, and from there to `from_pretrained`."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import vescale
from vescale_testing import halved, run_ranks

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "use_cache": False}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)),
}
PLANS = {
    "dp2_tp2": vescale.Plan(dp=2, tp=2),
    "zero3": vescale.Plan(dp=2, zero=3),
    "pp2": vescale.Plan(pp=2, num_microbatches=2),
}


def build(kind, seed):
    torch.manual_seed(seed)
    return KINDS[kind]()


def load_and_save(kind, plan, original, weights):
    rows = [r"model\.layers\.\d+\.mlp\.experts"] if kind == "mixtral" else []
    model, _ = vescale.parallelize(plan, build(kind, 1), torch.optim.AdamW, row_wise=rows)
    vescale.checkpoint.load_hf(original, model)
    vescale.checkpoint.save_hf(weights, model)


@halved
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(tmp_path, kind, plan):
    model = build(kind, 0)
    model.save_pretrained(tmp_path / "original")
    folders = str(tmp_path / "original"), str(tmp_path / "weights")
    run_ranks(load_and_save, PLANS[plan].world_size, kind, PLANS[plan], *folders)
    state = type(model).from_pretrained(tmp_path / "weights").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    other = build(kind, 1).state_dict()
    assert not all(torch.equal(other[name], value) for name, value in model.state_dict().items())
