"""Profile a model for the planner, without running it and without its memory.

`profile` reads shapes only, so the model may be real, on ``torch.device("meta")`` or deferred. It collects

* every parameter: name, shape, dtype, and its **position** in the chain of blocks: -1 before the blocks (embedding),
  ``i`` in block ``i``, ``num_blocks`` after them (last norm, head). A tied parameter has several positions.
* the transformer's sizes (hidden size, heads, experts, ...). Sources, in order: a ``model.config`` as in Hugging Face,
  integer attributes of the first block's modules, and shapes of layers. ``ModelProfile.notes`` lists assumptions;
  correct one with ``dataclasses.replace(profile(model), heads=16)``.

The blocks are the entries with parameters of the longest ``nn.ModuleList``, or of the longest ``nn.Sequential`` if
there is no ``nn.ModuleList``. Lists inside another list, such as the experts of a block, do not count. Activations of
all blocks are counted like those of the first. Parameters are counted one by one.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ._checked import checked
from ._units import format_count

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "embed_dim", "hidden_dim", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "top_k"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "intermediate_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
}
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


@dataclass(frozen=True)
class ParameterInfo:
    """Name, shape and position of one parameter.

    Attributes:
        fqn: first name under which the model lists it.
        shape: global shape.
        dtype: name of the dtype, such as ``"float32"``.
        positions: positions of its uses: -1 before the blocks, ``i`` in block ``i``, ``num_blocks`` after them.
        sharded: whether tensor parallelism shards it over the ``tp`` axis.
        trainable: whether it needs a gradient and optimizer state.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    positions: tuple[int, ...]
    sharded: bool
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelProfile:
    """The sizes of a model for the planner. All sizes are counts of elements; 0 = none or not found.

    Attributes:
        parameters: every parameter once, in the model's order.
        blocks: FQN of the list of blocks, ``""`` if there is none.
        num_blocks: blocks that a pipeline can distribute.
        hidden, heads, kv_heads, head_dim, ffn, vocab: the transformer's sizes.
        experts, experts_per_token: mixture of experts; 0 and 0 for a dense model.
        gated: the feed-forward is ``down(act(gate(x)) * up(x))`` and not ``down(act(up(x)))``.
        dropout: the model has active dropout, with masks saved for backward.
        fused_attention: attention scores are recomputed in backward and not saved.
        dtype: dtype of most parameter elements, assumed for activations too.
        notes: assumptions about sizes that were not found.
        tp_refusal: reason to refuse tensor parallelism for this model; empty if it is supported.
    """

    parameters: tuple[ParameterInfo, ...]
    blocks: str
    num_blocks: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int
    experts_per_token: int
    gated: bool
    dropout: bool
    fused_attention: bool
    dtype: str
    notes: tuple[str, ...] = ()
    tp_refusal: str = ""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(info.numel for info in self.parameters)

    def __str__(self) -> str:
        moe = f", {self.experts} experts of which {self.experts_per_token} per token" if self.experts else ""
        attention = "fused" if self.fused_attention else "unfused (scores kept)"
        lines = [
            f"ModelProfile: {format_count(self.num_parameters)} parameters in {self.dtype}",
            f"  blocks     {self.num_blocks} in {self.blocks!r}" if self.num_blocks else "  blocks     none found",
            f"  attention  hidden {self.hidden}, {self.heads} heads of {self.head_dim}, "
            f"{self.kv_heads} key/value heads, {attention}",
            f"  ffn        {self.ffn}{' gated' if self.gated else ''}{moe}",
            f"  vocabulary {self.vocab}, dropout {'on' if self.dropout else 'off'}",
            *(f"  assumed    {note}" for note in self.notes),
        ]
        return "\n".join(lines)


@checked
def profile(
    model: nn.Module,
    *,
    tp_sharded: Sequence[str] | None = None,
    fused_attention: bool | None = None,
) -> ModelProfile:
    """Read a model's sizes from its shapes; allocates nothing and runs nothing.

    Args:
        model: real, meta or deferred module.
        tp_sharded: regular expressions (full match) of the parameter FQNs sharded by tensor parallelism. ``None``:
            matrices inside blocks except routers, and matrices over the vocabulary, as in common transformer plans.
        fused_attention: whether attention scores are not saved for backward. ``None``: false only if the attention
            implementation in ``model.config`` is ``"eager"``.

    Returns:
        The `ModelProfile`; ``print`` shows its sizes.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: ``model`` has no parameters, or a pattern of ``tp_sharded`` matches none of them.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 6)
        >>> found = profile(model)
        >>> (found.num_blocks, found.hidden, found.heads, found.ffn)
        (6, 64, 4, 256)
    """
    blocks, entries = _find_blocks(model)
    sizes, notes = _find_sizes(model, next(iter(entries.values()), model))
    parameters = tuple(_find_parameters(model, list(entries), sizes, tp_sharded))
    if not parameters:
        raise ValueError(
            f"profile: expected a model with parameters, got {type(model).__name__} without any; pass the full model"
        )
    config = _config(model)
    if fused_attention is None:
        fused_attention = getattr(config, "_attn_implementation", None) != "eager"
    elements: dict[str, int] = {}
    for info in parameters:
        elements[info.dtype] = elements.get(info.dtype, 0) + info.numel
    if len(elements) > 1:
        notes.append(f"every parameter has the most frequent dtype of {', '.join(sorted(elements))}")
    return ModelProfile(
        parameters=parameters,
        blocks=blocks,
        num_blocks=len(entries),
        gated=_is_gated(parameters, sizes),
        dropout=_has_dropout(model, config),
        fused_attention=fused_attention,
        dtype=max(elements, key=elements.__getitem__),
        notes=tuple(notes),
        **cast(dict[str, Any], sizes),
    )


def _config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def _find_blocks(model: nn.Module) -> tuple[str, dict[str, nn.Module]]:
    """Return FQN and entries of the longest list outside of other lists; the first of equals."""
    for kind in (nn.ModuleList, nn.Sequential):
        best: tuple[str, dict[str, nn.Module]] = ("", {})
        outermost: list[str] = []
        for fqn, module in model.named_modules():
            if not isinstance(module, kind) or any(f"{fqn}.".startswith(_prefix(outer)) for outer in outermost):
                continue
            outermost.append(fqn)
            children = module.named_children()
            entries = {_prefix(fqn) + name: child for name, child in children if list(child.parameters())}
            if len(entries) > max(len(best[1]), 1):
                best = (fqn, entries)
        if best[1]:
            return best
    return "", {}


def _prefix(fqn: str) -> str:
    return f"{fqn}." if fqn else ""


def _find_sizes(model: nn.Module, block: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return the transformer's sizes, and notes about assumed ones."""
    sources = [_config(model), *block.modules()]
    found = {name: _first_int(sources, attributes) for name, attributes in _NAMES.items()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if embeddings:
        largest = max(embeddings, key=lambda module: module.num_embeddings)
        found["vocab"] = found["vocab"] or largest.num_embeddings
        found["hidden"] = found["hidden"] or largest.embedding_dim
    found["hidden"] = found["hidden"] or _first_vector_length(block)
    found["experts"] = found["experts"] or _count_expert_modules(block)
    if found["experts"]:
        found["ffn"] = _first_int(sources, ("moe_intermediate_size",)) or found["ffn"]
    return _complete(found, block)


def _complete(found: dict[str, int], block: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Derive missing sizes from other sizes, and return notes about assumptions."""
    notes = []
    if not found["ffn"]:
        widest = max((module.in_features for module in block.modules() if isinstance(module, nn.Linear)), default=0)
        found["ffn"] = widest if widest > found["hidden"] else 4 * found["hidden"]
        if widest <= found["hidden"] and found["hidden"]:
            notes.append(f"ffn = 4 * hidden = {found['ffn']}")
    if not found["heads"]:
        notes.append("no attention heads found, so tensor parallelism cannot be checked")
    found["head_dim"] = found["head_dim"] or found["hidden"] // max(found["heads"], 1)
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    if not found["experts"]:
        found["experts_per_token"] = 0
    elif not found["experts_per_token"]:
        found["experts_per_token"] = min(2, found["experts"])
        notes.append(f"each token goes to {found['experts_per_token']} of {found['experts']} experts")
    return found, notes


def _first_int(sources: Iterable[object], names: Sequence[str]) -> int:
    """Return the first positive integer attribute; the order of sources has precedence over the order of names."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _first_vector_length(block: nn.Module) -> int:
    """Return the length of the block's first 1-D parameter (a norm or a bias), or 0."""
    return next((parameter.shape[0] for parameter in block.parameters() if parameter.dim() == 1), 0)


def _count_expert_modules(block: nn.Module) -> int:
    lists = [module for name, module in block.named_modules() if isinstance(module, nn.ModuleList) and "expert" in name]
    return max((len(module) for module in lists), default=0)


def _find_parameters(
    model: nn.Module, blocks: Sequence[str], sizes: dict[str, int], tp_sharded: Sequence[str] | None
) -> Iterable[ParameterInfo]:
    """Yield every parameter once, with the positions of all its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
        parameters[id(parameter)] = parameter
    _check_patterns(tp_sharded, [fqn for aliases in names.values() for fqn in aliases])
    front = _modules_in_front(model, blocks)
    for key, parameter in parameters.items():
        positions = sorted({_position(fqn, blocks, front) for fqn in names[key]})
        if tp_sharded is None:
            is_router = parameter.dim() == 2 and parameter.shape[0] == sizes["experts"]
            inside = all(0 <= position < len(blocks) for position in positions)
            is_vocabulary = parameter.shape[:1] == (sizes["vocab"],)
            sharded = parameter.dim() >= 2 and (is_vocabulary or (inside and not is_router))
        else:
            sharded = any(re.fullmatch(pattern, fqn) for pattern in tp_sharded for fqn in names[key])
        yield ParameterInfo(
            fqn=names[key][0],
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            positions=tuple(positions),
            sharded=sharded,
            trainable=parameter.requires_grad,
        )


def _check_patterns(tp_sharded: Sequence[str] | None, fqns: Sequence[str]) -> None:
    for pattern in tp_sharded or ():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"profile: expected regular expressions in tp_sharded, got {pattern!r} ({error}); use re.escape"
            ) from None
        if not any(re.fullmatch(pattern, fqn) for fqn in fqns):
            raise ValueError(
                f"profile: expected a parameter of the model for every pattern of tp_sharded, got none for "
                f"{pattern!r}; write a regular expression of full names such as {fqns[:3]}"
            )


def _modules_in_front(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Return the FQNs of the modules before the first block."""
    fqns = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    return set(itertools.takewhile(lambda fqn: fqn != blocks[0], fqns)) if blocks else set(fqns)


def _position(fqn: str, blocks: Sequence[str], front: set[str]) -> int:
    if not blocks:
        return 0
    owner = fqn.rpartition(".")[0]
    for position, block in enumerate(blocks):
        if f"{owner}.".startswith(f"{block}."):
            return position
    return -1 if owner in front else len(blocks)


def _is_gated(parameters: Sequence[ParameterInfo], sizes: dict[str, int]) -> bool:
    """Count the feed-forward's matrices of one block: two are plain, three (or a double one and a single) are gated."""
    ffn, hidden = sizes["ffn"], sizes["hidden"]
    if not ffn or hidden in (0, ffn):  # hidden unknown, or feed-forward and attention projections of equal shapes
        return any("gate_up" in info.fqn or "gate_proj" in info.fqn for info in parameters)
    per_block = sum(
        info.numel
        for info in parameters
        if info.positions == (0,) and len(info.shape) >= 2 and {ffn, 2 * ffn} & set(info.shape)
    )
    return per_block / (max(sizes["experts"], 1) * hidden * ffn) > 2.5


def _has_dropout(model: nn.Module, config: object) -> bool:
    modules = (
        module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0) for module in model.modules()
    )
    numbers = [*modules, *(getattr(config, name, 0) for name in _DROPOUT_NAMES)]
    return any(isinstance(value, float) and value > 0 for value in numbers)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype given by name, ``"bfloat16" -> 2``."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected the name of a dtype such as 'bfloat16' for dtype, got {dtype!r}; pass one of torch")
    return found.itemsize
