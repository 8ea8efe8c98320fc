"""Plan for ``transformers.Phi3ForCausalLM``, whose query-key-value and gate-up projections are merged."""

from __future__ import annotations

from vescale.dtensor import InterleavedShard
from vescale.dtensor.extension import Count, checked

from .._plan.attributes import Divided
from .._plan.placements import Repeat
from ._build import FEATURES, Plan, block, column, merge, row
from ._heads import Heads, Options, around, divide_heads, replicated_attention
from .llama import LAYER, OUTSIDE

__all__ = ["phi3"]


@checked
def phi3(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of a Phi-3: heads, feed-forward and vocabulary sharded over ``axis``.

    The merged projections are interleaved shards: each rank holds a strip of the gate and a strip of the up projection,
    and, if there are as many key-value heads as query heads, a strip of queries, keys and values. With grouped queries
    the three have different widths, and no interleaving gives a rank the query heads of its key-value heads. Then
    ``qkv_proj`` is replicated, its key-value heads are repeated to the number of query heads, and each rank computes
    its heads. All other matrices are sharded in both cases; norms are replicated.

    Args:
        config: the model's config; without it the plan assumes that queries are not grouped.
        axis: mesh axis of tensor parallelism.
        degree: number of ranks on the axis.
        sequence_parallel: shard activations between the layers over the sequence.
        replicate_attention: compute all heads on every rank, for head counts that do not divide.

    Raises:
        PlanError: query heads that do not divide.

    Example:
        >>> phi3()["parameter"]["model\\\\.layers\\\\.\\\\d+\\\\.mlp\\\\.gate_up_proj\\\\.(weight|bias)"]
        {'tp': InterleavedShard(dim=0, k=2)}
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    name = rf"{LAYER}\.self_attn"
    return merge(
        around(options, **OUTSIDE),
        block(rf"{LAYER}\.(self_attn|mlp)", axis=axis),
        _projections(name, options, divide_heads(options)),
        row(rf"{name}\.o_proj", axis=axis, output=options.between),
        column(rf"{LAYER}\.mlp\.gate_up_proj", axis=axis, parts=2),
        row(rf"{LAYER}\.mlp\.down_proj", axis=axis, output=options.between),
    )


def _projections(name: str, options: Options, heads: Heads) -> Plan:
    axis = options.axis
    if options.replicate_attention:
        return replicated_attention(rf"{name}\.o_proj", options)
    # The module splits its projection at sizes that it computes from these two attributes.
    sizes = rf"{name}\.config\.num_attention_heads", rf"{name}\.num_key_value_heads"
    if heads.num_query == heads.num_key_value:
        local = {"local_attribute": dict.fromkeys(sizes, Divided(axis))}
        return merge(column(rf"{name}\.qkv_proj", axis=axis, parts=3), local)
    repeat = Repeat(
        {axis: InterleavedShard(FEATURES, 3)},
        dim=FEATURES,
        parts=(heads.num_query, 2 * heads.num_key_value),
        times=(1, heads.num_query // heads.num_key_value),
    )
    return {
        "forward": {rf"{name}\.qkv_proj\.output": repeat},
        "attribute": {rf"{name}\.num_key_value_heads": heads.num_query, rf"{name}\.num_key_value_groups": 1},
        "local_attribute": dict.fromkeys(sizes, Divided(axis, heads.num_query)),
    }
