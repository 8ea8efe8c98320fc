"""Boundaries of modules: which values cross them, and how their placements change there."""
