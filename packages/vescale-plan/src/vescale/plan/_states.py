"""Parameters, gradients and optimizer state of a rank, and their buffers.

P parameters held by a rank, N ranks over which state is sharded; bytes per parameter p, g, o for parameters, gradients,
optimizer:

    ZeRO-0   (p + g + o) P
    ZeRO-1   (p + g) P + o P/N
    ZeRO-2   p P + (g + o) P/N
    ZeRO-3   (p + g + o) P/N      plus the full parameters in use: those outside of blocks, and two blocks

With p, g, o = 2, 2, 12 these are the formulas of the ZeRO paper (arXiv 1910.02054, figure 1); with 2, 4, 12 and 4, 4, 8
those of Megatron's distributed optimizer. P is the rank's share: its stages' parameters, those that tp shards over tp,
experts over the ranks that spread them. N is dp / dp_replicate, for experts divided by ep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ._activations import ceil_div
from ._checked import Condition, Count, checked
from ._checked import Size as Number
from ._checks import ZERO_STAGES, check_int
from ._layout import Layout
from ._parameters import ParameterInfo
from ._profile import ModelProfile, dtype_bytes
from ._schedules import rank_of_stage, stage_blocks

Stage = Annotated[int, Condition("0, 1, 2 or 3", lambda zero: zero in ZERO_STAGES)]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of the three model states.

    Attributes:
        params: the parameter itself.
        grads: its gradient.
        optimizer: optimizer state: two moments for AdamW, plus a master copy, if any.

    Example:
        >>> StateBytes(params=2, grads=2, optimizer=12)      # mixed precision Adam of the ZeRO paper: 16 bytes
        StateBytes(params=2, grads=2, optimizer=12)
    """

    params: int
    grads: int
    optimizer: int

    def __post_init__(self) -> None:
        for name in ("params", "grads", "optimizer"):
            check_int("StateBytes", name, getattr(self, name), at_least=0)

    @staticmethod
    @checked
    def for_dtype(dtype: str) -> StateBytes:
        """Return AdamW's bytes if parameters, gradients and both moments have the same dtype."""
        size = dtype_bytes(dtype)
        return StateBytes(params=size, grads=size, optimizer=2 * size)

    @staticmethod
    @checked
    def for_layout(dtype: str, layout: Layout) -> StateBytes:
        """Return AdamW's bytes for a model in a dtype, with the dtypes of a layout.

        Parameters are cast to ``param_dtype``, if it has fewer bits, and then have masters of their own dtype; moments
        have the dtype of masters, or ``state_dtype``.

        Example:
            >>> StateBytes.for_layout("float32", Layout(dp=1, tp=1, pp=1, param_dtype="bfloat16"))
            StateBytes(params=2, grads=2, optimizer=12)
        """
        own = dtype_bytes(dtype)
        params = min(dtype_bytes(layout.param_dtype or dtype), own)
        masters = dtype_bytes(layout.master_dtype) if layout.master_dtype else own
        masters = masters if masters > params else 0
        moment = dtype_bytes(layout.state_dtype) if layout.state_dtype else (masters or params)
        grads = dtype_bytes(layout.grad_dtype) if layout.grad_dtype else params
        return StateBytes(params=params, grads=grads, optimizer=2 * moment + masters)


@checked
def model_state_bytes(num_params: Number, *, state: StateBytes, dp: Count = 1, zero: Stage = 0) -> tuple[int, int, int]:
    """Return bytes of parameters, gradients and optimizer state on one rank.

    Args:
        num_params: trainable elements of the rank after tensor and pipeline parallelism.
        state: bytes per element.
        dp: number of ranks over which state is sharded.
        zero: ZeRO stage 0 to 3.

    Example:
        >>> sum(model_state_bytes(1000, state=StateBytes(2, 2, 12), dp=4, zero=1)) == 4 * 1000 + 12 * 1000 // 4
        True
    """
    shard = ceil_div(num_params, dp)
    params, grads, optimizer = (shard if zero >= first else num_params for first in (3, 2, 1))
    return params * state.params, grads * state.grads, optimizer * state.optimizer


@dataclass(frozen=True)
class RankParams:
    """Parameter elements on one rank of a pipeline.

    Attributes:
        trainable, frozen: elements of all parameters but experts.
        experts, frozen_experts: elements of experts.
        largest: elements of the largest trainable parameter.
        block: elements of the largest block.
        edges: elements of parameters in no block, or in several.
    """

    trainable: int = 0
    frozen: int = 0
    experts: int = 0
    frozen_experts: int = 0
    largest: int = 0
    block: int = 0
    edges: int = 0


def ranks_of_positions(num_blocks: int, layout: Layout) -> dict[int, int]:
    """Return the rank of the pipeline that has each position in the chain of blocks, from -1 to ``num_blocks``."""
    found: dict[int, int] = {}
    for stage, blocks in enumerate(stage_blocks(num_blocks, layout.pp * layout.stages)):
        rank = rank_of_stage(stage, layout.pp, layout.schedule)
        found |= dict.fromkeys(blocks, rank)
        if stage == 0:
            found[-1] = rank
        found[num_blocks] = rank  # the last stage has the end
    return found


def rank_params(profile: ModelProfile, layout: Layout) -> tuple[RankParams, ...]:
    """Count parameter elements on a rank of every pipeline coordinate; a tied one counts on each that uses it."""
    rank_of = ranks_of_positions(profile.num_blocks, layout)
    counts: list[dict[str, int]] = [
        dict.fromkeys(("trainable", "frozen", "experts", "frozen_experts", "largest"), 0) for _ in range(layout.pp)
    ]
    owners: list[dict[int, int]] = [{} for _ in counts]  # elements by block; -1 for the edges
    for info, count in profile.kinds:
        each = local_numel(info, layout)
        numel = count * each
        used_by = {position if 0 <= position < profile.num_blocks else -1 for position in info.positions}
        owner = next(iter(used_by)) if len(used_by) == 1 else -1
        for rank in {rank_of[min(position, profile.num_blocks)] for position in info.positions}:
            owners[rank][owner] = owners[rank].get(owner, 0) + numel
            own = counts[rank]
            if info.trainable:
                own["experts" if info.expert else "trainable"] += numel
                own["largest"] = max(own["largest"], each)
            else:
                own["frozen_experts" if info.expert else "frozen"] += numel
    return tuple(
        RankParams(**own, edges=owned.pop(-1, 0), block=max(owned.values(), default=0))
        for own, owned in zip(counts, owners, strict=True)
    )


def local_numel(info: ParameterInfo, layout: Layout) -> int:
    """Return the elements of a parameter on a rank, before ZeRO."""
    ranks = layout.tp if info.sharded else 1
    return ceil_div(info.numel, ranks * layout.ep if info.expert else ranks)


def state_of_rank(params: RankParams, layout: Layout, state: StateBytes) -> tuple[int, int, int]:
    """Return bytes of parameters, gradients and optimizer state of a rank; frozen parameters have no other states."""
    shards = layout.dp // layout.dp_replicate
    groups = ((params.trainable, params.frozen, shards), (params.experts, params.frozen_experts, shards // layout.ep))
    total = [0, 0, 0]
    for trainable, frozen, ranks in groups:
        of_group = model_state_bytes(trainable, state=state, dp=max(ranks, 1), zero=layout.zero)
        total = [a + b for a, b in zip(total, of_group, strict=True)]
        total[0] += (ceil_div(frozen, max(ranks, 1)) if layout.zero == 3 else frozen) * state.params
    return total[0], total[1], total[2]


def buffer_bytes(params: RankParams, layout: Layout, *, state: StateBytes, bucket_bytes: int) -> int:
    """Return the bytes of buffers in addition to the model states.

    Full parameters have the layout's ``param_dtype``, if that has fewer bits, and their gradients have it, too.

    ZeRO-1 keeps the reduced shard in addition to the full gradients. ZeRO-2 holds two full buckets during backward: one
    being filled and one being reduced (a parameter larger than ``bucket_bytes`` has its own bucket). ZeRO-3 holds full
    parameters and gradients outside of blocks and of two blocks: one running, one in a collective; all full parameters
    if they are kept after forward. A pipeline, and accumulation, sum the gradients of micro-batches in a copy.
    Gradients that are reduced in another dtype are copied block by block.
    """
    trainable = params.trainable + params.experts
    everything = trainable + params.frozen + params.frozen_experts
    full, shards = trainable * state.grads, layout.dp // layout.dp_replicate
    in_use = params.edges + 2 * params.block
    width = min(state.params, dtype_bytes(layout.param_dtype)) if layout.param_dtype else state.params
    grad_width = width if layout.zero == 3 and layout.grad_dtype is None else state.grads
    total = 0
    if layout.zero == 1:
        total += ceil_div(trainable, shards) * state.grads
    elif layout.zero == 2:
        total += min(2 * max(bucket_bytes, params.largest * state.grads), full)
    elif layout.zero == 3 and shards > 1:
        total += (min(in_use, everything) if layout.reshard_after_forward else everything) * width
        total += min(in_use, trainable) * grad_width
    if layout.pp > 1 or layout.num_microbatches > 1:
        total += full
    if layout.reduce_dtype is not None and dtype_bytes(layout.reduce_dtype) != grad_width and shards > 1:
        total += min(max(params.block, params.edges), trainable) * dtype_bytes(layout.reduce_dtype)
    return total


def positions_of_ranks(profile: ModelProfile, layout: Layout) -> list[list[int]]:
    """Return the positions of each rank of the pipeline, in the order of the chain, from -1 to ``num_blocks``."""
    found: list[list[int]] = [[] for _ in range(layout.pp)]
    for position, rank in sorted(ranks_of_positions(profile.num_blocks, layout).items()):
        found[rank].append(position)
    return found
