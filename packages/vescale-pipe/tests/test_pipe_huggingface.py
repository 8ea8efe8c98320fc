"""Unmodified Hugging Face models in pipelines equal one process, bit for bit in float64.

Both sides accumulate gradients over the same micro-batches, so every sum has the same terms in the same order.
"""

import pytest
import torch

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import halved, ranks

transformers = pytest.importorskip("transformers")

# named here, so that their modules are imported once, before the ranks are forked
FAMILIES = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(family, attention, layers=4):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    common = {"vocab_size": 40, "attn_implementation": attention, "bos_token_id": None, "eos_token_id": None}
    make_config, make_model = FAMILIES[family]
    if family == "gpt2":
        drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        shape = {"n_embd": 16, "n_head": 4, "n_layer": layers, "n_positions": 16, "tie_word_embeddings": False, **drops}
    else:
        experts = {"num_local_experts": 4} if family == "mixtral" else {}
        shape = {"num_hidden_layers": layers, **SHAPE, **experts}
    config = make_config(**shape, **common)
    config._experts_implementation = "eager"  # the grouped kernels do not take float64
    return make_model(config)


def token_batch(rows, *, padded):
    ids = torch.randint(40, (rows, 6), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        batch["attention_mask"] = (torch.arange(6) < torch.arange(rows)[:, None] % 3 + 4).long()
    return batch


def loss_of(model, **batch):
    return model(**batch).loss


def check_equal(family, attention, plan, helpers, *, padded=False, layers=4, rows=4):
    train_one_process, pipeline_mesh, differences = helpers
    batch = token_batch(rows, padded=padded)
    expected = train_one_process(build(family, attention, layers), loss_of, batch, plan.num_microbatches)
    model = build(family, attention, layers)
    engine = PipelineEngine(model, pipeline_mesh(), plan)
    loss = engine(**batch)
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}
    return engine


@pytest.fixture
def helpers(train_one_process, pipeline_mesh, differences):
    return train_one_process, pipeline_mesh, differences


@halved
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mixtral", "llama", "gpt2"])
@ranks(2)
def test_two_stages(family, attention, helpers):
    engine = check_equal(family, attention, PipelinePlan("1f1b", 4), helpers)
    assert len(engine.transfers) == 1  # the hidden states alone: masks and rotary tables are computed everywhere


@pytest.mark.parametrize("family", ["mixtral", "llama", "gpt2"])
@ranks(2)
def test_padding_masks(family, helpers):
    check_equal(family, "sdpa", PipelinePlan("gpipe", 2), helpers, padded=True)


@ranks(3)
def test_mixtral_on_three_stages(helpers):
    check_equal("mixtral", "sdpa", PipelinePlan("1f1b", 4), helpers, layers=5)


@ranks(4)
def test_mixtral_on_four_stages_with_fewer_microbatches(helpers):
    check_equal("mixtral", "eager", PipelinePlan("1f1b", 2), helpers)


@ranks(2)
def test_checkpointed_blocks_recompute_in_the_backward(helpers):
    train_one_process, pipeline_mesh, differences = helpers
    batch = token_batch(4, padded=False)
    expected = train_one_process(build("llama", "eager"), loss_of, batch, 2)
    model = build("llama", "eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    PipelineEngine(model.train(), pipeline_mesh(), PipelinePlan("1f1b", 2))(**batch).backward()
    assert differences(model, expected) == {}
