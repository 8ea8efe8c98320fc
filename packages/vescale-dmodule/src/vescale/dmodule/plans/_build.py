"""Parts of a plan, to be merged: one function for each kind of layer.

Activations are (batch, sequence, features). A transformer in tensor and sequence parallelism is a few lines::

    layer = r"layers\\.\\d+"
    plan = merge(
        vocab("embed", "head"),
        sequence(r"layers\\.0", "norm"),                        # sharded over the sequence between the two
        block(rf"{layer}\\.(attn|mlp)"),                        # inputs of these two are full
        column(rf"{layer}\\.attn\\.(q|k|v)_proj"), row(rf"{layer}\\.attn\\.o_proj", output=Shard(SEQ)),
        column(rf"{layer}\\.mlp\\.up_proj"), row(rf"{layer}\\.mlp\\.down_proj", output=Shard(SEQ)),
    )

Names are regexes of module names. Every part is itself a plan, a plain dict that callers may print and change.
The column and row split is that of Megatron-LM (Shoeybi et al. 2019, section 3), the sequence split that of Korthikanti
et al. 2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Placement, Replicate, Shard

from vescale.dtensor import InterleavedShard
from vescale.dtensor.extension import Count, checked

from ..errors import PlanError

__all__ = ["FEATURES", "SEQ", "Plan", "block", "column", "experts", "merge", "row", "sequence", "vocab"]

Plan = dict[str, dict[str, object]]

SEQ, FEATURES = 1, 2


@checked
def merge(*plans: Mapping[str, Mapping[str, object] | Sequence[str]]) -> Plan:
    """Return the union of several plans, section by section.

    Raises:
        PlanError: one key with two entries.

    Example:
        >>> merge(experts("experts"), {"attribute": {"top_k": 2}})
        {'expert': {'experts': {'ep': Shard(dim=0)}}, 'attribute': {'top_k': 2}}
    """
    merged: Plan = {}
    for plan in plans:
        for section, keys in plan.items():
            if not isinstance(keys, Mapping):  # the section "eager"
                merged[section] = [*merged.get(section, []), *keys]
                continue
            known = merged.setdefault(section, {})
            for key, entry in keys.items():
                before = known.setdefault(key, entry)
                if before is not entry and before != entry:
                    raise PlanError(
                        f"expected one entry of {section} key {key!r}, got {before!r} and {entry!r}; merge plans that "
                        "agree, or change the entry in the merged plan"
                    )
    return merged


@checked
def column(
    name: str, *, axis: str = "tp", parts: Count = 1, transposed: bool = False, output: Placement | None = None
) -> Plan:
    """Shard linear layers over their output features; each rank computes its features from full inputs.

    Args:
        name: regex of the layers.
        axis: mesh axis.
        parts: how many equal projections the layer merges, such as 3 for query, key and value or 2 for gate and up.
            Each rank gets its strip of every part.
        transposed: the weight is (in, out), as in GPT-2's ``Conv1D``, and there is a bias.
        output: what the output is brought to; by default it stays sharded over the features.

    Example:
        >>> column("up")
        {'parameter': {'up\\\\.(weight|bias)': {'tp': Shard(dim=0)}}}
        >>> column("qkv", parts=3, transposed=True)["parameter"]["qkv\\\\.weight"]
        {'tp': InterleavedShard(dim=1, k=3)}
    """

    def shard(dim: int) -> dict[str, Placement]:
        return {axis: Shard(dim) if parts == 1 else InterleavedShard(dim, parts)}

    if transposed:
        parameters = {rf"{name}\.weight": shard(1), rf"{name}\.bias": shard(0)}
    else:
        parameters = {rf"{name}\.(weight|bias)": shard(0)}
    forward = {} if output is None else {"forward": {rf"{name}\.output": [{axis: output}]}}
    return {"parameter": parameters, **forward}


@checked
def row(name: str, *, axis: str = "tp", transposed: bool = False, output: Placement | None = None) -> Plan:
    """Shard linear layers over their input features; the partial sums are added up at their output.

    Args:
        name: regex of the layers.
        axis: mesh axis.
        transposed: the weight is (in, out), as in GPT-2's ``Conv1D``.
        output: what the sum is brought to: ``Replicate()``, the default, or ``Shard(SEQ)``.

    Example:
        >>> row("down")["parameter"], row("down")["forward"]
        ({'down\\\\.weight': {'tp': Shard(dim=1)}}, {'down\\\\.output': [{'tp': Replicate()}]})
    """
    return {
        "parameter": {rf"{name}\.weight": {axis: Shard(0 if transposed else 1)}},
        "forward": {rf"{name}\.output": [{axis: output or Replicate()}]},
    }


@checked
def vocab(embedding: str, head: str | None = None, *, axis: str = "tp") -> Plan:
    """Shard an embedding, and the head that may be tied to it, over the vocabulary; their outputs are replicated.

    Example:
        >>> list(vocab("embed", "head")["forward"])
        ['embed\\\\.output', 'head\\\\.input', 'head\\\\.output']
    """
    replicated = [{axis: Replicate()}]
    names = [embedding] if head is None else [embedding, head]
    boundaries = [rf"{embedding}\.output"] + ([] if head is None else [rf"{head}\.input", rf"{head}\.output"])
    return {
        "parameter": {rf"{name}\.weight": {axis: Shard(0)} for name in names},
        "forward": dict.fromkeys(boundaries, replicated),
    }


@checked
def sequence(first: str, last: str, *, axis: str = "tp") -> Plan:
    """Shard activations over the sequence from the input of module ``first`` to the output of module ``last``.

    Modules outside get full sequences, so code that counts positions or builds masks is correct.

    Example:
        >>> sequence(r"layers\\.0", "norm")["forward"]["norm\\\\.output"]
        [{'tp': Replicate()}]
    """
    return {
        "forward": {
            rf"{first}\.input": [{axis: Shard(SEQ)}],
            rf"{last}\.output": [{axis: Replicate()}],
        }
    }


@checked
def block(name: str, *, axis: str = "tp", output: Placement | None = None) -> Plan:
    """Replicate the input of modules, such as attention or a feed-forward between sequence-sharded activations.

    Args:
        name: regex of the modules. Their first argument is brought to ``Replicate()``.
        axis: mesh axis.
        output: what the first output is brought to; by default it stays as the last layer in the module leaves it.

    Example:
        >>> block("mlp")
        {'forward': {'mlp\\\\.input': [{'tp': Replicate()}]}}
    """
    forward: dict[str, object] = {rf"{name}\.input": [{axis: Replicate()}]}
    if output is not None:
        forward[rf"{name}\.output"] = [{axis: output}]
    return {"forward": forward}


@checked
def experts(name: str, *, axis: str = "ep") -> Plan:
    """Shard experts over an axis, each expert on one rank; see the expert section of a plan.

    Example:
        >>> experts("mlp.experts", axis="tp")
        {'expert': {'mlp.experts': {'tp': Shard(dim=0)}}}
    """
    return {"expert": {name: {axis: Shard(0)}}}
