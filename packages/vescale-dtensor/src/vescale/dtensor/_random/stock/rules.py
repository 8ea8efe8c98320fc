"""Random operators on shards that draw exactly what stock torch draws on one device: the table of all of them.

Algorithm ("draw and keep"): every rank walks the **global** draw from the same generator state, in bounded pieces, and
keeps the elements of its own boxes. The generator therefore ends where the single-device one ends, on every rank, ranks
outside the mesh included, without communication. Why pieces may be drawn separately is a property of the stock CPU
generator (mt19937): element ``i`` of a fill does not depend on the length of the fill, except in the tail of
``normal_`` (see ``_pieces``).

Cost per rank: time O(global elements), scratch O(piece). Devices other than the CPU, whose element map depends on the
length, draw the whole tensor at once.

Operators fall into these families (sub-package ``_random``):

=============  ====================================================  ==================================================
fill           ``uniform_ normal_ bernoulli_(float) exponential_``…  values do not depend on the old contents
new tensor     ``rand_like randint_like rand.out``…                  a fill of a new tensor, or of ``out``
element        ``native_dropout bernoulli(p) normal(mean, std)``…    a fill, then local arithmetic
row            ``multinomial``                                       whole rows, which are gathered if need be
gathered       ``poisson binomial rrelu _standard_gamma``…           the whole input is gathered, the draw is whole
composite      ``dropout alpha_dropout lstm``…                       the operators that define them
=============  ====================================================  ==================================================

Every other operator that consumes the generator is refused, see :class:`UnsupportedRandomOperator`.
"""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import DTensor

from ..._containers import tensors_in
from ..._operators.attention import run_fused
from ..._operators.decompose import decompose
from ..._torch import dispatch as _torch
from ...errors import UnsupportedRandomOperator
from ..global_position import WINDOWS
from .elements import element_handlers
from .fills import fill_handlers
from .gathered import gathered_handlers
from .rows import row_handlers

__all__ = ["WINDOWS", "handle", "handlers", "is_enabled"]


@functools.cache
def handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return a handler ``f(op, args, kwargs)`` for every ATen operator that consumes a generator."""
    table = fill_handlers() | element_handlers() | row_handlers() | gathered_handlers()
    for op in filter(_torch.is_random, _torch.operators()):
        table.setdefault(op, _other(op))
    return table


def _other(op: _torch.Op) -> _torch.Handler:
    """Return the handler of a random operator that is in no family."""
    if _torch.is_composite(op):
        return decompose
    return run_fused if "dropout_p" in _torch.argument_names(op) else _refuse


def handle(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run a random operator by its rule; one without a rule (of another library) is refused."""
    return handlers().get(op, _refuse)(op, args, kwargs)


def is_enabled() -> bool:
    """Tell whether rules for random operators are installed, as outside :func:`vescale.dtensor.disabled`."""
    return torch.ops.aten.uniform_.default in _torch.handler_table()


def _refuse(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    tensor = next(tensors_in((args, kwargs)), None)
    if isinstance(tensor, DTensor):
        way_out = "draw it on a plain tensor, or gather with full_tensor() first"
    else:
        way_out = "draw it outside random.local_batch, or as a part of a draw that has the batch in front"
    raise UnsupportedRandomOperator.for_tensor(op, tensor, way_out)
