"""Tiny LLaMA and Mixtral of Hugging Face, and their tensor parallelism by hand and by torch's own styles.

By hand: local shards take the place of the parameters, and a hook stands at every boundary; the modules' own code runs
on local tensors. With sequence parallelism, per layer and for attention and feed-forward alike:

    norm -> all-gather -> module on a rank's heads, inner dim or experts -> reduce-scatter

Embedding and head are sharded over the vocabulary. Positions and masks come from the embedding's shape, so it is whole,
and the first layer takes this rank's part of the sequence.

Experts: every rank sees all tokens and computes those routed to its experts; index and weights of others are masked.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from handwritten import gather, gather_equal, partial_sum, scatter, share, split, whole_from_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as stock
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging

__all__ = ["FAMILIES", "build", "by_hand", "parallelize_as_stock"]

logging.set_verbosity_error()

FAMILIES = {"LLaMA": (LlamaForCausalLM, LlamaConfig), "Mixtral": (MixtralForCausalLM, MixtralConfig)}


def build(family: str, *, balanced: bool = False, **sizes: int) -> nn.Module:
    """Return a model with random weights, the same on every call.

    Args:
        family: key of `FAMILIES`.
        balanced: whether tokens are dealt to experts in turn instead of as the router says. On a fake process group
            activations mean nothing, and the number of tokens of an expert would be an accident.
        sizes: of the config.
    """
    make, configure = FAMILIES[family]
    config = configure(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = make(config).to(torch.get_default_dtype()).train()
    if balanced and family == "Mixtral":
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(_deal)
    return model


def _deal(gate: nn.Module, _args: tuple, output: tuple) -> tuple:
    logits, weights, index = output
    num_tokens, k = index.shape
    return logits, weights, torch.arange(num_tokens * k).remainder(gate.num_experts).view(num_tokens, k)


# ------------------------------------------------------------------------------------------------------------- by hand


def by_hand(
    model: nn.Module, group: dist.ProcessGroup, *, sum_at_experts: bool = False
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Shard a model of `build` over the ranks of `group`, in place.

    Args:
        model: of `build`.
        group: the ranks.
        sum_at_experts: whether experts give and take what is equal on all ranks, so that nothing around them is a
            partial sum, at the price of all-reduces. Otherwise sums wait for the next boundary, where they are cheaper.

    Returns:
        The model, and the parameters whose gradients are partial sums over the ranks after backward.
    """
    core = model.model
    shared = [core.norm.weight]
    for layer in core.layers:
        _attention(layer.self_attn, group)
        _feed_forward(layer.mlp, group, sum_at_experts=sum_at_experts)
        shared += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        if hasattr(layer.mlp, "gate") and not sum_at_experts:
            shared.append(layer.mlp.gate.weight)
    _embedding(core.embed_tokens, group)
    _first(core.layers[0], lambda x: split(x, group))
    _first(model.lm_head, lambda x: gather(x, group))
    _shard(model.lm_head, "weight", 0, group)
    _last(model.lm_head, lambda logits: whole_from_equal(logits, group))
    return model, shared


def _attention(attention: nn.Module, group: dist.ProcessGroup) -> None:
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        _shard(linear, "weight", 0, group)
    _shard(attention.o_proj, "weight", 1, group)

    def enter(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"], group)}

    attention.register_forward_pre_hook(enter, with_kwargs=True)
    _last(attention.o_proj, lambda x: scatter(x, group))


def _feed_forward(mlp: nn.Module, group: dist.ProcessGroup, *, sum_at_experts: bool = False) -> None:
    """Dense or of experts. The router sees all tokens; each rank's gradient of it is that of its experts."""
    early = sum_at_experts and hasattr(mlp, "experts")
    _first(mlp, lambda x: gather_equal(x, group) if early else gather(x, group))
    if hasattr(mlp, "experts"):
        _experts(mlp.experts, group, sum_here=early)
    else:
        _shard(mlp.gate_proj, "weight", 0, group)
        _shard(mlp.up_proj, "weight", 0, group)
        _shard(mlp.down_proj, "weight", 1, group)
    _last(mlp, lambda x: split(x, group) if early else scatter(x, group))


def _experts(experts: nn.Module, group: dist.ProcessGroup, *, sum_here: bool) -> None:
    count = experts.num_experts // group.size()
    start = group.rank() * count
    _shard(experts, "gate_up_proj", 0, group)
    _shard(experts, "down_proj", 0, group)
    experts.num_experts = count

    def enter(_module: nn.Module, args: tuple) -> tuple:
        hidden, index, weights = args
        if sum_here:
            hidden, weights = share(hidden, group), share(weights, group)
        elsewhere = (index < start) | (index >= start + count)
        return hidden, (index - start).masked_fill(elsewhere, count), weights.masked_fill(elsewhere, 0)

    experts.register_forward_pre_hook(enter)
    if sum_here:
        _last(experts, lambda x: partial_sum(x, group))


def _embedding(embedding: nn.Module, group: dist.ProcessGroup) -> None:
    start = group.rank() * (embedding.num_embeddings // group.size())
    _shard(embedding, "weight", 0, group)
    count = embedding.weight.shape[0]
    elsewhere: list[Tensor] = []

    def enter(_module: nn.Module, args: tuple) -> tuple:
        elsewhere.append((args[0] < start) | (args[0] >= start + count))
        return ((args[0] - start).masked_fill(elsewhere[-1], 0),)

    def leave(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        return partial_sum(output.masked_fill(elsewhere.pop().unsqueeze(-1), 0), group)

    embedding.register_forward_pre_hook(enter)
    embedding.register_forward_hook(leave)


def _first(module: nn.Module, convert) -> None:
    module.register_forward_pre_hook(lambda _module, args: (convert(args[0]), *args[1:]))


def _last(module: nn.Module, convert) -> None:
    module.register_forward_hook(lambda _module, _args, output: convert(output))


def _shard(module: nn.Module, name: str, dim: int, group: dist.ProcessGroup) -> None:
    part = getattr(module, name).detach().chunk(group.size(), dim)[group.rank()].clone()
    setattr(module, name, nn.Parameter(part))


# --------------------------------------------------------------------------------------------------------- stock torch


def parallelize_as_stock(model: nn.Module, mesh: DeviceMesh, *, experts_by_hand: bool = False) -> nn.Module:
    """Parallelize a model of `build` with torch's own styles, with sequence parallelism, as its tutorial does.

    There is no style for experts. Without a rewritten forward, torch can shard their weights as DTensors, one share of
    the experts per rank, and DTensor then gathers the weights. Plain tensors in operators with DTensors must count as
    replicated, so the step runs in `implicit_replication()`.

    Args:
        model: of `build`.
        mesh: of one axis.
        experts_by_hand: whether the experts are those of `by_hand` instead.
    """
    cut, whole = Shard(1), Replicate()
    column, row = stock.ColwiseParallel(), stock.RowwiseParallel(output_layouts=cut)
    enter = stock.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    styles = {
        "model.embed_tokens": stock.RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "model.layers.0": stock.PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(cut,), use_local_output=True
        ),
        "model.layers.*.input_layernorm": stock.SequenceParallel(),
        "model.layers.*.self_attn": enter,
        "model.layers.*.self_attn.[qkv]_proj": column,
        "model.layers.*.self_attn.o_proj": row,
        "model.layers.*.post_attention_layernorm": stock.SequenceParallel(),
        "model.norm": stock.SequenceParallel(),
        "lm_head": stock.ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    if hasattr(model.model.layers[0].mlp, "experts"):
        styles["model.layers.*.post_attention_layernorm"] = stock.SequenceParallel(use_local_output=True)
        for layer in model.model.layers:
            if experts_by_hand:
                _feed_forward(layer.mlp, mesh.get_group())
            else:
                _shard_experts(layer.mlp.experts, mesh)
        if not experts_by_hand:
            styles["model.layers.*.mlp"] = stock.PrepareModuleInputOutput(
                input_layouts=(cut,),
                desired_input_layouts=(whole,),
                use_local_input=True,
                output_layouts=(whole,),
                desired_output_layouts=(cut,),
            )
            styles["model.layers.*.mlp.experts"] = stock.PrepareModuleInputOutput(
                input_layouts=(whole, None, whole),
                desired_input_layouts=(whole, None, whole),
                use_local_input=False,
                output_layouts=(whole,),
                desired_output_layouts=(whole,),
            )
    else:
        styles["model.layers.*.mlp"] = stock.PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,))
        styles["model.layers.*.mlp.gate_proj"] = styles["model.layers.*.mlp.up_proj"] = column
        styles["model.layers.*.mlp.down_proj"] = row
    return stock.parallelize_module(model, mesh, styles)


def _shard_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
