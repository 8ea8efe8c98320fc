"""From words to numbers: one distribution per class.

A distribution turns blocks of four 32-bit words into ``per_block`` numbers each. Conventions, where ``w`` is a word:

===========================  ==================================================================  =========
numbers                      formula                                                             per block
===========================  ==================================================================  =========
uniform ``u``                ``(w mod 2**24) / 2**24``; float64: 53 bits of two words, high first  4; 2
`uniform_`                   ``u * (to - from) + from`` in float32, cast; ``to`` becomes ``from``  4; 2
`normal_`                    Box-Muller on words (0, 1) and (2, 3), cosine first                 4; 2
`bernoulli`, dropout         ``u < p``, float32 ``u`` for every dtype                            4
`exponential_`               ``-log1p(-u) / lambda``                                             4; 2
`cauchy_`                    ``median + sigma * tan(pi * (u - 1/2))``                            4; 2
`log_normal_`                ``exp`` of `normal_`                                                4; 2
`geometric_`                 ``max(1, ceil(log1p(-u) / log1p(-p)))``                             4; 2
`random_`, `randint`         ``w mod range`` of 32 bits, or of 63 bits of two words              4; 2
===========================  ==================================================================  =========

The second count holds for elements of 8 bytes. Uniform numbers, masks and integers are computed without rounding, or
with additions and multiplications alone: they are the same on every device. The others use the device's own
transcendental functions, in float64 where that is cheap, and may differ between devices in the last bit.

A mask depends neither on the dtype nor on the operator: `bernoulli_(p)`, `bernoulli(p)`, `native_dropout(x, 1 - p)` and
``rand() < p`` in float32 agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cipher import WORDS

__all__ = [
    "Bernoulli",
    "Cauchy",
    "Distribution",
    "Exponential",
    "Geometric",
    "Integers",
    "LogNormal",
    "Normal",
    "OpenUnit",
    "Uniform",
    "Unit24",
    "Words64",
]

BITS_24 = 2**24
BITS_53 = 2**53


@dataclass(frozen=True)
class Distribution:
    """Numbers from blocks.

    Attributes:
        dtype: dtype of the tensor that the numbers are for.
    """

    dtype: torch.dtype

    @property
    def per_block(self) -> int:
        """The number of values per block."""
        return WORDS // 2 if self.dtype.itemsize == 8 else WORDS

    def values(self, words: Tensor) -> Tensor:
        """Return the ``per_block`` numbers of each block, as ``(n, per_block)`` from uint32 words ``(n, 4)``."""
        raise NotImplementedError

    def unit(self, words: Tensor) -> Tensor:
        """Return numbers in ``[0, 1)``: with 53 bits if a block gives two of them, else with 24 bits."""
        if self.per_block == WORDS:
            return unit_float32(words)
        return (words_64(words) & (BITS_53 - 1)).to(torch.float64).mul_(1 / BITS_53)


def unit_float32(words: Tensor) -> Tensor:
    """Return ``(w mod 2**24) / 2**24`` in float32, exactly."""
    return (words.view(torch.int32) & (BITS_24 - 1)).to(torch.float32).mul_(1 / BITS_24)


def words_64(words: Tensor) -> Tensor:
    """Return two 64-bit words of each block, the first word of each pair high, as int64."""
    pairs = words.to(torch.int64)
    return (pairs[:, 0::2] << 32) | pairs[:, 1::2]


@dataclass(frozen=True)
class Words64(Distribution):
    """The 64-bit words themselves, without their sign bit."""

    dtype: torch.dtype = torch.int64

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        return words_64(words) & (2**63 - 1)


@dataclass(frozen=True)
class Unit24(Distribution):
    """Uniform in ``[0, 1)`` with 24 bits; masks compare it with a probability."""

    dtype: torch.dtype = torch.float32

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        return unit_float32(words)


@dataclass(frozen=True)
class OpenUnit(Distribution):
    """Uniform in ``(0, 1)`` with 32 bits, in float64: its logarithm is finite and negative."""

    dtype: torch.dtype = torch.float32

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform in ``[low, high)``."""

    low: float = 0.0
    high: float = 1.0

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        unit = self.unit(words)
        low, high = (torch.tensor(bound, dtype=self.dtype) for bound in (self.low, self.high))
        if (float(low), float(high)) != (0.0, 1.0):
            unit.mul_(float(high.to(unit.dtype) - low.to(unit.dtype))).add_(float(low))
        drawn = unit.to(self.dtype)
        if self.dtype == unit.dtype and (float(low), float(high)) == (0.0, 1.0):
            return drawn  # nothing was rounded
        return drawn.masked_fill_(drawn >= float(high), float(low))


@dataclass(frozen=True)
class Normal(Distribution):
    """Normal, by Box-Muller: each pair of uniforms gives ``r cos t`` and ``r sin t``."""

    mean: float = 0.0
    std: float = 1.0

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        return self.scaled(words).to(self.dtype)

    def scaled(self, words: Tensor) -> Tensor:
        """Return the numbers in the dtype they are computed in."""
        unit = self._open_unit(words)
        radius = unit[:, 0::2].log().mul_(-2.0).sqrt_()
        angle = unit[:, 1::2].mul(2 * math.pi)
        torch.mul(radius, angle.cos(), out=unit[:, 0::2])
        torch.mul(radius, angle.sin(), out=unit[:, 1::2])
        return unit.mul_(self.std).add_(self.mean)

    def _open_unit(self, words: Tensor) -> Tensor:
        """Return uniforms in (0, 1), for radius and angle in turns: words, or pairs of words, plus a half."""
        if self.per_block == WORDS:
            # made of 32 bits, not of 24: the smallest uniform decides how large a normal number can be
            return words.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
        high, low = words[:, 0::2].to(torch.float64), words[:, 1::2].to(torch.float64)
        return low.mul_(2.0**-64).add_(2.0**-65).add_(high.mul_(2.0**-32))


@dataclass(frozen=True)
class LogNormal(Normal):
    """``exp`` of a normal number."""

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        return self.scaled(words).exp_().to(self.dtype)


@dataclass(frozen=True)
class Bernoulli(Distribution):
    """1 with probability ``p``, else 0; without an element dtype of its own: one word for every dtype."""

    p: float = 0.5

    @property
    def per_block(self) -> int:
        """Four, for every dtype."""
        return WORDS

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        # u < p for u = k / 2**24 is k < p * 2**24: a comparison of integers, exact on every device
        drawn = (words.view(torch.int32) & (BITS_24 - 1)) < math.ceil(self.p * BITS_24)
        return drawn.to(self.dtype)


@dataclass(frozen=True)
class Exponential(Distribution):
    """Exponential with rate ``rate``."""

    rate: float = 1.0

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        return self.unit(words).double().neg_().log1p_().div_(-self.rate).to(self.dtype)


@dataclass(frozen=True)
class Cauchy(Distribution):
    """Cauchy."""

    median: float = 0.0
    sigma: float = 1.0

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        angle = self.unit(words).double().sub_(0.5).mul_(math.pi)
        return angle.tan_().mul_(self.sigma).add_(self.median).to(self.dtype)


@dataclass(frozen=True)
class Geometric(Distribution):
    """The number of trials until the first success."""

    p: float = 0.5

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        trials = self.unit(words).double().neg_().log1p_().div_(math.log1p(-self.p))
        return trials.ceil_().clamp_min_(1.0).to(self.dtype)


@dataclass(frozen=True)
class Integers(Distribution):
    """Integers in ``[low, low + span)``, ``1 <= span <= 2**64``."""

    low: int = 0
    span: int = 1

    @property
    def per_block(self) -> int:
        """Two where 32 bits are too few, or where elements have 8 bytes."""
        return WORDS // 2 if self.dtype.itemsize == 8 or self.span > 2**32 else WORDS

    def values(self, words: Tensor) -> Tensor:
        """See `Distribution.values`."""
        if self.per_block == WORDS:
            drawn = words.to(torch.int64) % self.span
        elif self.span <= 2**63:
            drawn = (words_64(words) & (2**63 - 1)) % self.span if self.span < 2**63 else words_64(words) & (2**63 - 1)
        else:
            drawn = _modulo_above_half(words_64(words), self.span)
        return drawn.add_(self.low).to(self.dtype)  # int64 wraps around, which is what a range beyond 2**63 needs


def _modulo_above_half(drawn: Tensor, span: int) -> Tensor:
    """Return unsigned 64-bit words modulo ``span > 2**63``: at most one subtraction."""
    if span == 2**64:
        return drawn
    smallest, span = -(2**63), span - 2**64  # as int64; flipping the sign bit makes signed order unsigned
    return torch.where((drawn ^ smallest) >= (span ^ smallest), drawn - span, drawn)
