"""Plans for decoders with the names of LLaMA: ``model.layers.N.self_attn.q_proj`` and so on."""

from __future__ import annotations

from torch.distributed.tensor import Placement, Replicate, Shard

from vescale.dtensor.extension import Count, checked

from ._build import FEATURES, Plan, block, column, merge, row
from ._heads import Options, around, attention, divide_heads

__all__ = ["LAYER", "OUTSIDE", "feed_forward", "gated", "llama", "olmo2"]

LAYER = r"model\.layers\.\d+"
OUTSIDE = {"embedding": r"model\.embed_tokens", "layers": r"model\.layers", "norm": r"model\.norm"}


@checked
def llama(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of a LLaMA: heads, feed-forward and vocabulary sharded over ``axis``.

    Serves ``LlamaForCausalLM`` and models with the same names: Mistral, Qwen2, Qwen3, Gemma-2 and the text model of
    Gemma-3 (whose soft-capping needs ``config._attn_implementation = "eager"``, as on one device).

    Covers every matrix; norms are replicated. Query heads must divide over the axis; fewer key-value heads than ranks
    are repeated, with their projections replicated.

    Args:
        config: the model's config; without it, or without ``degree``, the plan assumes that heads divide.
        axis: mesh axis of tensor parallelism.
        degree: number of ranks on the axis.
        sequence_parallel: shard activations between the layers over the sequence.
        replicate_attention: compute all heads on every rank, for head counts that do not divide.

    Raises:
        PlanError: heads that do not divide.

    Example:
        >>> sorted(llama()["parameter"])[0]
        'lm_head\\\\.weight'
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    return merge(around(options, **OUTSIDE), attention(rf"{LAYER}\.self_attn", options), feed_forward(options))


@checked
def olmo2(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of an OLMo-2: as :func:`llama`, with norms over full query and key projections.

    Each of these norms needs all features of a token, so queries and keys are gathered before and cut after them; the
    norms' weights are replicated.

    Raises:
        PlanError: heads that do not divide.

    Example:
        >>> olmo2()["forward"]["model\\\\.layers\\\\.\\\\d+\\\\.self_attn\\\\.(q|k)_norm\\\\.output"]
        [{'tp': Shard(dim=2)}]
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    name = rf"{LAYER}\.self_attn"
    plan = merge(around(options, **OUTSIDE), attention(name, options, key_output="k_norm"), feed_forward(options))
    if replicate_attention:
        return plan
    normed = "q" if divide_heads(options).copies > 1 else "q|k"
    norms = {
        rf"{name}\.({normed})_norm\.input": [{axis: Replicate()}],
        rf"{name}\.({normed})_norm\.output": [{axis: Shard(FEATURES)}],
    }
    return merge(plan, {"forward": norms})


def feed_forward(options: Options) -> Plan:
    """Return the plan of the gated feed-forward of every layer."""
    return merge(block(rf"{LAYER}\.mlp", axis=options.axis), gated(rf"{LAYER}\.mlp", options, output=options.between))


def gated(name: str, options: Options, *, output: Placement) -> Plan:
    """Return the plan of the matrices of gated feed-forwards; their sum is brought to ``output``."""
    return merge(
        column(rf"{name}\.(gate|up)_proj", axis=options.axis),
        row(rf"{name}\.down_proj", axis=options.axis, output=output),
    )
