"""Placements that torch lacks, redistribution among all placements, and operators on tensors placed so."""

from .errors import UnsupportedPlacement
from .types import InterleavedShard, RaggedShard

__all__ = ["InterleavedShard", "RaggedShard", "UnsupportedPlacement"]
