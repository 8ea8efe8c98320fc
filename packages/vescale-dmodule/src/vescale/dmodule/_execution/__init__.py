"""The execution modes of a parallelized module, and eager mode."""
