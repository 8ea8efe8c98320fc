"""The chain of blocks of a model, and the experts in them: by structure, not by names.

**Blocks** are the entries with parameters of the longest ``nn.ModuleList``, then of other lists with entries of a
similar size (an encoder and a decoder); without a list, the entries of the longest ``nn.Sequential``. Lists inside
another list, such as the experts of a block, do not count. `vescale.pipe` distributes the same blocks over stages.

**Experts** are

* a module of a block that holds stacks of matrices: parameters of three dims with the same size of the first, in a
  class that is not torch's own (convolutions);
* a ``ModuleList`` of a block with entries of the same parameters, as long as more than one entry runs for a part of
  the tokens only, which a run shows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

#: Entries of a list count as blocks if they have at least this part of the parameters of those of the longest list.
ALIKE = 0.25


def find_blocks(model: nn.Module) -> tuple[str, dict[str, nn.Module]]:
    """Return the FQN of the list of blocks (several: joined by " and "), and the blocks by FQN."""
    for kind in (nn.ModuleList, nn.Sequential):
        found: dict[str, dict[str, nn.Module]] = {}
        for fqn, module in model.named_modules():
            is_inside = any(f"{fqn}.".startswith(_prefix(outer)) for outer in found)
            if isinstance(module, kind) and not is_inside:
                entries = {_prefix(fqn) + name: child for name, child in module.named_children() if _has_any(child)}
                if len(entries) > 1:
                    found[fqn] = entries
        if found:
            longest = max(found, key=lambda fqn: len(found[fqn]))  # the first of equals
            least = _mean_size(found[longest]) * ALIKE
            others = [fqn for fqn in found if fqn != longest and _mean_size(found[fqn]) >= least]
            lists = [fqn for fqn in found if fqn == longest or fqn in others] if kind is nn.ModuleList else [longest]
            return " and ".join(lists), {name: block for fqn in lists for name, block in found[fqn].items()}
    return "", {}


def _prefix(fqn: str) -> str:
    return f"{fqn}." if fqn else ""


def _has_any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _mean_size(entries: dict[str, nn.Module]) -> float:
    return sum(parameter.numel() for block in entries.values() for parameter in block.parameters()) / len(entries)


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
