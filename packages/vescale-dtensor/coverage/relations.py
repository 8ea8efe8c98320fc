"""Change a sample so that one device tells what must follow: dims counted from the end, and other data.

    dims     every dim among the arguments is counted from the end: the result stays
    other    the values stand elsewhere: the result is that of one device for them, not that of the call before

A number among the arguments is a dim if the operator gives the same on one device when it is counted from the end. So
no list of arguments that are dims is needed.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import torch
from records import same
from samples import Sample

__all__ = ["related"]

Run = Callable[[Sample], list | None]


def related(sample: Sample, run: Run) -> dict[str, Sample]:
    """Return changed samples by label: ``dims`` if there is a dim among the arguments, ``other`` if there are values.

    Args:
        sample: A sample that runs on one device.
        run: Returns the leaves of the result on one device, or None for an error.
    """
    found = {"dims": _with_dims_from_the_end(sample, run), "other": _with_other_data(sample)}
    return {label: each for label, each in found.items() if each is not None and run(each) is not None}


def _with_dims_from_the_end(sample: Sample, run: Run) -> Sample | None:
    num_dims = max(tensor.ndim for tensor in sample.whole())
    wanted, changed = run(sample), sample
    run = _on_marked_memory(run)
    for position, leaf in enumerate(sample.leaves):
        if type(leaf) is not int or not 0 <= leaf <= num_dims:
            continue
        for count in dict.fromkeys((num_dims, num_dims + 1, sample.whole()[0].ndim)):  # of a result with one more dim
            if leaf < count and _alike(run(candidate := _put(changed, position, leaf - count)), wanted):
                changed = candidate
                break
    return None if changed is sample else changed


def _on_marked_memory(run: Run) -> Run:
    """Return ``run`` with memory that begins as nan: a number that makes an operator write nothing is no dim."""

    def run_marked(sample: Sample) -> list | None:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operators without a deterministic form
                return run(sample)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    return run_marked


def _put(sample: Sample, position: int, value: object) -> Sample:
    leaves = (*sample.leaves[:position], value, *sample.leaves[position + 1 :])
    return dataclasses.replace(sample, leaves=leaves)


def _alike(got: list | None, wanted: list | None) -> bool:
    if got is None or wanted is None or len(got) != len(wanted):
        return False
    return all(
        same(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else repr(a) == repr(b)
        for a, b in zip(got, wanted, strict=True)
    )


def _with_other_data(sample: Sample) -> Sample | None:
    """Return the sample with the values of each float tensor in the opposite order."""
    changed = sample
    for position, leaf in enumerate(sample.leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() > 1:
            changed = _put(changed, position, leaf.flip(*range(leaf.ndim)))
    return None if changed is sample else changed
