"""The parts of a static program: fully qualified names and kinds of modules, and how errors describe them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import _torch
from .._boundary.hooks import InputBoundary, OutputBoundary
from .._experts import ExpertRegion, experts_region, listed_gradients

__all__ = ["Parts", "describe", "is_inside", "join", "keep_on_dtensors", "likely_cause", "ways_out"]

CHECKPOINTING = "gradient_checkpointing"  # the switch of a layer in Hugging Face's models


@dataclass(eq=False)
class Parts:
    """A module that runs as a static program, and its submodules by full name.

    Args:
        module: the module.
        name: its name in the parallelized model.
        modules: all modules of it, itself included.
        eager: names of the outermost eager parts.
        experts: regions of experts, by name.
        switches: modules with a switch for activation checkpointing.
        row_wise: names of parts that run on this rank's rows while all else is recorded on those of all ranks.
    """

    module: nn.Module
    name: str
    modules: dict[str, nn.Module]
    eager: list[str]
    experts: dict[str, ExpertRegion] = field(default_factory=dict)
    switches: list[nn.Module] = field(default_factory=list)
    row_wise: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module, name: str, eager: frozenset[str]) -> Parts:
        """Return the parts of ``module``.

        Args:
            module: the module.
            name: its name in the parallelized model.
            eager: names of all eager parts of the model.
        """
        modules = {join(name, inner): part for inner, part in module.named_modules()}
        inside = [part for part in eager if part in modules]
        outermost = [n for n in inside if not any(n != other and is_inside(n, other) for other in inside)]
        self = cls(module, name, modules, outermost)
        regions = {n: experts_region(part) for n, part in modules.items() if not self.is_eager(n)}
        self.experts = {n: region for n, region in regions.items() if region}
        self.switches = [part for part in modules.values() if hasattr(part, CHECKPOINTING)]
        return self

    def is_eager(self, name: str) -> bool:
        """Return whether a part is eager, by itself or inside an eager part."""
        return any(is_inside(name, part) for part in self.eager)

    def is_watched(self, name: str) -> bool:
        """Return whether recorded operators of a part may run on DTensors."""
        return not self.is_eager(name) and not any(is_inside(name, part) for part in self.row_wise)

    def local(self) -> dict[str, nn.Module]:
        """Return the modules that run on local tensors."""
        return {name: module for name, module in self.modules.items() if not self.is_eager(name)}

    def opaque(self) -> list[str]:
        """Return the names of the parts that must not be traced by a compiler."""
        listed = [name for name, part in self.modules.items() if listed_gradients(part)]
        return [*self.eager, *self.experts, *listed]

    def repeated(self) -> Iterator[str]:
        """Yield the names of the elements of module lists; activation checkpointing recomputes these."""
        for name, part in self.modules.items():
            if isinstance(part, nn.ModuleList):
                yield from (join(name, inner) for inner, _ in part.named_children())

    def checkpointing(self) -> list[object]:
        """Return the states of the switches for activation checkpointing."""
        return [getattr(part, CHECKPOINTING) for part in self.switches]

    def edge(self, side: str) -> str:
        """Return the boundary name of the root of the program.

        Args:
            side: ``"enters"`` or ``"returns"``.
        """
        return f"{self.name} {side}" if self.name else side


def join(owner: str, name: str) -> str:
    """Return the full name of a part.

    Example:
        >>> join("model", "norm.weight"), join("", "norm")
        ('model.norm.weight', 'norm')
    """
    return ".".join(filter(None, (owner, name)))


def is_inside(name: str, owner: str) -> bool:
    """Return whether ``name`` is ``owner`` or a part of it.

    Example:
        >>> is_inside("h.1.mlp", "h.1"), is_inside("h.10", "h.1")
        (True, False)
    """
    return name == owner or not owner or name.startswith(f"{owner}.")


def describe(name: str) -> str:
    """Return the description of a module for error messages.

    Example:
        >>> describe("h.1"), describe("")
        ("module 'h.1'", 'the root module')
    """
    return f"module {name!r}" if name else "the root module"


def likely_cause(parts: Parts, name: str) -> str:
    """Return why a part may be wrong on local tensors, and the fixes, for error messages.

    Args:
        parts: of the program.
        name: of the part.
    """
    tied = _tied_without_boundary(parts)
    start = f"{tied}. If the plan is right, its" if tied else "Its"
    return (
        f"{start} code or code before it is written for global shapes (a hard-coded number of heads, a size, a mean "
        f"over a sharded dim) or communicates; {ways_out(name)}"
    )


def _tied_without_boundary(parts: Parts) -> str | None:
    """Return the text about a sharded tied weight that a module uses without a boundary; None if there is none.

    The uses of such a weight differ in layout: an embedding returns partial values, a linear layer has a partial
    gradient of its input. A boundary at each use fixes the layout.
    """
    uses: dict[DTensor, list[tuple[str, str]]] = {}
    for name, module in parts.local().items():
        for key, parameter in _torch.tensor_tables(module)[0].items():
            if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
                uses.setdefault(parameter, []).append((name, key))
    for weight, names in uses.items():
        for name, key in names if len(names) > 1 else ():
            side = _missing_boundary(parts.modules[name])
            if side is not None:
                others = ", ".join(repr(join(*use)) for use in names if use != (name, key))
                placements = zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True)
                entry = {axis: Replicate() if p.is_shard(0) else Shard(-1) for axis, p in placements if p.is_shard()}
                boundary = re.escape(join(name, side))
                return (
                    f"{join(name, key)!r} is sharded and tied to {others}: expected a boundary at the {side} of "
                    f'{name!r}, got none; add "forward": {{r"{boundary}": [{entry}]}} to the plan'
                )
    return None


def _missing_boundary(module: nn.Module) -> str | None:
    """Return the side of a module at which a tied weight needs a boundary, if the module has none there."""
    side, kind = ("output", OutputBoundary) if isinstance(module, nn.Embedding) else ("input", InputBoundary)
    hooks = (hook for table in _torch.module_hook_tables(module) for hook in table.values())
    return None if any(isinstance(hook, kind) for hook in hooks) else side


def keep_on_dtensors(name: str) -> str:
    """Return the fix that keeps a module in eager mode, for error messages.

    Args:
        name: of the module; it is escaped, because plans have regexes.
    """
    escaped = re.escape(name)
    in_plan = f'"eager": [r"{escaped}"] in the plan, or set_mode(model, "eager", r"{escaped}")'
    return f"keep the module on DTensors ({in_plan})" if name else 'run the model on DTensors (mode="eager")'


def ways_out(name: str, *, is_random: bool = False) -> str:
    """Return the fixes for a module whose code is wrong on local tensors, for error messages.

    Args:
        name: of the module.
        is_random: whether the cause is a random operator. Only eager mode fixes that.

    Example:
        >>> ways_out("h.1", is_random=True)
        'keep the module on DTensors ("eager": [r"h\\\\.1"] in the plan, or set_mode(model, "eager", r"h\\\\.1"))'
    """
    escaped, keep = re.escape(name), keep_on_dtensors(name)
    if is_random:
        return keep
    attribute = rf"{escaped}\.NAME" if name else "NAME"
    return (
        f'change the attribute that it reads ("local_attribute": {{r"{attribute}": Divided("tp")}} in the plan), '
        f"bring the values that it reads to other placements by a boundary, or {keep}"
    )
