"""Hugging Face models whose blocks differ: latent attention, experts beside dense layers, an encoder with a decoder."""

import dataclasses

import pytest

from vescale.plan import Cluster, Constraints, Layout, estimate_memory, generate_plan, profile

transformers = pytest.importorskip("transformers")
SEQ = 16


def deepseek():
    return transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        vocab_size=128,
    )


def test_latent_attention_and_experts():
    found = profile(deepseek(), sequence_length=SEQ)
    of_block = {info.fqn.removeprefix("model.layers.3."): info for info in found.parameters if ".layers.3." in info.fqn}
    sharded = {name for name, info in of_block.items() if info.sharded}
    assert {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"} < sharded
    assert not sharded & {"self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.weight"}
    assert {name for name, info in of_block.items() if info.expert} == {
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    dense, mixed = (found.activations.parts[found.activations.order[place]] for place in (2, 4))
    assert dense.kept.per_row.tokens == 0 < mixed.kept.per_row.tokens
    assert (found.num_blocks, found.heads, found.notes) == (5, 4, ())


def test_experts_are_spread_over_data_parallel_ranks():
    """Each rank holds a quarter of the experts of two, and as many tokens as before."""
    found = profile(deepseek(), sequence_length=SEQ)
    experts = sum(info.numel for info in found.parameters if info.expert)
    size = {"global_batch_size": 4, "sequence_length": SEQ}
    whole, spread = (estimate_memory(found, Layout(dp=4, tp=1, pp=1, ep=ep), **size)[0] for ep in (1, 4))
    assert whole.parameters - spread.parameters == 4 * experts * 3 // 4
    assert whole.activations == spread.activations
    one, two = (estimate_memory(found, Layout(dp=1, tp=tp, pp=1), **size)[0] for tp in (1, 2))
    assert two.activations < one.activations


def test_experts_are_used_where_fewer_ranks_do_not_fit():
    found = profile(deepseek(), sequence_length=SEQ)
    run = Constraints(global_batch_size=8, sequence_length=SEQ, tp=1, pp=1, zero=0, memory_fraction=1.0)
    roomy = generate_plan(found, Cluster(8, memory_bytes=2**30), run)
    assert {row.layout.ep for row in roomy.table} == {1}
    limit = max(stage.total for stage in roomy.memory) - 1
    run = dataclasses.replace(run, num_microbatches=1, recompute=None)
    assert generate_plan(found, Cluster(8, memory_bytes=limit), run).ep == 2


def test_an_encoder_and_a_decoder():
    config = transformers.T5Config(d_model=32, d_ff=64, num_layers=3, num_heads=4, d_kv=8, vocab_size=64)
    found = profile(config, sequence_length=SEQ)
    assert (found.num_blocks, found.blocks) == (6, "encoder.block and decoder.block")
    positions = {info.fqn: info.positions for info in found.parameters}
    assert positions["decoder.block.2.layer.0.SelfAttention.q.weight"] == (5,)
    assert positions["shared.weight"] == (-1, 2, 6)  # of encoder and decoder, and of the head
    encoder, decoder = (found.activations.parts[found.activations.order[place]] for place in (2, 5))
    assert decoder.kept.per_row.total > encoder.kept.per_row.total
    assert decoder.forward_flops > encoder.forward_flops


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 64}, (4, 4)),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2}, (4, 2)),
        ({"model_type": "bert", "vocab_size": 64}, (4, 4)),
        ({"model_type": "vit", "image_size": 16, "patch_size": 4}, (4, 4)),
        ({"model_type": "whisper", "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}, (4, 4)),
        ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}, (4, 4)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_families_run_without_data(config, heads):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48}
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[config["model_type"]]
    known = {name: value for name, value in sizes.items() if hasattr(kind(), name)}
    found = profile(
        kind(**known | {name: value for name, value in config.items() if name != "model_type"}), sequence_length=SEQ
    )
    assert found.activations is not None, found.notes
    assert (found.heads, found.kv_heads) == heads


def test_llama_405b_has_plans_of_recomputed_blocks():
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    found = profile(config, sequence_length=8192)
    for devices in (512, 1024):
        run = Constraints(global_batch_size=1024, sequence_length=8192)
        plan = generate_plan(found, Cluster(devices, memory_bytes=80 * 2**30), run)
        plan.check_world(devices)
        assert (plan.recompute, plan.zero, plan.mode) == (1, 3, "static")
        assert plan.tp <= 8
