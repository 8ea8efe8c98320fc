"""The sizes of a transformer, for refusals and for the formula of activations: from a config, attributes and shapes.

Sources, in order: a ``model.config`` as in Hugging Face, integer attributes of the first block's modules, and shapes of
layers. A run on tensors without data (`_measure`) corrects the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ._parameters import ParameterInfo

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "embed_dim", "hidden_dim", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "top_k"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "intermediate_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
}
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


def config_of(model: nn.Module) -> object:
    """Return the config of a model's text part, of the model, or None."""
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def find_sizes(model: nn.Module, block: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return the transformer's sizes, and notes about assumed ones."""
    sources = [config_of(model), *block.modules()]
    found = {name: _first_int(sources, attributes) for name, attributes in _NAMES.items()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if embeddings:
        largest = max(embeddings, key=lambda module: module.num_embeddings)
        found["vocab"] = found["vocab"] or largest.num_embeddings
        found["hidden"] = found["hidden"] or largest.embedding_dim
    found["hidden"] = found["hidden"] or _first_vector_length(block)
    found["experts"] = found["experts"] or _count_expert_modules(block)
    if found["experts"]:
        found["ffn"] = _first_int(sources, ("moe_intermediate_size",)) or found["ffn"]
    return _complete(found, block)


def _complete(found: dict[str, int], block: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Derive missing sizes from other sizes, and return notes about assumptions."""
    notes = []
    if not found["ffn"]:
        widest = max((module.in_features for module in block.modules() if isinstance(module, nn.Linear)), default=0)
        found["ffn"] = widest if widest > found["hidden"] else 4 * found["hidden"]
        if widest <= found["hidden"] and found["hidden"]:
            notes.append(f"ffn = 4 * hidden = {found['ffn']}")
    if not found["heads"]:
        notes.append("no attention heads found, so tensor parallelism cannot be checked")
    found["head_dim"] = found["head_dim"] or found["hidden"] // max(found["heads"], 1)
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    if not found["experts"]:
        found["experts_per_token"] = 0
    elif not found["experts_per_token"]:
        found["experts_per_token"] = min(2, found["experts"])
        notes.append(f"each token goes to {found['experts_per_token']} of {found['experts']} experts")
    return found, notes


def _first_int(sources: Iterable[object], names: Sequence[str]) -> int:
    """Return the first positive integer attribute; the order of sources has precedence over the order of names."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _first_vector_length(block: nn.Module) -> int:
    """Return the length of the block's first 1-D parameter (a norm or a bias), or 0."""
    return next((parameter.shape[0] for parameter in block.parameters() if parameter.dim() == 1), 0)


def _count_expert_modules(block: nn.Module) -> int:
    lists = [module for name, module in block.named_modules() if isinstance(module, nn.ModuleList) and "expert" in name]
    return max((len(module) for module in lists), default=0)


def is_gated(parameters: Sequence[ParameterInfo], sizes: dict[str, int]) -> bool:
    """Count the feed-forward's matrices of one block: two are plain, three (or a double one and a single) are gated."""
    ffn, hidden = sizes["ffn"], sizes["hidden"]
    if not ffn or hidden in (0, ffn):  # hidden unknown, or feed-forward and attention projections of equal shapes
        return any("gate_up" in info.fqn or "gate_proj" in info.fqn for info in parameters)
    per_block = sum(
        info.numel
        for info in parameters
        if info.positions == (0,) and len(info.shape) >= 2 and {ffn, 2 * ffn} & set(info.shape)
    )
    return per_block / (max(sizes["experts"], 1) * hidden * ffn) > 2.5


def has_dropout(model: nn.Module, config: object) -> bool:
    """Return whether some dropout of a model is active in training."""
    modules = (
        module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0) for module in model.modules()
    )
    numbers = [*modules, *(getattr(config, name, 0) for name in _DROPOUT_NAMES)]
    return any(isinstance(value, float) and value > 0 for value in numbers)


def mixes_rows(model: nn.Module) -> str:
    """Return why micro-batches would not give the result of the batch, or ""."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, module in model.named_modules():
        if isinstance(module, norms) and module.training:
            return f"{name} computes statistics over the rows of a batch, which micro-batches would cut"
    if getattr(config_of(model), "output_router_logits", False):
        return "the loss of the router (output_router_logits) is no mean over rows, so micro-batches would change it"
    return ""
