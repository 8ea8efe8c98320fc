"""Plan for ``transformers.MixtralForCausalLM``."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from ._parts import Plan, decoder, merge

__all__ = ["mixtral"]


def mixtral(*, axis: str = "tp", sequence_parallel: bool = False) -> Plan:
    """Return the plan of a Mixtral: heads and vocabulary sharded over ``axis``, whole experts spread over it.

    Covers every matrix but the small router, which is replicated with the norms. Query heads, key-value heads and
    experts must divide over the axis.

    Example:
        >>> mixtral()["expert"]
        {'model\\\\.layers\\\\.\\\\d+\\\\.mlp\\\\.experts': {'tp': Shard(dim=0)}}
    """
    experts: Plan = {"expert": {r"model\.layers\.\d+\.mlp\.experts": {axis: Shard(0)}}}
    return merge(decoder(axis, sequence_parallel=sequence_parallel), experts)
