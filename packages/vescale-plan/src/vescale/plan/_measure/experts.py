"""The experts in the blocks of a model: by structure, not by names.

**Experts** are

* a module of a block that holds stacks of matrices: parameters of three dims with the same size of the first, in a
  class that is not torch's own (convolutions);
* a ``ModuleList`` of a block with entries of the same parameters, as long as more than one entry runs for a part of
  the tokens only, which a run shows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def stacks_of_experts(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block that hold stacked matrices of experts, with their names."""
    for name, module in block.named_modules():
        own = dict(module.named_parameters(recurse=False))
        stacks = [parameter for parameter in own.values() if parameter.dim() == 3]
        is_torch = type(module).__module__.startswith("torch.")
        if stacks and not is_torch and len({stack.shape[0] for stack in stacks}) == 1 and stacks[0].shape[0] > 1:
            yield name, module


def lists_of_equals(block: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the lists of a block whose entries have the same parameters, with their names."""
    for name, module in block.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            shapes = [[parameter.shape for parameter in entry.parameters()] for entry in module]
            if shapes[0] and all(each == shapes[0] for each in shapes):
                yield name, module
