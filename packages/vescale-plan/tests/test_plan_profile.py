"""What `profile` finds in a model: from a config, from attributes, from shapes; never by allocating."""

import pytest
import torch
from torch import nn

from vescale.plan import profile


def test_mixtral_like_tree_on_the_meta_device(build_mixtral):
    found = profile(build_mixtral())
    assert found.num_parameters == 46_702_792_704
    sizes = (found.num_blocks, found.hidden, found.heads, found.kv_heads, found.head_dim, found.ffn, found.vocab)
    assert sizes == (32, 4096, 32, 8, 128, 14336, 32000)
    assert (found.experts, found.experts_per_token, found.gated, found.dtype) == (8, 2, True, "bfloat16")
    assert (found.blocks, found.dropout, found.notes) == ("model.layers", False, ())


def test_parameters_have_positions_and_shards(build_mixtral):
    found = {info.fqn: info for info in profile(build_mixtral(num_hidden_layers=2)).parameters}
    assert found["model.embed_tokens.weight"].positions == (-1,)
    assert found["model.layers.1.self_attn.q_proj.weight"].positions == (1,)
    assert found["model.norm.weight"].positions == (2,)
    assert found["lm_head.weight"].positions == (2,)
    sharded = {fqn.replace("layers.0.", "").replace("layers.1.", "") for fqn, info in found.items() if info.sharded}
    assert sharded == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.mlp.experts.gate_up_proj",
        "model.mlp.experts.down_proj",
        *(f"model.self_attn.{name}_proj.weight" for name in "qkvo"),
    }


def test_tied_parameter_is_listed_once_at_both_places(build_mixtral):
    tied, plain = profile(build_mixtral(tied=True)), profile(build_mixtral())
    assert plain.num_parameters - tied.num_parameters == 32000 * 4096
    assert {info.fqn: info.positions for info in tied.parameters}["model.embed_tokens.weight"] == (-1, 32)


def test_patterns_say_what_is_sharded(build_mixtral):
    model = build_mixtral(num_hidden_layers=2)
    found = profile(model, tp_sharded=[r"model\.layers\.\d+\.self_attn\.q_proj\.weight"])
    assert [info.fqn for info in found.parameters if info.sharded] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ]
    text = r"got none for 'q_proj'; write a regular expression of full names such as \['model"
    with pytest.raises(ValueError, match=text):
        profile(model, tp_sharded=["q_proj"])


def test_sizes_are_found_without_a_config(build_gpt):
    found = profile(build_gpt(3, 64, 4, 200, 100, gated=True, dropout=0.1))
    assert (found.num_blocks, found.hidden, found.heads, found.ffn, found.vocab) == (3, 64, 4, 200, 100)
    assert (found.gated, found.dropout, found.head_dim, found.experts) == (True, True, 16, 0)
    assert not profile(build_gpt(3, 64, 4, 200, 100)).gated
    assert not profile(build_gpt(3, 64, 4, 200, 100)).dropout


def test_torch_encoder_is_understood():
    with torch.device("meta"):
        found = profile(nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True), 6))
    assert (found.num_blocks, found.hidden, found.heads, found.ffn, found.blocks) == (6, 64, 4, 256, "layers")


def test_list_of_experts_is_not_taken_for_the_blocks():
    """Two layers of eight experts: the longest list is inside a block."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

    found = profile(Model())
    assert (found.blocks, found.num_blocks, found.experts) == ("layers", 2, 8)
    assert any("each token goes to 2 of 8 experts" in note for note in found.notes)


def test_sequence_of_layers_is_a_list_of_blocks():
    """Without a ModuleList; entries without parameters do not count."""
    found = profile(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    assert (found.blocks, found.num_blocks) == ("", 2)
    assert [info.positions for info in found.parameters] == [(0,), (0,), (1,), (1,)]


def test_model_without_blocks_says_what_it_lacks():
    found = profile(nn.Linear(8, 32))
    assert (found.num_blocks, found.heads) == (0, 0)
    assert any("no attention heads found" in note for note in found.notes)
    assert "blocks     none found" in str(found)


def test_frozen_parameters_are_marked(build_gpt):
    model = build_gpt(2, 64, 4, 128, 100)
    model.embed.requires_grad_(False)
    assert [info.fqn for info in profile(model).parameters if not info.trainable] == ["embed.weight"]


def test_mixed_dtypes_are_said():
    found = profile(nn.Sequential(nn.Linear(8, 32).to(torch.bfloat16), nn.Linear(32, 8)))
    assert any("most frequent dtype of bfloat16, float32" in note for note in found.notes)


def test_what_is_no_model_is_refused():
    with pytest.raises(
        TypeError,
        match=r"profile: expected an nn\.Module, functools\.partial.* or a config of Hugging Face as model, got 3",
    ):
        profile(3)
    with pytest.raises(ValueError, match="profile: expected a model with parameters, got ReLU"):
        profile(nn.ReLU())


def test_hugging_face_models_are_understood():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        mixtral = profile(transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=2)))
        llama = profile(transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2)))
        gpt2 = profile(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2)))
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.gated, mixtral.kv_heads) == (8, 2, True, 8)
    assert (llama.experts, llama.gated, llama.ffn, llama.heads) == (0, True, 11008, 32)
    assert (gpt2.gated, gpt2.ffn, gpt2.dropout, gpt2.num_blocks) == (False, 3072, True, 2)
    assert {info.fqn: info.positions for info in gpt2.parameters}["transformer.wte.weight"] == (-1, 2)
