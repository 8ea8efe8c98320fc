"""Optimizer state: in pieces, in other dtypes, and in the form of one process."""
