"""How a parallelized module runs.

patch           rows of (owner, key, value) that stand in a module for the duration of a call
module_hooks    hooks that copies of a module do not inherit
heads           multi-head attention of torch over a part of its heads
eager           eager mode
modes           the modes of a model and of its parts
"""
