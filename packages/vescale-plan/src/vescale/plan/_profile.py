"""Profile a model for the planner, without its memory.

`profile` reads shapes, so the model may be real, on ``torch.device("meta")`` or deferred, or be described by a class
with arguments or a config. It collects

* every parameter: name, shape, dtype, and its **position** in the chain of blocks: -1 before the blocks (embedding),
  ``i`` in block ``i``, ``num_blocks`` after them (last norm, head). A tied parameter has several positions.
* **activations**, if a sequence length is given: one forward and backward runs on tensors without data (`_measure`).
  It finds what each block keeps and computes, which matrices tensor parallelism can split, where parameters outside
  of blocks are used, and which modules are experts: from what runs, not from names.
* the transformer's sizes (hidden size, heads, experts, ...), for refusals, and for a formula of activations in place
  of a measurement. Sources: `_sizes.py`. ``ModelProfile.notes`` lists assumptions; correct one with
  ``dataclasses.replace(profile(model), heads=16)``.

The blocks are those that ``vescale.pipe`` distributes over stages (`_blocks.py`).
"""

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ._blocks import find_blocks
from ._checked import CheckedInside, Count, checked
from ._measure.build import build
from ._measure.repeats import measured_as
from ._measure.result import Activations
from ._measure.run import measure
from ._parameters import ParameterInfo, find_parameters
from ._schedules import recomputed
from ._sizes import config_of, find_sizes, has_dropout, is_gated, mixes_rows
from ._units import format_bytes, format_count

#: What describes a model: see `_measure/build.py`.
Model = Any
Inputs = Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]]


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
        refusals: reasons to refuse layouts, by the field of `Layout`: a layout in which it has another value than 1
            (``sequence_parallel``: False; ``zero``: 0) is refused.
        activations: measured ones; ``None``: they are estimated by a formula.
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
    refusals: Mapping[str, str] = field(default_factory=dict, hash=False)
    activations: Activations | None = None

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(info.numel for info in self.parameters)

    @property
    def flops_per_token(self) -> float | None:
        """Floating-point operations of forward and backward for a token, as `count_flops` counts them; None: no run."""
        found = self.activations
        return None if found is None else found.flops_per_row / found.sequence_length

    @functools.cached_property
    def kinds(self) -> tuple[tuple[ParameterInfo, int], ...]:
        """The first parameter of each kind, and how many are alike: in size, in positions, in how ranks share them."""
        alike: dict[Any, list[ParameterInfo]] = {}
        for info in self.parameters:
            kind = info.numel, info.positions, info.sharded, info.trainable, info.expert
            alike.setdefault(kind, []).append(info)
        return tuple((infos[0], len(infos)) for infos in alike.values())

    @property
    def spreads_experts(self) -> bool:
        """Whether tensor parallelism spreads experts over its ranks, or shards them."""
        return any(info.expert and info.sharded for info, _ in self.kinds)

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
            *self._measured(),
            *(f"  assumed    {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def _measured(self) -> list[str]:
        found = self.activations
        if found is None:
            return []
        kept = sum(found.parts[index].kept.per_row.total for index in found.order)
        return [
            f"  measured   {format_bytes(kept)} and {format_count(found.flops_per_row)} operations for a row of "
            f"{found.sequence_length} tokens"
        ]


@checked
def build_model(model: CheckedInside[Model]) -> nn.Module:
    """Return the module that a description stands for, on the meta device; a module as it is.

    Args:
        model: an ``nn.Module``; a config of Hugging Face; or a class or function with arguments, as
            ``functools.partial(GPT, config)`` or ``(GPT, config)``, with keyword arguments in a dict at the end.

    Raises:
        TypeError: ``model`` is none of these.

    Example:
        >>> build_model((nn.Linear, 4, 8)).weight.shape
        torch.Size([8, 4])
    """
    return build("build_model", model)


@checked
def repeated_blocks(model: nn.Module) -> dict[str, str]:
    """Return the first block of the same kind, by the name of each block: of the same modules, sizes and settings.

    Example:
        >>> repeated_blocks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)))
        {'0': '0', '1': '1', '2': '1'}
    """
    names = find_blocks(model).names
    first = measured_as({name: model.get_submodule(name) for name in names}, each=1)
    return {name: names[number] for name, number in zip(names, first, strict=True)}


@checked
def blocks_of(model: nn.Module, *, every: Count = 1) -> tuple[str, ...]:
    """Return the names of the blocks of a model, which a pipeline distributes over stages.

    They are the entries with parameters of the longest ``nn.ModuleList``, and of others with entries of a similar size;
    without a list, those of the longest ``nn.Sequential``.

    Args:
        model: any module; no tensor is read.
        every: k for every k-th block alone, as ``Plan(recompute=k)`` counts them.

    Example:
        >>> layers = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])})
        >>> blocks_of(layers), blocks_of(layers, every=2)
        (('layers.0', 'layers.1'), ('layers.1',))
    """
    names = find_blocks(model).names
    return tuple(names[position] for position in recomputed(len(names), every))


@checked
def profile(
    model: CheckedInside[Model],
    *,
    sequence_length: Count | None = None,
    inputs: Inputs | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    tp_sharded: Sequence[str] | None = None,
    fused_attention: bool | None = None,
) -> ModelProfile:
    """Read a model's sizes from its shapes, and measure its activations; allocates nothing.

    Args:
        model: real, meta or deferred module; a config of Hugging Face; or a class or function with arguments, as
            ``functools.partial(GPT, config)`` or ``(GPT, config)``.
        sequence_length: tokens of a row, for which a forward and a backward are run on tensors without data. ``None``:
            nothing is run, and activations are estimated by a formula. So they are for a model that cannot run without
            data; ``notes`` has the reason.
        inputs: keyword arguments of the model: a batch, or a function of the number of rows and the sequence length;
            tensors have the rows in dim 0 and may be on the meta device. ``None``: those of Hugging Face's models, or
            tokens or numbers.
        loss_fn: computes the loss from the model's output, and from ``target`` if the inputs have one, as for
            ``vescale.parallelize``. ``None``: ``output.loss``, a scalar, or the sum of the output.
        tp_sharded: regular expressions (full match) of the parameter FQNs sharded by tensor parallelism. ``None``: the
            matrices that the run finds; without a run matrices inside blocks except routers, and matrices over the
            vocabulary.
        fused_attention: for the formula: whether attention scores are not saved for backward. ``None``: false only if
            the attention implementation in ``model.config`` is ``"eager"``.

    Returns:
        The `ModelProfile`; ``print`` shows its sizes.

    Raises:
        TypeError: ``model`` is none of these.
        ValueError: ``model`` has no parameters, does not run with the given inputs or loss function, or a pattern of
            ``tp_sharded`` matches none of them.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 6)
        >>> found = profile(model)
        >>> (found.num_blocks, found.hidden, found.heads, found.ffn)
        (6, 64, 4, 256)
        >>> measured = profile(model, sequence_length=128)
        >>> measured.activations.parts[1].kept.per_row.total > 128 * 64 * 4
        True
    """
    model = build("profile", model)
    blocks = find_blocks(model)
    sizes, notes = find_sizes(model, next(map(model.get_submodule, blocks.names), model))
    parameters = tuple(find_parameters(model, blocks.names, sizes, tp_sharded))
    if not parameters:
        raise ValueError(
            f"profile: expected a model with parameters, got {type(model).__name__} without any; pass the full model"
        )
    config = config_of(model)
    if fused_attention is None:
        fused_attention = getattr(config, "_attn_implementation", None) != "eager"
    elements: dict[str, int] = {}
    for info in parameters:
        elements[info.dtype] = elements.get(info.dtype, 0) + info.numel
    if len(elements) > 1:
        notes.append(f"every parameter has the most frequent dtype of {', '.join(sorted(elements))}")
    found = ModelProfile(
        parameters=parameters,
        blocks=" and ".join(blocks.lists),
        num_blocks=len(blocks.names),
        gated=is_gated(parameters, sizes),
        dropout=has_dropout(model, config),
        fused_attention=fused_attention,
        dtype=max(elements, key=elements.__getitem__),
        notes=tuple(notes),
        refusals={"num_microbatches": reason} if (reason := mixes_rows(model)) else {},
        **cast(dict[str, Any], sizes),
    )
    if sequence_length is None:
        return found
    names = [info.fqn for info in parameters if len(info.shape) >= 2 and (info.sharded or tp_sharded is None)]
    try:
        activations, positions, experts = measure(
            model, sequence_length=sequence_length, splittable=names, inputs=inputs, loss_fn=loss_fn
        )
    except Exception as error:  # the model's own code, which may need data, or other inputs
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if inputs is not None or loss_fn is not None:
            raise ValueError(
                f"profile: expected inputs and loss_fn with which {type(model).__name__} runs on tensors without data, "
                f"got inputs={reprlib.repr(inputs)} and loss_fn={loss_fn!r} ({reason[:200]}); correct them"
            ) from error
        note = f"activations by a formula, since the model does not run on tensors without data ({reason[:160]})"
        return dataclasses.replace(found, notes=(*found.notes, note))
    infos = tuple(_measured(info, found, activations, positions, experts, tp_sharded is None) for info in parameters)
    heads = {"heads": activations.heads, "kv_heads": activations.kv_heads} if activations.heads else {}
    return dataclasses.replace(found, parameters=infos, activations=activations, **cast(dict[str, Any], heads))


def _measured(
    info: ParameterInfo,
    found: ModelProfile,
    activations: Activations,
    positions: Mapping[str, tuple[int, ...]],
    experts: frozenset[str],
    finds_split: bool,
) -> ParameterInfo:
    """Return a parameter with what a run has found out about it."""
    outside = not all(0 <= position < found.num_blocks for position in info.positions)
    if outside and info.fqn in positions:
        info = dataclasses.replace(info, positions=positions[info.fqn])
    is_expert = info.fqn in experts
    if finds_split:
        is_vocabulary = outside and info.shape[:1] == (found.vocab,)
        sharded = is_expert or info.fqn in activations.split or is_vocabulary
        info = dataclasses.replace(info, sharded=len(info.shape) >= 2 and sharded)
    return dataclasses.replace(info, expert=is_expert)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype given by name, ``"bfloat16" -> 2``."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected the name of a dtype such as 'bfloat16' for dtype, got {dtype!r}; pass one of torch")
    return found.itemsize
