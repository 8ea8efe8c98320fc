"""Placements that torch lacks, redistribution among all placements, and operators on tensors placed so."""

from ._errors import UnsupportedPlacement
from ._types import InterleavedShard, RaggedShard

__all__ = ["InterleavedShard", "RaggedShard", "UnsupportedPlacement"]
