"""How the dims of an operator's operands and results are cut together.

A rule says of one operator which dims are linked (a rank that has an index of one has that of the other), which are
summed over, and which dims of results are free. A dim without any of them needs all of its indices on every rank::

    mm(A[M, K], B[K, N]) -> C[M, N]      links A.M = C.M, B.N = C.N;  summed A.K with B.K: C is then partial
    softmax(x[B, H, S, T], -1)           links of B, H and S; T is whole
    split(x[3 * E], E)                   links each part with a slice of x

An operator that is not listed has no links: what it takes and returns is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ... import _torch
from . import cuts
from .graph import Graph, Op, Ref
from .rule import Rule

__all__ = ["SCALES", "VIEWS", "rule_of"]


# ------------------------------------------------------------------------------------------------- kinds of operators


def _pointwise(graph: Graph, op: Op) -> Rule:
    """Equal dims, counted from the end, of operands that are not broadcast along them."""
    rule = Rule()
    for output in op.outputs:
        shape = graph.shape(output)
        for tensor in dict.fromkeys(op.inputs):
            other = graph.shape(tensor)
            if tensor == output or len(other) > len(shape):
                continue
            shift = len(shape) - len(other)
            for dim, size in enumerate(other):
                if size == shape[dim + shift]:
                    rule.link((tensor, dim), (output, dim + shift))
        rule.free |= {(output, dim) for dim in range(len(shape))}
    return rule


def _view_rule(_graph: Graph, op: Op) -> Rule:
    return Rule(views=[(op.inputs[0], op.outputs[0])])


def _permuted(graph: Graph, op: Op) -> Rule:
    (source,), (output,), rule = op.inputs[:1], op.outputs[:1], Rule()
    ndim = len(graph.shape(source))
    if op.name == "aten.permute":
        order = [dim % ndim for dim in op.args[1]]
    else:
        order = list(range(ndim))
        dims = op.args[1:3] if op.name == "aten.transpose" else (0, 1)
        if ndim > 1:
            a, b = (dim % ndim for dim in dims)
            order[a], order[b] = order[b], order[a]
    for dim, old in enumerate(order):
        rule.link((source, old), (output, dim))
    return rule


def _expand(graph: Graph, op: Op) -> Rule:
    source, output, rule = op.inputs[0], op.outputs[0], Rule()
    shape, new = graph.shape(source), graph.shape(output)
    shift = len(new) - len(shape)
    for dim, size in enumerate(new):
        if dim >= shift and shape[dim - shift] == size:
            rule.link((source, dim - shift), (output, dim))
        else:
            rule.free.add((output, dim))
    return rule


def _repeat(graph: Graph, op: Op) -> Rule:
    source, output, rule = op.inputs[0], op.outputs[0], Rule()
    shape, new = graph.shape(source), graph.shape(output)
    shift = len(new) - len(shape)
    for dim, size in enumerate(new):
        if dim < shift or shape[dim - shift] == 1:
            rule.free.add((output, dim))
        elif shape[dim - shift] == size:
            rule.link((source, dim - shift), (output, dim))
    return rule


def _all_but(graph: Graph, op: Op, dims: Sequence[int], *, keeps: bool) -> Rule:
    """Operators on whole dims; each result has the other dims, and these if it ``keeps`` them."""
    rule = Rule()
    source = op.inputs[0]
    ndim = len(graph.shape(source))
    whole = {dim % max(ndim, 1) for dim in dims}
    others = [dim for dim in range(ndim) if dim not in whole]
    for output in op.outputs:
        has_all = keeps or len(graph.shape(output)) == ndim
        for place, dim in enumerate(others):
            rule.link((source, dim), (output, dim if has_all else place))
    return rule


def _reduction(graph: Graph, op: Op) -> Rule:
    dims = _dims_argument(op)
    if dims is None:
        dims = range(len(graph.shape(op.inputs[0])))
    rule = _all_but(graph, op, list(dims), keeps=False)
    if op.name in ("aten.sum", "aten.mean"):
        ndim = len(graph.shape(op.inputs[0]))
        rule.summed += [((op.inputs[0], dim % ndim),) for dim in dims]
        rule.averages = op.name == "aten.mean"
    return rule


def _dims_argument(op: Op) -> Sequence[int] | None:
    names = _torch.argument_names(op.func)
    name = "dim" if "dim" in names else None
    if name is None:
        return None
    position = names.index(name)
    value = op.kwargs.get(name, op.args[position] if position < len(op.args) else None)
    if value is None or value == []:
        return None
    return [value] if isinstance(value, int) else value


def _along(graph: Graph, op: Op) -> Rule:
    """Operators along one dim whose results have the shape of the operand: softmax, cumsum, sort, flip, roll."""
    dims = _dims_argument(op)
    if dims is None:
        dims = op.args[2] if op.name == "aten.roll" and len(op.args) > 2 else [op.args[1] if len(op.args) > 1 else -1]
    return _all_but(graph, op, list(dims) or list(range(len(graph.shape(op.inputs[0])))), keeps=True)


def _backwards(graph: Graph, op: Op) -> Rule:
    dims = op.args[1]
    return _all_but(graph, op, list(dims), keeps=True)


def _normalization(graph: Graph, op: Op) -> Rule:
    shape = op.args[1]
    ndim = len(graph.shape(op.inputs[0]))
    rule, source = Rule(), op.inputs[0]
    for output in op.outputs:
        for dim in range(ndim - len(shape)):
            if dim < len(graph.shape(output)):
                rule.link((source, dim), (output, dim))
    return rule


def _batch_norm(graph: Graph, op: Op) -> Rule:
    rule, source = Rule(), op.inputs[0]
    for tensor in (*op.inputs[1:], *op.outputs):
        shape = graph.shape(tensor)
        if shape:
            rule.link((source, 1), (tensor, 1 if len(shape) > 1 else 0))
    return rule


def _slice(graph: Graph, op: Op) -> Rule:
    source, output = op.inputs[0], op.outputs[0]
    shape = graph.shape(source)
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(shape)
    start, stop = (op.args[2] if len(op.args) > 2 else 0), (op.args[3] if len(op.args) > 3 else None)
    step = op.args[4] if len(op.args) > 4 else 1
    rule = _others(graph, source, output, dim)
    if step == 1:
        start, stop, _ = slice(start, stop).indices(shape[dim])
        _link_part(graph, rule, source, output, dim, start)
    return rule


def _others(graph: Graph, source: int, output: int, dim: int) -> Rule:
    rule = Rule()
    for other in range(len(graph.shape(source))):
        if other != dim:
            rule.link((source, other), (output, other))
    return rule


def _link_part(graph: Graph, rule: Rule, whole: int, part: int, dim: int, start: int) -> None:
    """Link a dim with that of a slice which begins at ``start``."""
    size, length = graph.shape(whole)[dim], graph.shape(part)[dim]
    rule.link(
        (whole, dim),
        (part, dim),
        lambda cut: cuts.part_of(cut, start, start + length),
        lambda cut: cuts.whole_of(cut, start, size),
    )


def _split(graph: Graph, op: Op) -> Rule:
    source, rule, start = op.inputs[0], Rule(), 0
    dim = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 else 0) % len(graph.shape(source))
    for output in op.outputs:
        part = _others(graph, source, output, dim)
        for place, links in part.links.items():
            rule.links.setdefault(place, []).extend(links)
        _link_part(graph, rule, source, output, dim, start)
        start += graph.shape(output)[dim]
    return rule


def _removed(graph: Graph, op: Op) -> Rule:
    """Take indices of a dim apart: select, unbind."""
    source, rule = op.inputs[0], Rule()
    ndim = len(graph.shape(source))
    dim = (op.args[1] if len(op.args) > 1 else 0) % ndim
    for output in op.outputs:
        for place, other in enumerate(d for d in range(ndim) if d != dim):
            rule.link((source, other), (output, place))
    return rule


def _cat(graph: Graph, op: Op) -> Rule:
    output, rule, start = op.outputs[0], Rule(), 0
    ndim = len(graph.shape(output))
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) % ndim
    for tensor in op.inputs:
        if len(graph.shape(tensor)) != ndim:  # an empty one, which counts for nothing
            continue
        for other in range(ndim):
            if other != dim:
                rule.link((tensor, other), (output, other))
        _link_part(graph, rule, output, tensor, dim, start)
        start += graph.shape(tensor)[dim]
    return rule


def _stack(graph: Graph, op: Op) -> Rule:
    output, rule = op.outputs[0], Rule()
    ndim = len(graph.shape(output))
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) % ndim
    for tensor in op.inputs:
        for place, other in enumerate(d for d in range(ndim) if d != dim):
            rule.link((tensor, place), (output, other))
    return rule


def _embedding(graph: Graph, op: Op) -> Rule:
    weight, index, output, rule = op.inputs[0], op.inputs[1], op.outputs[0], Rule()
    for dim in range(len(graph.shape(index))):
        rule.link((index, dim), (output, dim))
    rule.link((weight, 1), (output, len(graph.shape(output)) - 1))
    rule.summed.append(((weight, 0),))
    return rule


def _index(graph: Graph, op: Op) -> Rule:
    """Look up along some dims by tensors; the other dims stay, around those of the indices."""
    source, output, rule = op.inputs[0], op.outputs[0], Rule()
    indices = list(op.args[1])
    ndim, out_ndim = len(graph.shape(source)), len(graph.shape(output))
    indices += [None] * (ndim - len(indices))
    looked_up = [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]
    kept = [dim for dim in range(ndim) if dim not in looked_up]
    if any(graph.tensors[i.tensor].itemsize == 1 for i in indices if isinstance(i, Ref)):  # masks
        return rule
    if not looked_up or looked_up != list(range(looked_up[0], looked_up[-1] + 1)):
        return rule
    num_index = out_ndim - len(kept)
    for dim in kept:
        place = dim if dim < looked_up[0] else dim - len(looked_up) + num_index
        rule.link((source, dim), (output, place))
    return rule


def _gather(graph: Graph, op: Op) -> Rule:
    source, index, output = op.inputs[0], op.inputs[1], op.outputs[0]
    ndim, rule = len(graph.shape(source)), Rule()
    dim = op.args[1] % max(ndim, 1)
    for other in range(ndim):
        if other != dim:
            rule.link((index, other), (output, other))
            if graph.shape(source)[other] == graph.shape(output)[other]:
                rule.link((source, other), (output, other))
    return rule


def _index_select(graph: Graph, op: Op) -> Rule:
    return _others(graph, op.inputs[0], op.outputs[0], op.args[1] % len(graph.shape(op.inputs[0])))


# ------------------------------------------------------------------------------------------------- products


def _mm(graph: Graph, op: Op) -> Rule:
    a, b = op.inputs[-2:]
    output, rule = op.outputs[0], Rule()
    batch = len(graph.shape(output)) - 2
    for dim in range(batch):
        rule.link((a, dim), (output, dim))
        rule.link((b, dim), (output, dim))
    rule.link((a, batch), (output, batch))
    rule.link((b, batch + 1), (output, batch + 1))
    rule.summed.append(((a, batch + 1), (b, batch)))
    if len(op.inputs) == 3:  # a bias, broadcast
        bias = graph.shape(op.inputs[0])
        for dim, size in enumerate(bias):
            place = dim + len(graph.shape(output)) - len(bias)
            if size == graph.shape(output)[place]:
                rule.link((op.inputs[0], dim), (output, place))
    return rule


def _mv(_graph: Graph, op: Op) -> Rule:
    a, b = op.inputs[-2:]
    rule = Rule()
    rule.link((a, 0), (op.outputs[0], 0))
    rule.summed.append(((a, 1), (b, 0)))
    return rule


def _attention(graph: Graph, op: Op) -> Rule:
    query, key, value = op.inputs[:3]
    rule = Rule()
    shape = graph.shape(query)
    for output in op.outputs:
        for dim in range(min(2, len(graph.shape(output)))):
            if graph.shape(output)[dim] == shape[dim]:
                rule.link((query, dim), (output, dim))
    for tensor in (key, value):
        rule.link((query, 0), (tensor, 0))
        groups = shape[1] // graph.shape(tensor)[1]
        rule.link(
            (query, 1),
            (tensor, 1),
            lambda cut, groups=groups: cuts.unscaled(cut, groups),
            lambda cut, groups=groups: cuts.scaled(cut, groups),
        )
    for mask in op.inputs[3:]:
        other = graph.shape(mask)
        for dim in range(2):
            place = dim + len(other) - 4
            if place >= 0 and other[place] == shape[dim]:
                rule.link((query, dim), (mask, place))
    return rule


def _convolution(graph: Graph, op: Op) -> Rule:
    x, weight = op.inputs[:2]
    output, rule = op.outputs[0], Rule()
    groups, is_transposed = op.args[8], op.args[6]
    rule.link((x, 0), (output, 0))
    if is_transposed:
        return rule
    if groups == 1:
        rule.link((weight, 0), (output, 1))
        rule.summed.append(((x, 1), (weight, 1)))
    elif groups == graph.shape(x)[1] == graph.shape(output)[1]:
        rule.link((x, 1), (output, 1))
        rule.link((weight, 0), (output, 1))
    else:
        return rule
    for bias in op.inputs[2:3]:
        rule.link((bias, 0), (output, 1))
    return rule


def _padded(graph: Graph, op: Op) -> Rule:
    pads, ndim = op.args[1], len(graph.shape(op.inputs[0]))
    padded = [ndim - 1 - place // 2 for place, size in enumerate(pads) if size]
    return _all_but(graph, op, padded, keeps=True)


def _last_dims(graph: Graph, op: Op) -> Rule:
    """Operators on the last two dims: triangles."""
    return _all_but(graph, op, [-1, -2], keeps=True)


def _complex_view(graph: Graph, op: Op) -> Rule:
    source, output, rule = op.inputs[0], op.outputs[0], Rule()
    for dim in range(min(len(graph.shape(source)), len(graph.shape(output)))):
        rule.link((source, dim), (output, dim))
    return rule


def _made(graph: Graph, op: Op) -> Rule:
    """Tensors of one number, or without values; an operand gives its dtype."""
    return Rule(free={(tensor, dim) for tensor in (*op.inputs, *op.outputs) for dim in range(len(graph.shape(tensor)))})


VIEWS = frozenset(
    f"aten.{name}"
    for name in [
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "t",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
        "expand",
        "alias",
        "detach",
        "clone",
        "contiguous",
        "_to_copy",
        "view_as",
        "cat",
    ]
)
"""Operators that move values only."""

SCALES = frozenset(("aten.mul", "aten.div"))
"""Operators that scale their first operand."""

RULES: dict[str, Callable[[Graph, Op], Rule]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"), _view_rule),
    **dict.fromkeys(("transpose", "t", "permute"), _permuted),
    **dict.fromkeys(("alias", "detach", "clone", "_to_copy", "copy_", "copy", "lift_fresh", "contiguous"), _pointwise),
    **dict.fromkeys(("native_dropout", "bernoulli", "bernoulli_", "masked_fill", "masked_fill_"), _pointwise),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"), _pointwise),
    **dict.fromkeys(("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"), _made),
    **dict.fromkeys(("fill_", "zero_"), _pointwise),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "var_mean", "max", "min"), _reduction),
    **dict.fromkeys(("any", "all", "prod", "logsumexp", "argmax", "argmin", "linalg_vector_norm", "norm"), _reduction),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp"), _along),
    **dict.fromkeys(("sort", "topk", "roll"), _along),
    "flip": _backwards,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _normalization),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _batch_norm),
    "expand": _expand,
    "repeat": _repeat,
    "slice": _slice,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("select", "unbind"), _removed),
    "cat": _cat,
    "stack": _stack,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _mm),
    "mv": _mv,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention,
    ),
    "convolution": _convolution,
    "constant_pad_nd": _padded,
    **dict.fromkeys(("tril", "triu", "tril_", "triu_"), _last_dims),
    **dict.fromkeys(("view_as_real", "view_as_complex"), _complex_view),
}


def rule_of(graph: Graph, op: Op) -> Rule:
    """Return the rule of an operator; one without links if it is not known."""
    if op.func is None:
        return Rule()
    rule = RULES.get(op.name.removeprefix("aten."))
    if rule is None and torch.Tag.pointwise in op.func.tags:
        rule = _pointwise
    return Rule() if rule is None else rule(graph, op)
