"""Optimizer state: in pieces, in other dtypes, and as one process has it."""
