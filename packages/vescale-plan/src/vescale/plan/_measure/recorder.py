"""The mode in which a model runs on tensors without data: every operator below autograd passes here.

`Recorder` runs it (`Values`), counts its floating-point operations, enters the memory of its results (`Ledger`) with
what splits it (`Split`), and keeps one `Phase` for each position in the chain of blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import OperatorMode, flops_of, tree_leaves
from .memory import Counts, Ledger
from .split import PRODUCTS, Memory, Split, dim_after, dim_of, inner_of
from .values import Values

aten = torch.ops.aten
_CONSTANTS = ("zeros", "ones", "empty", "full", "arange", "scalar_tensor")


@dataclass
class Phase:
    """What happened at one position.

    Attributes:
        before: live bytes by kind when its forward began.
        peaks: live bytes by kind at the moments when they were many, in forward and in backward.
        forward_flops, backward_flops: multiplications and additions.
        outputs: memories of its outputs.
        products: memories of results of products of matrices and of attention in forward.
        parameters: names of the parameters that its operators have used.
    """

    before: Counts = ()
    peaks: list[Counts] = field(default_factory=list)
    forward_flops: int = 0
    backward_flops: int = 0
    outputs: list[Memory] = field(default_factory=list)
    products: list[Memory] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


class Recorder(OperatorMode):
    """Runs operators and records them, see the module.

    Args:
        split: what is known of parameters.

    Attributes:
        values, ledger, split: see their modules.
        phases: what happened, by position.
        heads: numbers of heads and of key-value heads of each attention.
        expert_width: inside of experts, the size of the last dim of tokens; 0 outside.
        last: the position after the blocks, where logits are computed.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.values, self.ledger, self.split = Values(), Ledger(), split
        self.phases: dict[int, Phase] = {}
        self.heads: list[tuple[int, int]] = []
        self.expert_width = 0
        self.last = -2
        self._phase, self._is_backward = Phase(), False

    def enter(self, position: int, *, backward: bool = False) -> None:
        """Begin to record for a position."""
        first = position not in self.phases
        self._phase = self.phases.setdefault(position, Phase())
        self._is_backward = backward
        if first:
            self._phase.before = tuple(self.ledger.counts)
        self.ledger.watch(self._phase.peaks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator and record it."""
        kwargs = kwargs or {}
        result = self.values.run(func, args, kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        flops = flops_of(func, args, kwargs, result)
        if self._is_backward:
            self._phase.backward_flops += flops
        else:
            self._phase.forward_flops += flops
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and self.ledger.of(leaf) is None]
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        operands = [(tensor, self.ledger.of(tensor)) for tensor in used]
        if not self._is_backward:
            self._phase.parameters |= {memory.parameter for _, memory in operands if memory and memory.parameter}
        for tensor in made:
            self._enter(func, args, tensor, operands)

    def _enter(
        self, func: Any, args: Sequence[Any], tensor: Tensor, operands: Sequence[tuple[Tensor, Memory | None]]
    ) -> None:
        """Count the memory of a new tensor."""
        known = len(self.split.unsplittable)
        dim, sources = dim_after(func, args, tensor, operands, self.split)
        if len(self.split.unsplittable) > known:
            self._make_whole()
        memory = Memory(tensor.untyped_storage().nbytes(), sources=sources)
        memory.kind = self._kind(func, tensor, dim, operands)
        memory.inner = inner_of(tensor, dim) if memory.kind in ("sharded", "vocabulary") else 0
        self.ledger.add(tensor, memory)
        for _, operand in operands:
            if operand is not None and operand.is_gathered and operand.kind == "sequence" and not operand.parameter:
                self.ledger.change(operand, "whole")
        if func.overloadpacket in PRODUCTS and not self._is_backward:
            self._phase.products.append(memory)

    def _make_whole(self) -> None:
        """Take back splits that come from parameters which cannot be split after all."""
        for memory in self.ledger.memories.values():
            if memory.inner and memory.sources & self.split.unsplittable:
                memory.inner = 0
                if not memory.parameter:
                    self.ledger.change(memory, "sequence")

    def _kind(
        self, func: Any, tensor: Tensor, dim: int | None, operands: Sequence[tuple[Tensor, Memory | None]]
    ) -> str:
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return "whole"
        kinds = {memory.kind for _, memory in operands if memory is not None}
        is_constant = any(word in func.overloadpacket.__name__ for word in _CONSTANTS)
        if self.expert_width and operands and not is_constant:
            return "tokens" if tensor.shape[-1:] == (self.expert_width,) else "expert"
        if self._is_backward and not is_constant and {"tokens", "expert"} & kinds and "sequence" not in kinds:
            return "expert" if "expert" in kinds else "tokens"
        if dim is None:
            return "sequence"
        return "vocabulary" if "vocabulary" in kinds or self._phase is self.phases.get(self.last) else "sharded"

    def create(self, shape: Sequence[int], dtype: torch.dtype, *, like: Tensor, dim: int | None) -> Tensor:
        """Return new memory without data, split along a dim, counted from the last, if another tensor is split."""
        with self.values.mode:
            tensor = torch.empty(tuple(shape), dtype=dtype)
        if (memory := self.ledger.of(tensor)) is None:  # else the mode has seen the operator
            memory = Memory(tensor.untyped_storage().nbytes())
            self.ledger.add(tensor, memory)
        if (of_like := self.ledger.of(like)) is not None:
            self.ledger.change(memory, of_like.kind)
            memory.sources = of_like.sources
            memory.inner = inner_of(tensor, dim) if of_like.inner else 0
        return tensor

    def count(self, flops: int, product: Tensor | None = None) -> None:
        """Count operations of a function that is no operator; ``product`` is its result in forward."""
        if product is None:
            self._phase.backward_flops += flops
            return
        self._phase.forward_flops += flops
        if (memory := self.ledger.of(product)) is not None:
            self._phase.products.append(memory)

    def begin_experts(self, tokens: Tensor | None) -> None:
        """Begin to count new memory as that of tokens on the way through experts."""
        self.expert_width = 0 if tokens is None else tokens.shape[-1]

    def end_experts(self, outputs: Iterable[Tensor]) -> None:
        """End it; the outputs belong to all tokens again."""
        self.expert_width = 0
        for output in outputs:
            memory = self.ledger.of(output)
            if memory is not None and memory.kind in ("tokens", "expert"):
                self.ledger.change(memory, "sequence")

    def split_dim(self, tensor: Tensor) -> int | None:
        """Return the split dim of a tensor, counted from the last."""
        return dim_of(tensor, self.ledger.of(tensor))
