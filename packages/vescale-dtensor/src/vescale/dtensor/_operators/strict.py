"""Refuse implicit redistributions: communication that no line of the program asks for.

A DTensor operator whose operands have unsuitable placements redistributes them first. Inside :class:`strict` that is an
error, raised before any communication. The decision depends on shapes and placements only, so all ranks raise alike.
Explicit redistributions and the operator's own reductions stay allowed:

    ======================================================  =======================================
    ``x.redistribute(...)``, ``x.full_tensor()``            explicit
    ``x.sum(0)``, ``F.cross_entropy(...)``                  the operator's own reduction
    ``x @ w`` in unsuitable placements, ``softmax``         implicit: refused
    over the sharded dim, ``total.item()`` of a sum
    a rank's shard of a replicated operand                  free: refused with ``free=False`` only
    ======================================================  =======================================

:class:`strict` is a kind of torch's ``ExplicitRedistributionContext``; the innermost context of both kinds decides.
It differs in four ways. An axis of one rank does not count as communication. A placement without a cost in torch's
model does. The backward pass on devices other than the CPU, which runs in threads of autograd, is covered. The error
names the operator, its source line and the fix.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, Self, TypeVar

from torch.distributed.tensor import Placement, Replicate, Shard

from .._checked import checked
from .._torch.debugging import DTensorSpec, Watch, backward_position
from .._torch.dispatch import is_strided_shard
from ..debug._source import CallSite, SourceLine, call_site, forward_line
from ..debug._text import mesh_text, placements_text

__all__ = ["ImplicitRedistributionError", "on_implicit_redistribution", "strict"]

logger = logging.getLogger("vescale.dtensor")

P = ParamSpec("P")
R = TypeVar("R")


class ImplicitRedistributionError(RuntimeError):
    """An operator would redistribute its operands implicitly, where that is forbidden."""


class strict:  # noqa: N801 - used like a function
    """Forbid implicit redistribution inside: a context, or a decorator of a function.

    It applies to the thread that opens it and to the backward passes which that thread starts. It costs nothing
    outside, and inside it adds a check only to operators that redistribute.

    Args:
        mode: ``"raise"``, or ``"warn"`` to log every operator once per source line and let it run.
        free: whether an operator may use a shard of a replicated operand. That needs no communication in forward, but
            the gradient of such an operand is sharded.
        interleaved: whether an operator may gather an operand whose shards are interleaved. A view that merges a
            sharded dim into another gives interleaved shards, and only some of DTensor's operators accept those.
        axes: Names of the mesh axes on which it is forbidden; by default all.

    Raises:
        ImplicitRedistributionError: inside, naming operator, placements, shape, mesh, source line and the way out.
        ValueError: another mode.

    Example:
        >>> with strict():                                                      # doctest: +SKIP
        ...     y = torch.softmax(x, dim=1)      # x is Shard(1): an error; Shard(0) is fine
    """

    @checked
    def __init__(
        self,
        *,
        mode: Literal["raise", "warn"] = "raise",
        free: bool = True,
        interleaved: bool = False,
        axes: Sequence[str] | None = None,
    ):
        self.mode, self.free, self.interleaved = mode, free, interleaved
        self.axes = None if axes is None else frozenset(axes)
        self._logged: set[tuple[str, SourceLine | None]] = set()
        self._watches: list[Watch] = []

    def __enter__(self) -> Self:
        watch = Watch(self._observe)
        watch.__enter__()
        self._watches.append(watch)
        return self

    def __exit__(self, *exc: object) -> None:
        self._watches.pop().__exit__(*exc)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with Watch(self._observe):
                return function(*args, **kwargs)

        return inside

    def _observe(self, source: DTensorSpec, target: DTensorSpec) -> None:
        before, after = source.placements, target.placements
        if self.interleaved:
            before = tuple(q if is_strided_shard(p) else p for p, q in zip(before, after, strict=True))
        if self.axes is not None:
            names = source.mesh.mesh_dim_names or ("",) * source.mesh.ndim
            watched = (name in self.axes for name in names)
            before = tuple(p if here else q for p, q, here in zip(before, after, watched, strict=True))
        layouts = source.mesh.shape, before, after
        if not communicates(*layouts) and (self.free or not _changes(*layouts)):
            return
        site = call_site()
        if self.mode == "raise":
            raise ImplicitRedistributionError(_message(source, target, site, "strict() forbids that"))
        if (site.cause, site.line) not in self._logged:
            self._logged.add((site.cause, site.line))
            logger.warning(_message(source, target, site, "no line of the program shows that"))


def on_implicit_redistribution(observer: Callable[[int | None], None]) -> Watch:
    """Return a context that calls ``observer`` before every implicit redistribution that communicates.

    Args:
        observer: takes the sequence number of the autograd node that communicates in backward, or -1 if no node does,
            as where gradients are added; None in forward.
    """

    def observe(source: DTensorSpec, target: DTensorSpec) -> None:
        if communicates(source.mesh.shape, source.placements, target.placements):
            backward = backward_position()
            number = None if backward is None else backward.sequence_number
            observer(-1 if backward is not None and number is None else number)

    return Watch(observe)


def communicates(mesh_shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]) -> bool:
    """Return whether a redistribution from ``source`` to ``target`` placements needs communication.

    Sharding a replicated axis is free, unless a later axis already shards that dim: then the shards nest in another
    order.

    Example:
        >>> communicates((2,), [Shard(0)], [Replicate()]), communicates((2,), [Replicate()], [Shard(0)])
        (True, False)
        >>> communicates((1,), [Shard(0)], [Replicate()])
        False
        >>> communicates((2, 2), [Replicate(), Shard(0)], [Shard(0), Shard(0)])
        True
    """
    for position in _changes(mesh_shape, source, target):
        if not isinstance(source[position], Replicate):
            return True
        later = zip(mesh_shape[position + 1 :], source[position + 1 :], strict=True)
        if type(target[position]) is Shard and any(size > 1 and p == target[position] for size, p in later):
            return True
    return False


def _changes(mesh_shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]) -> list[int]:
    """Return the axes on which the placement changes and the axis has more than one rank."""
    axes = enumerate(zip(mesh_shape, source, target, strict=True))
    return [position for position, (size, before, after) in axes if size > 1 and before != after]


def _message(source: DTensorSpec, target: DTensorSpec, site: CallSite, verdict: str) -> str:
    mesh = source.mesh
    return (
        f"{site.cause or 'an operator'}{_where(site.line)} would redistribute an operand of shape "
        f"{tuple(source.shape)} from ({placements_text(mesh, source.placements)}) to "
        f"({placements_text(mesh, target.placements)}) on "
        f"{mesh_text(mesh)} implicitly, and {verdict}; write .redistribute(placements={list(target.placements)}) on "
        "that operand before, or choose placements that fit"
    )


def _where(line: SourceLine | None) -> str:
    """Describe the call site of the operator, or of the forward operator whose backward it runs in."""
    at = f" at {line} in {line.function} ({line.text})" if line else ""
    backward = backward_position()
    if backward is None:
        return at and f", called{at},"
    if backward.forward_stack:
        forward = forward_line(backward.forward_stack)
        of = f" of {forward} ({forward.text})" if forward else ""
    else:
        of = " (torch.autograd.set_detect_anomaly(True, check_nan=False) makes this message name its forward line)"
    return f", in the backward pass of {backward.node or 'an operator'}{of}{at and ', started' + at},"
