"""What micro-batches have to do with each other: nothing, or the step is refused.

Micro-batches compute parts of a batch, and data-parallel ranks parts of these. Together they compute what one device
does on the whole batch if three things hold. A rehearsal (``docs/protocols.md``) finds them out before the first step
with new inputs:

    every operator treats every row alone            else the step is refused
    the loss is a mean over rows                     a sum over rows is added up instead
    the parts count equally many targets             compared in every step, if some may be ignored

The package that rehearses is found by its entry point. Without one a warning says that nothing is checked.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .microbatch import Share
from .transport import Transport
from .values import PipelineError

logger = logging.getLogger("vescale.pipe")

GROUP, NAME = "vescale.pipe", "rehearsal"  # of the entry point
WAY_OUT = (
    "or, if every micro-batch on every rank may be a batch of its own, as in gradient accumulation, pass "
    "per_microbatch=True to PipelineEngine (per_rank=True to vescale.parallelize)"
)


@dataclass(frozen=True)
class LossRule:
    """How the losses of micro-batches make that of the batch.

    Attributes:
        is_mean: whether a loss is a mean over rows, not a sum.
        factor: of each loss: 1 for a mean; for a sum the number of data-parallel ranks, whose mean is taken later.
        counts_targets: whether it is a mean over targets of which some may be ignored.
    """

    is_mean: bool = True
    factor: int = 1
    counts_targets: bool = False

    def __str__(self) -> str:
        of = "targets" if self.counts_targets else "rows"
        return f"a mean over {of}" if self.is_mean else "a sum over rows"

    def part(self, loss: torch.Tensor, share: Share) -> torch.Tensor:
        """Return what a micro-batch adds to the loss of the batch, of which it is a share."""
        factor = self.factor * (share.size if self.is_mean else 1)
        part = loss if factor == 1 else loss * factor
        return part / share.count if self.is_mean and share.count > 1 else part


class RowChecks:
    """Finds the rule of a loss by a rehearsal, and compares numbers of targets.

    Args:
        model: the model, with stubs.
        transport: this rank's communication.
        last_rank: the rank of the last stage.
        num_microbatches: of a step.
        row_wise: names of this rank's modules that treat every row alone, whatever their operators do.
        is_on: whether micro-batches are parts of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        last_rank: int,
        num_microbatches: int,
        *,
        row_wise: Sequence[str],
        is_on: bool,
    ) -> None:
        self._model, self._transport, self._last_rank = model, transport, last_rank
        self._num_microbatches, self._row_wise = num_microbatches, row_wise
        self._kind = _rehearsal_type() if is_on else None
        self._rehearsal: Any = None
        if is_on and self._kind is None:
            self._warn()

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """Meshes, other than those of a plan, of values that cross stages."""
        meshes: tuple[DeviceMesh, ...] = () if self._rehearsal is None else self._rehearsal.meshes
        return meshes

    def rule_of(self, call: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> LossRule:
        """Rehearse a call, on all stages, and return the rule of its loss.

        Args:
            call: makes the call forward, and returns its loss; None on stages that do not have it.
            args: positional arguments of a micro-batch.
            kwargs: its keyword arguments.

        Raises:
            PipelineError: on every stage, if rows are mixed, or the call cannot be rehearsed.
        """
        mean = LossRule()
        if self._kind is not None and self._rehearsal is None:
            self._begin(self._kind)
        if self._rehearsal is None:
            return mean
        num_ranks = self._rehearsal.num_ranks
        if num_ranks * self._num_microbatches == 1:
            return mean
        found = self._rehearsal.run(call, args, kwargs, anywhere=self._anywhere)
        is_last = self._transport.rank == self._last_rank
        errors = () if found.error is None else (f"{type(found.error).__name__}: {found.error}",)
        writes = tuple(f"writes to buffer {name!r} in every micro-batch" for name in found.written)
        findings = (
            # a mean over targets on an earlier stage is one that the last stage cannot compare
            (*found.mixing, *(() if is_last else found.counted)),
            errors,
            writes if self._num_microbatches > 1 else (),
            (found.doubt,) if found.doubt else (),
        )
        every = self._transport.gather_objects((findings, bool(found.counted), found.is_sum))
        # findings of one kind on all stages; those of the next kinds may follow from them
        for texts in zip(*(findings for findings, _, _ in every), strict=True):
            if unique := dict.fromkeys(itertools.chain.from_iterable(texts)):
                raise PipelineError(self._refusal("; ".join(unique))) from found.error
        _, counts, is_sum = every[self._last_rank]
        return LossRule(is_mean=False, factor=num_ranks) if is_sum else LossRule(counts_targets=counts)

    def _begin(self, kind: Any) -> None:
        self._kind = None
        if not self._anywhere(not kind.can_run(self._model)):
            device = self._transport.device.type
            self._rehearsal = kind(self._model, device_type=device, row_wise=self._row_wise)
        elif self._num_microbatches > 1:
            raise PipelineError(
                f"expected a model whose {self._num_microbatches} micro-batches can be compared with one batch, got "
                f"{type(self._model).__name__}, which has DTensors without a plan of vescale.dmodule; give the model "
                f"to parallelize_module, {WAY_OUT}"
            )

    def _warn(self) -> None:
        if self._transport.rank == 0 and (self._transport.num_ranks, self._num_microbatches) != (1, 1):
            logger.warning(
                "PipelineEngine computes every micro-batch by itself, on this rank's rows; whether the model mixes "
                "rows (losses of routers, contrasts, sums over rows) is not checked, because vescale-dmodule is not "
                "installed; install it, %s",
                WAY_OUT,
            )

    def rehearsed(self) -> Any:
        """Return a context in which calls that were rehearsed run as they are."""
        return nullcontext() if self._rehearsal is None else self._rehearsal.as_they_are()

    def target_counts(self) -> TargetCounts:
        """Return what notes the targets of a step whose loss is a mean over them."""
        return TargetCounts(self._rehearsal.counted_means)

    def differ(self, counts: TargetCounts, shares: Sequence[Share]) -> bool:
        """Return whether a part of the batch has more or fewer targets than its share.

        Collective over data-parallel ranks.
        """
        each = counts.of_microbatches()
        number, first = zlib.crc32(repr(each[0]).encode()), [count * shares[0].count for count in each[0]]
        differs = any(
            [count * share.count * shares[0].size for count in own] != [count * share.size for count in first]
            for own, share in zip(each, shares, strict=True)
        )
        most, least, differs = self._rehearsal.highest([number, -number, float(differs)])
        return bool(differs) or most != -least

    def _anywhere(self, flag: bool) -> bool:
        return any(self._transport.gather_objects(flag))

    def _refusal(self, what: str) -> str:
        ranks = self._rehearsal.num_ranks
        parts = f"{self._num_microbatches} micro-batches" + (f" on each of {ranks} ranks" if ranks > 1 else "")
        return (
            f"expected that {type(self._model).__name__} treats every row alone, since {parts} are parts of one batch, "
            f"got {what}; use one stage and one micro-batch, name modules that treat every row alone, such "
            f"as experts, in row_wise=[...], {WAY_OUT}"
        )


class TargetCounts(TorchFunctionMode):
    """Notes how many targets each mean over targets counts, micro-batch by micro-batch.

    Args:
        functions: those that are such means.
    """

    _vescale_sees_once = True  # docs/protocols.md

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions
        self._found: dict[int, list[torch.Tensor]] = {}
        self._current: list[torch.Tensor] = []

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Note those of a micro-batch while the context is open."""
        self._current = self._found[index] = []
        with self:
            yield

    def of_microbatches(self) -> list[list[float]]:
        """Return the numbers of each micro-batch, in order of the calls."""
        each = (counts for _, counts in sorted(self._found.items()))
        return [torch.stack(counts).tolist() if counts else [] for counts in each]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in self._functions:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            if given.get("reduction", "mean") == "mean":
                self._current.append(_weight_of_targets(given))
        return func(*args, **kwargs)


@torch.no_grad()
def _weight_of_targets(given: dict[str, Any]) -> torch.Tensor:
    """Return the number by which a mean over targets divides."""
    target, weight = _plain(given["target"]), given.get("weight")
    if target.is_floating_point():  # probabilities: none is ignored
        return torch.tensor(float(given["input"].numel()), dtype=torch.float64, device=target.device)
    counted = target.ne(given.get("ignore_index", -100))
    if weight is None:
        return counted.sum().double()
    weights = _plain(weight)[target.where(counted, torch.zeros_like(target))]
    return weights.mul(counted).sum().double()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unequal_counts(each: list[list[float]]) -> PipelineError:
    """Return the error about parts of a batch with different numbers of targets.

    Args:
        each: the numbers of each micro-batch; empty on stages that do not have them.
    """
    listed = f" {each}" if each else ""
    return PipelineError(
        "expected equally many counted targets per row in all micro-batches, and on all data-parallel ranks, got others"
        f"{listed}, so that the mean of their means is not that of the batch; ignore equally many in each, or sum the "
        f"losses and divide by the number in the whole batch (num_items_in_batch of Hugging Face models), {WAY_OUT}"
    )


def _rehearsal_type() -> Any:
    """Return the class that rehearses calls; None if no installed package has one."""
    found = importlib.metadata.entry_points(group=GROUP, name=NAME)
    return next(iter(found)).load() if found else None


def matching_names(model: nn.Module, patterns: Sequence[str | re.Pattern]) -> list[str]:
    """Return the names of the modules that ``row_wise`` lists.

    Raises:
        ValueError: a pattern names none, or is no regular expression.
    """
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"PipelineEngine: row_wise: expected regular expressions, got {pattern!r}: {error}"
            ) from None
        if not found:
            raise ValueError(
                f"PipelineEngine: row_wise: expected names of modules of {type(model).__name__}, or regular "
                f"expressions for full names, got {pattern!r}, which matches none; see model.named_modules()"
            )
        chosen |= found
    return [name for name in names if name in chosen]
