"""Placements that torch lacks, redistribution among all placements, and operators on tensors placed so."""

from .types import InterleavedShard, RaggedShard

__all__ = ["InterleavedShard", "RaggedShard"]
