"""Plan for ``transformers.LlamaForCausalLM`` (and models with the same names, such as Mistral)."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from ._parts import SEQ, Plan, decoder, merge

__all__ = ["llama"]


def llama(*, axis: str = "tp", sequence_parallel: bool = False) -> Plan:
    """Return the plan of a LLaMA: heads, feed-forward and vocabulary sharded over ``axis``.

    Covers every matrix; norms are replicated. Query and key-value heads must divide over the axis.

    Example:
        >>> sorted(llama()["parameter"])[0]
        'lm_head\\\\.weight'
    """
    layer = r"model\.layers\.\d+"
    between = Shard(SEQ) if sequence_parallel else Replicate()
    feed_forward: Plan = {
        "parameter": {
            rf"{layer}\.mlp\.(gate|up)_proj\.(weight|bias)": {axis: Shard(0)},
            rf"{layer}\.mlp\.down_proj\.weight": {axis: Shard(1)},
        },
        "forward": {rf"{layer}\.mlp\.down_proj\.output": [{axis: between}]},
    }
    return merge(decoder(axis, sequence_parallel=sequence_parallel), feed_forward)
