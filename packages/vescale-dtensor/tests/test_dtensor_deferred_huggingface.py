"""Hugging Face models, unmodified: deferred and materialized they equal the eager constructor bit for bit."""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, deferred_init, init_device_mesh, is_deferred, materialize
from vescale_testing import ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **SIZES,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def mixtral():
    config = transformers.MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM, config


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER)


def gpt2():
    config = transformers.GPT2Config(**SIZES, n_embd=24, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel, config


MODELS = {"mixtral": mixtral, "llama": llama, "gpt2": gpt2}


def from_config(_, config):
    return transformers.AutoModelForCausalLM.from_config(config)


def from_config_bfloat16(_, config):
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


FORMS = {
    "constructor": lambda cls, config: cls(config),
    "to float64": lambda cls, config: cls(config).to(torch.float64),
    "from_config": from_config,
    "from_config bfloat16": from_config_bfloat16,
}


def attributes(model):
    return {name: getattr(p, "_is_hf_initialized", None) for name, p in model.named_parameters()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_the_model_equals_the_eager_one(model, form):
    cls, config = MODELS[model]()
    torch.manual_seed(7)
    eager = FORMS[form](cls, config)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    deferred = deferred_init(FORMS[form], cls, config)
    assert is_deferred(deferred)
    materialize(deferred)
    assert torch.equal(state, torch.get_rng_state())
    for kind in ("named_parameters", "named_buffers"):
        expected, actual = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (eager, deferred))
        assert list(expected) == list(actual)
        for name, tensor in expected.items():
            assert tensor.dtype == actual[name].dtype, name
            assert torch.equal(tensor, actual[name]), name
    assert attributes(eager) == attributes(deferred)
    if form != "constructor":
        return  # not every operator of these models runs in other dtypes
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(eager.eval()(tokens).logits, deferred.eval()(tokens).logits)


def test_float64_by_default_dtype():
    cls, config = mixtral()

    def ctor():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return cls(config)
        finally:
            torch.set_default_dtype(before)

    torch.manual_seed(7)
    eager = ctor()
    torch.manual_seed(7)
    deferred = materialize(deferred_init(ctor))
    assert deferred.lm_head.weight.dtype == torch.float64
    for (name, one), other in zip(eager.state_dict().items(), deferred.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_gpt2_ties_its_embeddings():
    cls, config = gpt2()
    model = materialize(deferred_init(cls, config))
    assert model.lm_head.weight is model.transformer.wte.weight


def plan(name, tensor):
    """Uneven shards of everything: 61 rows, 24 columns, 3 experts over 2 ranks."""
    if "norm" in name or "inv_freq" in name or tensor.dim() == 0:
        return None
    return [Shard(tensor.dim() - 1)] if name.endswith(("o_proj.weight", "down_proj")) else [Shard(0)]


@pytest.mark.parametrize("model", MODELS)
@ranks(2)
def test_each_rank_has_its_slice(model):
    cls, config = MODELS[model]()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(7)
    eager = cls(config).to(torch.float64)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    deferred = deferred_init(lambda: cls(config).to(torch.float64))
    materialize(deferred, mesh, plan)
    assert torch.equal(state, torch.get_rng_state())
    actual = dict(deferred.named_parameters())
    for name, parameter in eager.named_parameters():
        placements = plan(name, parameter)
        if placements is None:
            assert torch.equal(actual[name], parameter), name
        else:
            chunks = parameter.chunk(2, dim=placements[0].dim)
            assert torch.equal(actual[name].to_local(), chunks[mesh.get_local_rank()]), name


@ranks(2)
def test_a_pipeline_stage_has_only_its_layers():
    """Modules that a stage does not have still draw; the data-parallel axis replicates."""
    cls, config = mixtral()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(7)
    eager = cls(config)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    deferred = deferred_init(cls, config)
    deferred.model.layers[mesh.get_local_rank()] = torch.nn.Identity()
    materialize(deferred, mesh, lambda *_: [Replicate()])
    assert torch.equal(state, torch.get_rng_state())
    expected = dict(eager.named_parameters())
    for name, parameter in deferred.named_parameters():
        assert torch.equal(parameter.to_local(), expected[name]), name


def test_one_more_draw_before_shows():
    """The negative sibling."""
    cls, config = mixtral()
    torch.manual_seed(7)
    eager = cls(config)
    torch.manual_seed(7)
    torch.rand(1)
    deferred = materialize(deferred_init(cls, config))
    assert not torch.equal(eager.lm_head.weight, deferred.lm_head.weight)
