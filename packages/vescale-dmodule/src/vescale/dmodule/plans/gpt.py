"""Plans for ``transformers.GPT2LMHeadModel`` and ``GPTNeoXForCausalLM``, which merge query, key and value."""

from __future__ import annotations

from vescale.dtensor.extension import Count, checked

from .._plan.attributes import Divided
from ._build import Plan, block, column, merge, row
from ._heads import Options, around, divide_heads, replicated_attention

__all__ = ["gpt2", "gpt_neox"]


@checked
def gpt2(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of a GPT-2: heads, feed-forward and the (tied) vocabulary sharded over ``axis``.

    Its ``Conv1D`` weights are (in, out). ``c_attn`` merges query, key and value, so each rank has an interleaved shard:
    a strip of each. Covers every matrix but the position embedding; norms are replicated. Cross attention is not
    supported. If the ranks do not divide the feed-forward, its first layer stays in eager mode inside a static model.

    Args:
        config: the model's config; without it, or without ``degree``, the plan assumes that heads divide.
        axis: mesh axis of tensor parallelism.
        degree: number of ranks on the axis.
        sequence_parallel: shard activations between the layers over the sequence.
        replicate_attention: compute all heads on every rank, for head counts that do not divide, such as the 25 of the
            largest GPT-2.

    Raises:
        PlanError: heads that do not divide.

    Example:
        >>> gpt2()["parameter"][r"transformer\\.h\\.\\d+\\.mlp\\.c_fc\\.weight"]
        {'tp': Shard(dim=1)}
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    layer = r"transformer\.h\.\d+"
    divide_heads(options)
    if replicate_attention:
        projection = replicated_attention(rf"{layer}\.attn\.c_proj", options)
    else:
        projection = merge(
            column(rf"{layer}\.attn\.c_attn", axis=axis, parts=3, transposed=True),
            {"local_attribute": {rf"{layer}\.attn\.(split_size|c_attn\.nf)": Divided(axis)}},
        )
    return merge(
        around(options, embedding=r"transformer\.wte", layers=r"transformer\.h", norm=r"transformer\.ln_f"),
        block(rf"{layer}\.(attn|mlp)", axis=axis),
        projection,
        column(rf"{layer}\.mlp\.c_fc", axis=axis, transposed=True),
        _feed_forward_size(rf"{layer}\.mlp\.c_fc", options),
        row(rf"{layer}\.(attn|mlp)\.c_proj", axis=axis, transposed=True, output=options.between),
    )


def _feed_forward_size(name: str, options: Options) -> Plan:
    """Return the plan entry of the number of features to which ``c_fc`` shapes its output on local tensors."""
    hidden = getattr(options.config, "hidden_size", None) or 0
    size = getattr(options.config, "n_inner", None) or 4 * hidden
    if options.degree and size % options.degree:  # the number differs between ranks
        return {"eager": [name]}
    return {"local_attribute": {rf"{name}\.nf": Divided(options.axis)}}


@checked
def gpt_neox(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
) -> Plan:
    """Return the plan of a GPT-NeoX: heads, feed-forward and vocabulary sharded over ``axis``.

    The merged projection holds query, key and value of one head after the other, so a plain shard is several heads.
    Covers every matrix, with parallel residuals and without; norms are replicated.

    Args:
        config: the model's config; without it, or without ``degree``, the plan assumes that heads divide.
        axis: mesh axis of tensor parallelism.
        degree: number of ranks on the axis.
        sequence_parallel: shard activations between the layers over the sequence.
        replicate_attention: compute all heads on every rank, for head counts that do not divide.

    Raises:
        PlanError: heads that do not divide.

    Example:
        >>> gpt_neox(sequence_parallel=True)["forward"][r"gpt_neox\\.layers\\.0\\.input"]
        [{'tp': Shard(dim=1)}]
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    layer = r"gpt_neox\.layers\.\d+"
    divide_heads(options)
    if replicate_attention:
        projection = replicated_attention(rf"{layer}\.attention\.dense", options)
    else:
        projection = column(rf"{layer}\.attention\.query_key_value", axis=axis)
    return merge(
        around(
            options, embedding=r"gpt_neox\.embed_in", layers=r"gpt_neox\.layers", norm=r"gpt_neox\.final_layer_norm"
        ),
        block(rf"{layer}\.(attention|mlp)", axis=axis),
        projection,
        column(rf"{layer}\.mlp\.dense_h_to_4h", axis=axis),
        row(rf"{layer}\.(attention\.dense|mlp\.dense_4h_to_h)", axis=axis, output=options.between),
    )
