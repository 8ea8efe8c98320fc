"""Plan for ``transformers.GPT2LMHeadModel``, whose ``Conv1D`` weights are ``(in, out)``."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from ._parts import SEQ, Plan

__all__ = ["gpt2"]


def gpt2(*, axis: str = "tp", sequence_parallel: bool = False) -> Plan:
    """Return the plan of a GPT-2: feed-forward, attention output and (tied) vocabulary sharded over ``axis``.

    ``c_attn`` merges query, key and value in one matrix, which contiguous shards cannot split by heads; it stays
    replicated, and each rank computes all heads.

    Example:
        >>> gpt2()["parameter"][r"transformer\\.h\\.\\d+\\.mlp\\.c_fc\\.weight"]
        {'tp': Shard(dim=1)}
    """
    layer = r"transformer\.h\.\d+"
    between = {axis: Shard(SEQ) if sequence_parallel else Replicate()}
    whole = {axis: Replicate()}
    return {
        "parameter": {
            r"transformer\.wte\.weight": {axis: Shard(0)},
            r"lm_head\.weight": {axis: Shard(0)},
            rf"{layer}\.mlp\.c_fc\.weight": {axis: Shard(1)},
            rf"{layer}\.mlp\.c_fc\.bias": {axis: Shard(0)},
            rf"{layer}\.(attn|mlp)\.c_proj\.weight": {axis: Shard(0)},
        },
        "forward": {
            r"transformer\.wte\.output": [whole],
            r"transformer\.drop\.output": [between],
            rf"{layer}\.attn\.input": {"hidden_states": whole},
            rf"{layer}\.attn\.c_proj\.input": [{axis: Shard(2)}],
            rf"{layer}\.attn\.c_proj\.output": [between],
            rf"{layer}\.mlp\.input": [whole],
            rf"{layer}\.mlp\.c_proj\.output": [between],
            r"lm_head\.input": [whole],
            r"lm_head\.output": [whole],
        },
    }
