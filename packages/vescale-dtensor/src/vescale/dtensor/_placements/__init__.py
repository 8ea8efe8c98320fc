"""Placements that torch lacks, redistribution among all placements, and operators for these placements."""

from .types import InterleavedShard, RaggedShard

__all__ = ["InterleavedShard", "RaggedShard"]
