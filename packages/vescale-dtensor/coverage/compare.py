"""Compute the results of one device, and compare them with the assembled results of the ranks."""

from __future__ import annotations

import _torch
import torch
from pieces import Mismatch, close
from plan import UNINITIALISED, Plan, run_variant
from records import LIMIT, decoded, same
from samples import Sample

__all__ = [
    "check_backward",
    "check_leaves",
    "is_differentiable",
    "on_one_device",
    "random_weight",
    "same_when_finished",
]

#: Largest difference to allow, relative to the largest value; that of the least precise tensor counts.
RTOL = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-4, torch.complex64: 2e-4}
RTOL |= {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.complex32: 2e-2}


def on_one_device(plan: Plan, label: str, variant: str) -> dict:
    """Run a sample on plain tensors; return results, gradients, and the arguments as they are after the call."""
    sample = plan.samples[label]
    grads = variant == "op"
    tensors = [
        whole.clone().requires_grad_(grad and grads)
        for whole, grad in zip(sample.whole(), sample.requires_grad, strict=True)
    ]
    torch.default_generator.manual_seed(1234)
    with torch.set_grad_enabled(grads):
        args, kwargs = sample.arguments(tensors)
        result = run_variant(plan.op, variant, args, kwargs)
    leaves = _torch.tree_leaves(result)
    reference = {
        "raw": result,
        "results": [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        "inputs": [tensor.detach().clone() for tensor in tensors],
    }
    tensors_in_use = [*reference["inputs"], *(t for t in reference["results"] if isinstance(t, torch.Tensor))]
    reference["rtol"] = max((RTOL.get(tensor.dtype, 0.0) for tensor in tensors_in_use), default=0.0)
    reference["changed"] = [
        not same(after, before) for after, before in zip(reference["inputs"], sample.whole(), strict=True)
    ]
    if plan.op.name in UNINITIALISED:
        for name in ("results", "inputs"):
            reference[name] = [torch.zeros_like(t) if isinstance(t, torch.Tensor) else t for t in reference[name]]
    outs = {i: leaf for i, leaf in enumerate(leaves) if is_differentiable(leaf)}
    ins = [tensor for tensor in tensors if tensor.requires_grad]
    reference["outs"], reference["grads"], reference["ins"] = list(outs), [], [t.detach() for t in ins]
    if grads and outs and ins:
        weights = [random_weight(i, leaf) for i, leaf in outs.items()]
        try:
            reference["grads"] = torch.autograd.grad(list(outs.values()), ins, weights, allow_unused=True)
        except (RuntimeError, NotImplementedError):
            reference["grads"] = None  # one device has no gradient, too
    return reference


def check_backward(records: list[dict], expected: dict, mesh_shape: tuple) -> None:
    """Compare the gradients.

    Raises:
        Mismatch: Naming the gradient that differs, and how.
    """
    if expected["grads"] is None:
        return
    outs, wanted_outs = records[0]["outs"], expected["outs"]
    if outs != wanted_outs:
        raise Mismatch(f"results {outs} require a gradient, on one device results {wanted_outs}")
    for i, wanted in enumerate(expected["grads"]):
        entries = [record["results"][i] for record in records]
        like = expected["ins"][i]
        wanted = torch.zeros_like(like) if wanted is None else wanted
        got = torch.zeros_like(like) if entries[0] is None else decoded(entries, mesh_shape)
        check_leaves([got], [wanted.detach()], f"gradient {i}", expected["rtol"])


def same_when_finished(sample: Sample, got: list, expected: dict, finding: Mismatch) -> bool:
    """Compare results that are not unique, after the normalization that torch's own test applies."""
    finish = sample.finish
    structure = _torch.tree_flatten(expected["raw"])[1]
    try:
        with torch.no_grad():
            ours = _torch.tree_leaves(finish(_torch.tree_unflatten(got, structure)))
            theirs = _torch.tree_leaves(finish(_torch.tree_unflatten(expected["results"], structure)))
        check_leaves(ours, theirs, "finished result", expected["rtol"])
    except Mismatch:
        return False
    except Exception:
        raise finding from None
    return len(ours) > 0


def check_leaves(got: list, wanted: list, name: str, rtol: float) -> None:
    """Compare leaf by leaf: shapes, dtypes, values.

    Raises:
        Mismatch: Naming the first leaf that differs, and how.
    """
    if len(got) != len(wanted):
        raise Mismatch(f"{len(got)} {name}s, on one device {len(wanted)}")
    for i, (actual, expected) in enumerate(zip(got, wanted, strict=True)):
        which = name if len(got) == 1 else f"{name} {i}"
        if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
            _check_value(actual, expected, which)
        elif actual.shape != expected.shape or actual.dtype != expected.dtype:
            kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (actual, expected)]
            raise Mismatch(f"{which} is {kinds[0]}, on one device {kinds[1]}")
        elif not close(actual, expected, rtol):
            raise Mismatch(f"{which} {_difference(actual, expected, rtol)}")


def _check_value(actual: object, expected: object, which: str) -> None:
    if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor):
        raise Mismatch(f"{which} is a {type(actual).__name__}, on one device a {type(expected).__name__}")
    if isinstance(actual, float) and isinstance(expected, float):
        actual, expected = torch.tensor(actual).double(), torch.tensor(expected).double()
        if close(actual, expected, 1e-6):
            return
    if actual != expected and repr(actual) != repr(expected):
        raise Mismatch(f"{which} is {actual!r}, on one device {expected!r}"[:LIMIT])


def _difference(actual: torch.Tensor, expected: torch.Tensor, rtol: float) -> str:
    differ = ~((actual == expected) | (actual.isnan() & expected.isnan()))
    if actual.is_floating_point() or actual.is_complex():
        differ &= ~torch.isclose(actual, expected, rtol=rtol, atol=rtol, equal_nan=True)
    at = tuple(differ.nonzero()[0].tolist()) if bool(differ.any()) else ()
    where = f" at {at}: {actual[at].item()}, on one device {expected[at].item()}" if differ.any() else ""
    return f"differs in {int(differ.sum())} of {differ.numel()} elements{where}"


def is_differentiable(leaf: object) -> bool:
    """Return whether a gradient can start at a leaf of a result."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def random_weight(number: int, leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of result ``number``: random, because the gradients of a plain sum hide errors."""
    generator = torch.Generator().manual_seed(99 + number)
    return torch.randn(tuple(leaf.shape), generator=generator, dtype=torch.float64).to(leaf.dtype)
