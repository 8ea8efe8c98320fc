"""Gradients in flat buckets: received, reduced over the data-parallel ranks, stored."""
