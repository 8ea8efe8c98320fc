"""The layout of flat buckets: pure functions over integers."""
