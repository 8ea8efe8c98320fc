"""Plans for decoders with the names of LLaMA: ``model.layers.N.self_attn.q_proj`` and so on."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from ._build import FEATURES, Plan, block, column, merge, row, sequence, vocab
from ._heads import Options, attention, divide_heads

__all__ = ["LAYER", "around", "feed_forward", "llama", "olmo2"]

LAYER = r"model\.layers\.\d+"


def llama(
    config: object = None,
    *,
    axis: str = "tp",
    degree: int | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of a LLaMA: heads, feed-forward and vocabulary sharded over ``axis``.

    Serves ``LlamaForCausalLM`` and models with the same names: Mistral, Qwen2, Qwen3, Gemma-2 and the text model of
    Gemma-3 (whose soft-capping needs ``config._attn_implementation = "eager"``, as on one device).

    Covers every matrix; norms are replicated. Query heads must divide over the axis; fewer key-value heads than ranks
    are repeated, with their projections replicated.

    Args:
        config: the model's config; without it, or without ``degree``, heads are taken to divide.
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
    return merge(around(options), attention(rf"{LAYER}\.self_attn", options), feed_forward(options))


def olmo2(
    config: object = None,
    *,
    axis: str = "tp",
    degree: int | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of an OLMo-2: as :func:`llama`, with norms over whole query and key projections.

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
    plan = merge(around(options), attention(name, options, key_output="k_norm"), feed_forward(options))
    if replicate_attention:
        return plan
    normed = "q" if divide_heads(options).copies > 1 else "q|k"
    norms = {
        rf"{name}\.({normed})_norm\.input": [{axis: Replicate()}],
        rf"{name}\.({normed})_norm\.output": [{axis: Shard(FEATURES)}],
    }
    return merge(plan, {"forward": norms})


def around(options: Options) -> Plan:
    """Embedding, final norm and head, and where activations between the layers lie."""
    plan = vocab(r"model\.embed_tokens", "lm_head", axis=options.axis)
    if not options.sequence_parallel:
        return plan
    return merge(plan, sequence(r"model\.layers\.0", r"model\.norm", axis=options.axis))


def feed_forward(options: Options) -> Plan:
    """Gated feed-forward of every layer."""
    return merge(
        block(rf"{LAYER}\.mlp", axis=options.axis),
        column(rf"{LAYER}\.mlp\.(gate|up)_proj", axis=options.axis),
        row(rf"{LAYER}\.mlp\.down_proj", axis=options.axis, output=options.between),
    )
