"""What the benchmarks of parallel modules share: modes that this version has, and comparisons between cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from counting import Traffic, num_collectives, traffic
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["MODES", "Case", "check_repeats", "check_same", "check_same_losses", "communicated"]

MODES = ("eager", "static", "compile")


@dataclass(frozen=True)
class Case:
    """A parallelized model and what a step does with it.

    Attributes:
        model: the model.
        forward: runs it and returns what backward starts from.
        gradient: of that; None for a loss.
        leaves: tensors besides the parameters that need a gradient, by name.
        after: what a step does after backward.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    gradient: Tensor | None = None
    leaves: dict[str, Tensor] = field(default_factory=dict)
    after: Callable[[], None] = lambda: None

    def step(self) -> Tensor:
        """Run forward and backward once from empty gradients and return the output."""
        self.model.zero_grad()
        for leaf in self.leaves.values():
            leaf.grad = None
        output = self.forward()
        output.backward(self.gradient)
        self.after()
        return output

    def results(self) -> dict[str, Tensor]:
        """Run a step and return the output and all gradients by name."""
        output = self.step().detach()
        named = {**self.leaves, **dict(self.model.named_parameters())}
        return {"output": output, **{name: leaf.grad for name, leaf in named.items()}}


def check_same(name: str, case: Case, reference: Case, *, bound: float = 1e-10) -> None:
    """Compare a case with one device, on every rank of a real group, in two steps (static mode's first is a trial).

    Raises:
        RuntimeError: the output or a gradient is off by more than `bound` of the largest value; all ranks raise alike.
    """
    expected = reference.results()
    # of the largest of all: some gradients are zero but for rounding, such as that of a bias of attention's keys
    largest = max(value.abs().max() for value in expected.values())
    for attempt in range(2):
        actual = case.results()
        for key, value in expected.items():
            distance = (_whole(actual[key], value) - value).abs().max() / largest
            if not distance < bound:
                raise RuntimeError(f"{name}, step {attempt}: {key} is off by {distance:.1e} of the largest value")


def check_same_losses(losses: dict[str, list[float]], reference: str, *, bound: float = 1e-4) -> str:
    """Return a line with the losses of the first steps of all cases, float32 in other orders of additions.

    Raises:
        RuntimeError: a case differs by more than `bound` of the reference's loss, or that learns nothing.
    """
    expected = losses[reference]
    for name, actual in losses.items():
        if any(abs(a - e) > bound * e for a, e in zip(actual, expected, strict=True)):
            raise RuntimeError(f"{name} does not train the same model: losses {actual}, {reference} {expected}")
    if not expected[-1] < expected[0]:
        raise RuntimeError(f"the model learns nothing in {len(expected)} steps: losses {expected}")
    return "same losses in all cases: " + ", ".join(f"{loss:.4f}" for loss in expected)


def _whole(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the shape of `like`, of which `tensor` is whole, a DTensor or this rank's part."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if tensor.shape == like.shape:
        return tensor
    dim = next(dim for dim in range(like.ndim) if tensor.shape[dim] != like.shape[dim])
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def check_repeats(name: str, compiled: Case, plain: Case) -> None:
    """Stop where a compiled step gives other values than the step that it compiles, in this process.

    On a fake process group, too: its collectives are functions of their input.
    """
    actual, expected = compiled.results(), plain.results()
    for key, value in expected.items():
        new, old = (t.to_local() if isinstance(t, DTensor) else t for t in (actual[key], value))
        torch.testing.assert_close(new, old, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{name}, {key}: {text}")


def communicated(case: Case, *, compiled: bool) -> Traffic:
    """Return what a step of a case communicates; without the bytes where it is compiled."""
    return Traffic(num_collectives(case.step)) if compiled else traffic(case.step)
