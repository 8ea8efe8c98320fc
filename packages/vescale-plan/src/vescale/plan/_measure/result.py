"""What a run on tensors without data found out, as numbers: bytes and operations by position, linear in rows.

Bytes are kept apart by what shares them among ranks:

| kind | bytes of a rank |
|---|---|
| ``whole`` | all of them: inputs of split matrices, gathered under sequence parallelism, and integers |
| ``sequence`` | all of them, or 1/tp under sequence parallelism: what lies between split matrices |
| ``sharded`` | 1/tp: heads, the inner dim of a feed-forward |
| ``vocabulary`` | all of them, or 1/tp if the loss is computed on shards of the vocabulary: logits |
| ``tokens`` | tokens on the way through experts: 1/(ranks that experts are spread over) |
| ``expert`` | the inner dim of experts: the same, and 1/etp |
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("whole", "sequence", "sharded", "vocabulary", "tokens", "expert")


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind, see the module's table."""

    whole: int = 0
    sequence: int = 0
    sharded: int = 0
    vocabulary: int = 0
    tokens: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds: the bytes on one device."""
        return self.whole + self.sequence + self.sharded + self.vocabulary + self.tokens + self.expert


@dataclass(frozen=True)
class Linear:
    """Bytes as a function of rows: ``fixed + rows * per_row``; ``fixed`` may be negative."""

    fixed: Bytes = Bytes()
    per_row: Bytes = Bytes()


@dataclass(frozen=True)
class PartActivations:
    """Activations of one part of a model: what is before the blocks, a block, or what is after them.

    Attributes:
        kept: what forward leaves for backward, the part's output included.
        output: what recomputation of the whole part keeps: its output.
        products: outputs of the products of matrices and of attention, in their order; what selective recomputation
            may keep.
        peaks: what is allocated in the part's forward and backward, on top of what all parts before it keep, at the
            moments when it is most; which of them counts depends on the rows and on the layout. Gradients of parameters
            are in it until they are complete.
        forward_flops, backward_flops: multiplications and additions, per row.
    """

    kept: Linear
    output: Linear
    products: tuple[Linear, ...]
    peaks: tuple[Linear, ...]
    forward_flops: int
    backward_flops: int


EMPTY = PartActivations(Linear(), Linear(), (), (), 0, 0)


@dataclass(frozen=True)
class Activations:
    """Activations of a model, for rows of one sequence length.

    Attributes:
        sequence_length: tokens of a row.
        parts: the different parts.
        order: index into ``parts`` for what is before the blocks, each block, and what is after them.
        split: names of the parameters that tensor parallelism splits, as the run has found.
        heads, kv_heads: heads of attention, as operators have seen them; 0 if none has.
    """

    sequence_length: int
    parts: tuple[PartActivations, ...]
    order: tuple[int, ...]
    split: tuple[str, ...]
    heads: int
    kv_heads: int

    @property
    def flops_per_row(self) -> int:
        """Multiplications and additions of forward and backward for one row."""
        return sum(self.parts[index].forward_flops + self.parts[index].backward_flops for index in self.order)
