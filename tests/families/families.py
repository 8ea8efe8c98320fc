"""Model families of Hugging Face in a tiny size, with random weights and every dropout on."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["FAMILIES", "arguments", "batch", "build", "even_batch"]

FAMILIES = """
    albert apertus arcee bart bert bert-generation big_bird biogpt bloom cohere cohere2 convbert deberta deberta-v2
    deepseek_v3 distilbert doge electra ernie4_5 esm eurobert exaone4 falcon_mamba fnet gemma gemma2 gemma3_text glm
    glm4 gpt2 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense ibert internlm3 jetmoe lfm2 llama llama4_text
    longformer m2m_100 mamba marian mbart mistral mixtral modernbert mpnet mpt mt5 nemotron nomic_bert nystromformer
    olmo olmo2 olmoe openai-gpt opt pegasus persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta roformer
    rwkv seed_oss smollm3 squeezebert stablelm starcoder2 t5 vaultgemma whisper xlm xlm-roberta-xl yoso
""".split()  # noqa: SIM905
VISION = "beit convnext convnextv2 dinov2 regnet resnet swin vit vit_msn".split()  # noqa: SIM905 - of images
FAMILIES += VISION

VOCABULARY, TOKENS = 64, 12
WIDTH, INNER, LAYERS, HEADS = 32, 48, 2, 4
CLASSES = 5
SIZES = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "dim", "emb_dim"), WIDTH
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), INNER
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers"), LAYERS
    ),
    "decoder_layers": LAYERS,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "state_size"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    "vocab_size": VOCABULARY,
    "ffn_hidden_size": INNER,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = (
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
    (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM),
    (modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, AutoModelForImageClassification),
)
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2]}  # of a convolutional network
OTHERS = {
    "convnext": {**STAGES, "num_stages": 2, "patch_size": 2},
    "convnextv2": {**STAGES, "num_stages": 2, "patch_size": 2},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 4},
    "resnet": {**STAGES, "embedding_size": 8, "layer_type": "basic"},
    "swin": {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "num_attention_heads": [2, 2], "window_size": 2},
    "deepseek_v3": {
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("n_shared_experts", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("n_routed_experts", "num_key_value_heads"), 4),
        "n_group": 2,
    },
    "t5": {"decoder_start_token_id": 0},
}
DROPOUT = 0.1


def build(family: str) -> nn.Module:
    """Return a tiny model in float64, in training mode, the same on every call."""
    transformers.logging.set_verbosity_error()
    known = CONFIG_MAPPING[family]()
    sizes = {name: size for name, size in SIZES.items() if hasattr(known, name)}
    config = CONFIG_MAPPING[family](**sizes | OTHERS.get(family, {}))
    config._experts_implementation = "eager"  # the others have no float64
    for name, value in vars(known).items():
        if ("drop" in name) and "layer" not in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, DROPOUT)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True  # the loss of the router counts
    (make,) = [auto for names, auto in KINDS if family in names][:1]
    torch.manual_seed(0)
    return make.from_config(config).double().train()


def batch(model: nn.Module, num_rows: int, seed: int) -> dict[str, Tensor]:
    """Return inputs of a step: images and classes, or tokens and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        size = (num_rows, 3, SIZES["image_size"], SIZES["image_size"])
        labels = torch.randint(CLASSES, (num_rows,), generator=generator)
        return {"pixel_values": torch.randn(size, generator=generator, dtype=torch.float64), "labels": labels}
    tokens = torch.randint(3, VOCABULARY, (num_rows, TOKENS), generator=generator)
    ignored = torch.rand(num_rows, TOKENS, generator=generator) < 0.2
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}


def even_batch(model: nn.Module, num_rows: int, seed: int) -> dict[str, Tensor]:
    """Return inputs of a step with a mask of padding, in which every pair of rows ignores equally many targets."""
    inputs = batch(model, num_rows, seed)
    if "input_ids" not in inputs:
        return inputs
    is_padding = torch.zeros(num_rows, TOKENS, dtype=torch.bool)
    is_padding[1::2, -3:] = True
    ignored = is_padding | (torch.arange(TOKENS) == 4)
    labels = inputs["input_ids"].masked_fill(ignored, -100)
    return {"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": (~is_padding).long()}


def arguments(model: nn.Module) -> dict[str, Any]:
    """Return other arguments of a call: no caches, which are for generation."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}
