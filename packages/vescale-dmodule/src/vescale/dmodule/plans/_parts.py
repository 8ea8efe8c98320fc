"""Pieces that the ready plans share. ``axis`` is the tensor-parallel axis; activations are (batch, seq, hidden)."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

__all__ = ["SEQ", "Plan", "decoder", "merge"]

Plan = dict[str, dict[str, object]]

SEQ = 1


def merge(*plans: Plan) -> Plan:
    """Return the union of several plans, section by section."""
    merged: Plan = {}
    for plan in plans:
        for section, keys in plan.items():
            merged.setdefault(section, {}).update(keys)
    return merged


def decoder(axis: str, *, sequence_parallel: bool) -> Plan:
    """Embedding, attention, norms and head of a LLaMA-like decoder (``model.layers.N.self_attn`` and so on).

    Heads are sharded in attention; embedding and head over the vocabulary. With sequence parallelism everything between
    the layers is sharded over the sequence, and each layer gathers once and reduce-scatters once per block.
    """
    layer = r"model\.layers\.\d+"
    between = {axis: Shard(SEQ)} if sequence_parallel else {axis: Replicate()}
    whole = {axis: Replicate()}
    plan: Plan = {
        "parameter": {
            r"model\.embed_tokens\.weight": {axis: Shard(0)},
            rf"{layer}\.self_attn\.(q|k|v)_proj\.(weight|bias)": {axis: Shard(0)},
            rf"{layer}\.self_attn\.o_proj\.weight": {axis: Shard(1)},
            r"lm_head\.weight": {axis: Shard(0)},
        },
        "forward": {
            r"model\.embed_tokens\.output": [between],
            rf"{layer}\.self_attn\.input": {"hidden_states": whole},
            rf"{layer}\.self_attn\.o_proj\.output": [between],
            rf"{layer}\.mlp\.input": [whole],
            rf"{layer}\.mlp\.output": [between],
            r"lm_head\.input": [whole],
            r"lm_head\.output": [whole],
        },
    }
    return plan
