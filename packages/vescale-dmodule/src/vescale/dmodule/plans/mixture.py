"""Plans for mixtures of experts with the names of LLaMA around them: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from vescale.dtensor.extension import Count, checked

from ..errors import PlanError
from ._build import Plan, block, experts, merge
from ._heads import Options, around, attention
from .llama import LAYER, OUTSIDE, gated

__all__ = ["mixtral", "qwen2_moe", "qwen3_moe"]

# names of the number of experts in configs
COUNTS = ("num_local_experts", "num_experts")


@checked
def mixtral(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
    expert_axis: str | None = None,
) -> Plan:
    """Return the plan of a Mixtral: heads and vocabulary sharded over ``axis``, experts sharded over an axis.

    Covers every matrix but the small router, which is replicated with the norms. Attention is that of :func:`llama`.

    Args:
        config: the model's config; without it, or without ``degree``, the plan assumes that heads and experts divide.
        axis: mesh axis of tensor parallelism.
        degree: number of ranks on the axis.
        sequence_parallel: shard activations between the layers over the sequence.
        replicate_attention: compute all heads on every rank, for head counts that do not divide.
        expert_axis: mesh axis over which experts are spread; by default ``axis``.

    Raises:
        PlanError: heads or experts that do not divide.

    Example:
        >>> mixtral()["expert"]
        {'model\\\\.layers\\\\.\\\\d+\\\\.mlp\\\\.experts': {'tp': Shard(dim=0)}}
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    return _mixture(options, expert_axis)


@checked
def qwen3_moe(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
    expert_axis: str | None = None,
) -> Plan:
    """Return the plan of a Qwen3-MoE: as :func:`mixtral`; layers without experts have a sharded feed-forward.

    Which layers these are is read from ``config`` (``mlp_only_layers``, ``decoder_sparse_step``); without it every
    layer has experts. Norms of query and key heads are replicated.

    Raises:
        PlanError: heads or experts that do not divide.

    Example:
        >>> qwen3_moe(expert_axis="ep")["expert"]
        {'model\\\\.layers\\\\.\\\\d+\\\\.mlp\\\\.experts': {'ep': Shard(dim=0)}}
    """
    options = Options(config, axis, degree, sequence_parallel, replicate_attention)
    dense = gated(rf"{LAYER}\.mlp", options, output=options.between) if _has_dense_layers(config) else {}
    return merge(_mixture(options, expert_axis), dense)


@checked
def qwen2_moe(
    config: object = None,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
    expert_axis: str | None = None,
) -> Plan:
    """Return the plan of a Qwen2-MoE: as :func:`qwen3_moe`; the shared expert is sharded like a feed-forward.

    The gate of the shared expert, one row, is replicated with the router.

    Raises:
        PlanError: heads or experts that do not divide.

    Example:
        >>> qwen2_moe()["forward"]["model\\\\.layers\\\\.\\\\d+\\\\.mlp\\\\.shared_expert\\\\.input"]
        [{'tp': Replicate()}]
    """
    plan = qwen3_moe(
        config,
        axis=axis,
        degree=degree,
        sequence_parallel=sequence_parallel,
        replicate_attention=replicate_attention,
        expert_axis=expert_axis,
    )
    # Its input is a boundary, too: there the gradient of router and experts is full, its own would be partial.
    name = rf"{LAYER}\.mlp\.shared_expert"
    return merge(plan, block(name, axis=axis), gated(name, Options(axis=axis), output=Replicate()))


def _mixture(options: Options, expert_axis: str | None) -> Plan:
    """Return the plan of attention, experts, embedding, head and norms."""
    if expert_axis is None:
        _check_experts(options)
    return merge(
        around(options, **OUTSIDE),
        attention(rf"{LAYER}\.self_attn", options),
        block(rf"{LAYER}\.mlp", axis=options.axis, output=options.between),
        experts(rf"{LAYER}\.mlp\.experts", axis=expert_axis or options.axis),
    )


def _check_experts(options: Options) -> None:
    for attribute in COUNTS:
        count = getattr(options.config, attribute, None)
        if options.degree and isinstance(count, int) and count % options.degree:
            raise PlanError(
                f"expected {attribute} that {options.axis}={options.degree} ranks divide, got {count}; use a degree "
                "that divides it"
            )


def _has_dense_layers(config: object) -> bool:
    """Return whether some layer has no experts, by the rule of Hugging Face's models."""
    only, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return any(layer in only or (layer + 1) % step for layer in range(getattr(config, "num_hidden_layers", 0)))
