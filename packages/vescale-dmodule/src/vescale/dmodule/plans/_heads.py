"""How attention heads lie over the ranks of an axis, from the head counts of a model's config.

query heads divide, key-value heads divide      each rank has its own of both
query heads divide, fewer key-value heads       key-value heads are repeated until they divide (``Repeat``)
query heads do not divide                       refused, or all heads are computed on every rank
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from .._plan.placements import Repeat
from ..errors import PlanError
from ._build import FEATURES, Plan, block, column, merge, row, sequence, vocab

__all__ = ["Heads", "Options", "around", "attention", "divide_heads", "replicated_attention"]


@dataclass(frozen=True)
class Options:
    """The arguments that all ready plans have.

    Attributes:
        config: a Hugging Face config with the sizes; None if every size divides.
        axis: mesh axis of tensor parallelism.
        degree: number of ranks on that axis, if it is known.
        sequence_parallel: shard activations between the blocks over the sequence.
        replicate_attention: compute all heads on every rank.
    """

    config: object = None
    axis: str = "tp"
    degree: int | None = None
    sequence_parallel: bool = False
    replicate_attention: bool = False

    @property
    def between(self) -> Placement:
        """Placement of activations between the blocks."""
        return Shard(1) if self.sequence_parallel else Replicate()


@dataclass(frozen=True)
class Heads:
    """Heads of one attention module.

    Attributes:
        num_query: query heads.
        num_key_value: key-value heads of the model.
        copies: how often each of them is repeated in the parallel model.
    """

    num_query: int = 1
    num_key_value: int = 1
    copies: int = 1

    @property
    def num_groups(self) -> int:
        """Query heads that share one key-value head in the parallel model."""
        return self.num_query // (self.num_key_value * self.copies)


def divide_heads(options: Options) -> Heads:
    """Return the heads of a model, key-value heads repeated until ``options.degree`` divides them.

    Raises:
        PlanError: the ranks do not divide the query heads, and ``replicate_attention`` is False.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(num_attention_heads=12, num_key_value_heads=2)
        >>> divide_heads(Options(config, degree=4))
        Heads(num_query=12, num_key_value=2, copies=2)
    """
    if options.config is None:
        return Heads()
    num_query = _count(options.config, "num_attention_heads")
    num_key_value = _count(options.config, "num_key_value_heads", num_query)
    if options.degree is None or options.replicate_attention:
        return Heads(num_query, num_key_value)
    if num_query % options.degree:
        raise PlanError(
            f"expected num_attention_heads that {options.axis}={options.degree} ranks divide, got {num_query}; use a "
            "degree that divides it, or replicate_attention=True, which computes all heads on every rank"
        )
    # The multiple also divides the query heads, because both of its arguments do.
    return Heads(num_query, num_key_value, math.lcm(num_key_value, options.degree) // num_key_value)


def _count(config: object, name: str, default: int | None = None) -> int:
    """Return a number of heads of a config; ``default`` if the config has none."""
    value = getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = f"{value!r}" if hasattr(config, name) else f"{reprlib.repr(config)} without it"
        raise PlanError(f"expected a positive integer {name} of config, got {shown}; pass the config of the model")
    return value


def around(options: Options, *, embedding: str, layers: str, norm: str) -> Plan:
    """Return the plan of embedding and head, and of the activations from the first layer to the final norm."""
    plan = vocab(embedding, "lm_head", axis=options.axis)
    if not options.sequence_parallel:
        return plan
    return merge(plan, sequence(rf"{layers}\.0", norm, axis=options.axis))


def replicated_attention(projection: str, options: Options) -> Plan:
    """Return the plan of attention whose heads are all computed on every rank; ``projection`` takes a shard of them."""
    return {"forward": {rf"{projection}\.input": [{options.axis: Shard(FEATURES)}]}}


def attention(name: str, options: Options, *, key_output: str = "k_proj", query_input: str = "q_proj") -> Plan:
    """Return the plan of attention with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``: each rank computes its heads.

    Args:
        name: regex of the attention modules.
        options: see :class:`Options`.
        key_output: submodule that returns the keys.
        query_input: the first submodule on the path from the input to the queries.
    """
    axis, heads = options.axis, divide_heads(options)
    plan = merge(block(name, axis=axis), row(rf"{name}\.o_proj", axis=axis, output=options.between))
    if options.replicate_attention:
        return merge(plan, replicated_attention(rf"{name}\.o_proj", options))
    if heads.copies == 1:
        return merge(plan, column(rf"{name}\.(q|k|v)_proj", axis=axis))
    repeat = Repeat({axis: Shard(FEATURES)}, dim=FEATURES, parts=heads.num_key_value, times=heads.copies)
    return merge(
        plan,
        column(rf"{name}\.q_proj", axis=axis),
        {
            "forward": {
                # Keys and values are computed on every rank, so the gradient of the input through them is full. The
                # gradient through the queries is partial. It is summed here, before both are added: a local tensor
                # does not show which of them is partial.
                rf"{name}\.{query_input}\.input": [{axis: Replicate()}],
                rf"{name}\.{key_output}\.output": repeat,
                rf"{name}\.v_proj\.output": repeat,
            },
            "attribute": {rf"{name}\.num_key_value_groups": heads.num_groups},
        },
    )
