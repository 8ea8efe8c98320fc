"""Fills: in-place random operators, and every operator that is a fill of a new tensor or of ``out``.

==============  ==============================================  ================================================
fill            ``uniform_ normal_ bernoulli_(float) …``        in place
like            ``rand_like randn_like randint_like``           a fill of a new tensor like the first argument
functional      ``uniform normal_functional bernoulli(x, p) …``  the same
factory         ``rand randn randint normal`` in a local batch  a fill of a new tensor of a given size
sized out       ``rand.out randint.out …``                      a fill of ``out``, which must have that size
out             every other ``.out`` of an operator above       the operator, then a copy
==============  ==============================================  ================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import dispatch
from ...errors import UnsupportedRandomOperator
from ..global_position import local_of, position_of
from .draw import PIECEWISE_OPS, draw_into

__all__ = ["UNIFORM", "check_out", "copy_to_out", "empty_like", "fill", "fill_handlers", "wrapped_like"]

aten = torch.ops.aten

RANDOM_FROM = getattr(aten.random_, "from")
UNIFORM, NORMAL = aten.uniform_.default, aten.normal_.default

# operator -> the fill that gives its values, and how its positional arguments become the fill's
Recipe = tuple[dispatch.Op, Callable[..., tuple]]

LIKE: dict[str, Recipe] = {
    "rand_like": (UNIFORM, lambda: (0.0, 1.0)),
    "rand_like.generator": (UNIFORM, lambda: (0.0, 1.0)),
    "randn_like": (NORMAL, lambda: (0.0, 1.0)),
    "randn_like.generator": (NORMAL, lambda: (0.0, 1.0)),
    "randint_like": (RANDOM_FROM, lambda high: (0, high)),
    "randint_like.generator": (RANDOM_FROM, lambda high: (0, high)),
    "randint_like.low_dtype": (RANDOM_FROM, lambda low, high: (low, high)),
    "randint_like.low_generator_dtype": (RANDOM_FROM, lambda low, high: (low, high)),
    "randint_like.Tensor": (RANDOM_FROM, lambda high: (0, int(high))),
    "randint_like.Tensor_generator": (RANDOM_FROM, lambda high: (0, int(high))),
}

# the same, with the size in front
FACTORY: dict[str, Recipe] = {
    "rand": (UNIFORM, lambda size: (size, 0.0, 1.0)),
    "rand.generator": (UNIFORM, lambda size: (size, 0.0, 1.0)),
    "randn": (NORMAL, lambda size: (size, 0.0, 1.0)),
    "randn.generator": (NORMAL, lambda size: (size, 0.0, 1.0)),
    "normal.float_float": (NORMAL, lambda mean, std, size: (size, mean, std)),
    "randint": (RANDOM_FROM, lambda high, size: (size, 0, high)),
    "randint.generator": (RANDOM_FROM, lambda high, size: (size, 0, high)),
    "randint.low": (RANDOM_FROM, lambda low, high, size: (size, low, high)),
    "randint.low_generator": (RANDOM_FROM, lambda low, high, size: (size, low, high)),
}

# functional name -> in-place operator; all arguments after the tensor are the same
FUNCTIONAL: dict[str, dispatch.Op] = {
    "uniform": UNIFORM,
    "normal_functional": NORMAL,
    "bernoulli.p": aten.bernoulli_.float,
    "exponential": aten.exponential_.default,
    "geometric": aten.geometric_.default,
    "log_normal": aten.log_normal_.default,
    "cauchy": aten.cauchy_.default,
    "random": aten.random_.default,
    "random.from": RANDOM_FROM,
    "random.to": aten.random_.to,
}

# name of the operator with `out` -> of the one without
OUT = {
    **{name: name.removesuffix(".out") for name in ("uniform.out", "exponential.out", "geometric.out")},
    **{name: name.removesuffix(".out") for name in ("log_normal.out", "cauchy.out", "random.out")},
    **{name: name.removesuffix(".out") for name in ("rand_like.out", "randn_like.out", "randint_like.out")},
    "normal.out": "normal_functional",
    "bernoulli.float_out": "bernoulli.p",
    "random.from_out": "random.from",
    "random.to_out": "random.to",
    "rand_like.generator_out": "rand_like.generator",
    "randn_like.generator_out": "randn_like.generator",
    "randint_like.generator_out": "randint_like.generator",
    "randint_like.low_dtype_out": "randint_like.low_dtype",
    "randint_like.low_generator_dtype_out": "randint_like.low_generator_dtype",
    "randint_like.Tensor_out": "randint_like.Tensor",
    "randint_like.Tensor_generator_out": "randint_like.Tensor_generator",
}

SIZED_OUT = {
    "rand.out": "rand",
    "rand.generator_out": "rand.generator",
    "randn.out": "randn",
    "randn.generator_out": "randn.generator",
    "normal.float_float_out": "normal.float_float",
    "randint.out": "randint",
    "randint.generator_out": "randint.generator",
    "randint.low_out": "randint.low",
    "randint.low_generator_out": "randint.low_generator",
}


def fill_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of all operators of this file."""
    named: dict[str, dispatch.Handler] = {
        **{name: functools.partial(_like, recipe) for name, recipe in LIKE.items()},
        **{name: functools.partial(_factory, recipe) for name, recipe in FACTORY.items()},
        **{name: functools.partial(_functional, name, op) for name, op in FUNCTIONAL.items()},
        **{name: functools.partial(_sized_out, FACTORY[source]) for name, source in SIZED_OUT.items()},
    }
    named |= {name: functools.partial(_out, named[source]) for name, source in OUT.items()}
    table: dict[dispatch.Op, dispatch.Handler] = dict.fromkeys(PIECEWISE_OPS, fill)
    table[aten.resize_.default] = _resize_
    return table | {op: handler for name, handler in named.items() if (op := dispatch.overload(name)) is not None}


def fill(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Run an in-place fill and return the tensor."""
    tensor = args[0]
    draw_into(op, local_of(tensor), position_of(op, tensor), args[1:], kwargs)
    return tensor


def empty_like(tensor: Tensor, **options: object) -> Tensor:
    """Return ``torch.empty_like``: a new tensor with the strides and the placements that stock torch gives it.

    Like a `Partial` tensor it is replicated: there are no sums of random numbers.
    """
    if not isinstance(tensor, DTensor) or options.keys() - {"dtype", "memory_format"}:
        return torch.empty_like(tensor, **options)
    spec, local_format = _spec_like(dispatch.spec(tensor), options.get("dtype"), options.get("memory_format"))
    local = torch.empty_like(local_of(tensor), dtype=spec.tensor_meta.dtype, memory_format=local_format)
    return dispatch.from_spec(local, spec)


def wrapped_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, of the dtype of ``tensor``, as the shard of what ``empty_like(tensor)`` gives."""
    if not isinstance(tensor, DTensor):
        return local
    return dispatch.from_spec(local, _spec_like(dispatch.spec(tensor), None, None)[0])


@functools.lru_cache(maxsize=4096)
def _spec_like(
    spec: dispatch.Spec, dtype: torch.dtype | None, memory_format: torch.memory_format | None
) -> tuple[dispatch.Spec, torch.memory_format]:
    """Return the spec of ``empty_like``, and a memory format for its shards."""
    known = spec.tensor_meta
    meta = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
    meta = torch.empty_like(meta, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    placements = [Replicate() if p.is_partial() else p for p in spec.placements]
    # values do not depend on the strides of a shard
    local_format = torch.contiguous_format if meta.is_contiguous() else torch.preserve_format
    return dispatch.spec_like(spec, placements, meta), local_format


# ------------------------------------------------------------------------------------------------- new tensors


def _like(recipe: Recipe, _op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    op, to_fill = recipe
    tensor, *rest = args
    new = empty_like(tensor, **_options(kwargs))
    return fill(op, (new, *to_fill(*rest)), {"generator": kwargs.get("generator")})


def _functional(name: str, op: dispatch.Op, _op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    tensor, *rest = args
    options = {"memory_format": torch.contiguous_format} if name.startswith("bernoulli") else {}
    return fill(op, (empty_like(tensor, **options), *rest), kwargs)


def _factory(recipe: Recipe, _op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    op, to_fill = recipe
    size, *rest = to_fill(*args)
    options = _options(kwargs)
    if op is RANDOM_FROM:
        options.setdefault("dtype", torch.int64)
    return fill(op, (torch.empty(size, **options), *rest), {"generator": kwargs.get("generator")})


def _options(kwargs: dict) -> dict:
    return {
        key: value for key, value in kwargs.items() if key not in ("generator", "out") and value not in (None, False)
    }


# ------------------------------------------------------------------------------------------------- out


def _sized_out(recipe: Recipe, op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    fill_op, to_fill = recipe
    out = kwargs["out"]
    size, *rest = to_fill(*args)
    if tuple(size) != tuple(out.shape):
        raise UnsupportedRandomOperator.for_tensor(op, out, f"give `out` the shape {tuple(size)} of the result")
    return fill(fill_op, (out, *rest), {"generator": kwargs.get("generator")})


def _resize_(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Run the resize of ``randn(out=)`` before its draw: do nothing if the size stays, else run the stock operator."""
    tensor, size = args[:2]
    return tensor if tuple(size) == tuple(tensor.shape) else dispatch.stock_dispatch(op, args, kwargs)


def _out(handler: dispatch.Handler, op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    check_out(op, kwargs["out"], args[0].shape, args[0])
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    return copy_to_out(handler(op, args, rest), kwargs["out"])


def check_out(op: dispatch.Op, out: Tensor, shape: torch.Size, like: Tensor) -> None:
    """Refuse an ``out`` unless it has the result's shape, and the mesh and placements of ``like``.

    Raises:
        UnsupportedRandomOperator: ``out`` differs in shape, mesh or placements.
    """
    if out.shape != shape:
        way_out = f"give `out` the shape {tuple(shape)} of the result"
    elif type(out) is not type(like) or (isinstance(out, DTensor) and _layout(out) != _layout(like)):
        way_out = "give `out` the mesh and the placements of the result"
    else:
        return
    raise UnsupportedRandomOperator.for_tensor(op, out, way_out)


def _layout(tensor: DTensor) -> tuple:
    return tensor.device_mesh, tensor.placements


def copy_to_out(result: Tensor, out: Tensor) -> Tensor:
    """Copy a result to an ``out`` that `check_out` accepted, and return it."""
    local_of(out).copy_(local_of(result))
    return out


# ------------------------------------------------------------------------------------------------- factories
