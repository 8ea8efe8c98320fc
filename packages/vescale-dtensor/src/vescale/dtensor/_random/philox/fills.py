"""Rules of the stream "philox" for operators whose random elements are independent of each other.

=============  ========================================  =========================================================
fill           ``uniform_ normal_ random_`` …            every element of the tensor is replaced
functional     ``bernoulli.p``, ``uniform`` …            a fill of a new tensor like the argument
like, factory  ``randn_like``, ``randint`` …             a fill of a new tensor
out            ``rand.out`` …                            the operator without ``out``, copied there
positional     ``bernoulli native_dropout rrelu`` …      one random number for each input element
=============  ========================================  =========================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._torch.dispatch import wrap
from ...errors import UnsupportedRandomOperator
from ..global_position import local_of
from .elements import Draw
from .values import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    Integers,
    LogNormal,
    Normal,
    Uniform,
    Unit24,
)

__all__ = ["FILLS", "Rule", "fill_rules", "new_rules", "positional_rules"]

aten = torch.ops.aten
Rule = Callable[[Draw, tuple, dict], object]


# ------------------------------------------------------------------------------------------------- distributions


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Distribution:
    _check_floating("uniform_", dtype)
    _check_at_least("uniform_", "to - from", high - low, 0.0)
    return Uniform(dtype, low, high)


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Distribution:
    _check_floating("normal_", dtype)
    _check_at_least("normal_", "std", std, 0.0)
    return Normal(dtype, mean, std)


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Distribution:
    _check_floating("log_normal_", dtype)
    _check_between("log_normal_", "std", std, 0.0)
    return LogNormal(dtype, mean, std)


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Distribution:
    _check_real("bernoulli_", dtype)
    _check_probability("bernoulli_", p)
    return Bernoulli(dtype, p)


def _exponential(dtype: torch.dtype, rate: float = 1.0) -> Distribution:
    _check_floating("exponential_", dtype)
    _check_between("exponential_", "lambda", rate, 0.0)
    return Exponential(dtype, rate)


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Distribution:
    _check_floating("cauchy_", dtype)
    _check_between("cauchy_", "sigma", sigma, 0.0)
    return Cauchy(dtype, median, sigma)


def _geometric(dtype: torch.dtype, p: float) -> Distribution:
    _check_real("geometric_", dtype)
    _check_between("geometric_", "p", p, 0.0, 1.0)
    return Geometric(dtype, p)


def _random(dtype: torch.dtype) -> Distribution:
    _check_real("random_", dtype)
    if dtype.is_floating_point:  # all integers up to the largest that the dtype holds without gaps
        return Integers(dtype, 0, round(2 / torch.finfo(dtype).eps) + 1)
    return Integers(dtype, 0, 2 if dtype is torch.bool else torch.iinfo(dtype).max + 1)


def _random_from(dtype: torch.dtype, low: int, high: int | None) -> Distribution:
    _check_real("random_", dtype)
    if high is None:
        high = 2 if dtype is torch.bool else round(_largest(dtype)) + 1
    _check_integer_range("random_", dtype, low, high)
    return Integers(dtype, low, high - low)


def _largest(dtype: torch.dtype) -> float:
    return 2**63 - 1 if dtype.is_floating_point else torch.iinfo(dtype).max


# arguments are checked as stock torch does, before anything is drawn


def _check_floating(op: str, dtype: torch.dtype) -> None:
    """Raise NotImplementedError unless ``dtype`` is a real floating-point type."""
    if not dtype.is_floating_point:
        raise NotImplementedError(f"{op} needs a floating-point tensor, got {dtype}")


def _check_real(op: str, dtype: torch.dtype) -> None:
    """Raise NotImplementedError for complex numbers."""
    if dtype.is_complex:
        raise NotImplementedError(f"{op} needs a tensor of real numbers, got {dtype}")


def _check_probability(op: str, p: float) -> None:
    """Raise RuntimeError unless ``p`` is in [0, 1]."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"{op} expects p to be in [0, 1], but got p={p}")


def _check_at_least(op: str, name: str, value: float, bound: float) -> None:
    """Raise RuntimeError if ``value < bound``, or if it is not a number."""
    if not value >= bound:
        raise RuntimeError(f"{op} expects {name} >= {bound}, but found {name}={value}")


def _check_between(op: str, name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise RuntimeError unless ``low < value < high``."""
    if not low < value < high:
        raise RuntimeError(f"{op} expects {low} < {name} < {high}, but found {name}={value}")


def _check_integer_range(op: str, dtype: torch.dtype, low: int, high: int) -> None:
    """Raise RuntimeError unless ``[low, high)`` is not empty and ``dtype`` holds its integers."""
    if not low < high:
        raise RuntimeError(f"{op} expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if dtype.is_floating_point:
        return
    smallest, largest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if low < smallest or high - 1 > largest:
        raise RuntimeError(f"{op} expects from={low} and to - 1={high - 1} to be in the range of {dtype}")


FILLS: dict[str, Callable[..., Distribution]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "log_normal_": _log_normal,
    "bernoulli_.float": _bernoulli,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "random_": _random,
    "random_.to": lambda dtype, high: _random_from(dtype, 0, high),
    "random_.from": _random_from,
}
"""The in-place operators: from dtype and arguments to a distribution."""

FUNCTIONAL = {
    "uniform": _uniform,
    "normal_functional": _normal,
    "log_normal": _log_normal,
    "bernoulli.p": _bernoulli,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "random": _random,
    "random.to": FILLS["random_.to"],
    "random.from": _random_from,
}

LIKE = {"rand_like": _uniform, "randn_like": _normal}
FACTORY = {"rand": _uniform, "randn": _normal}


# ------------------------------------------------------------------------------------------------- fills


def fill_rules() -> dict[str, Rule]:
    """Return the rules of the in-place operators, by name."""
    return {name: functools.partial(_fill, make) for name, make in FILLS.items()}


def _fill(make: Callable[..., Distribution], draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    tensor, *rest = args
    distribution = make(tensor.dtype, *rest, **_without(kwargs, "generator"))
    return draw.fill(distribution, tensor, Tensor.copy_)


def new_rules() -> dict[str, Rule]:
    """Return the rules of operators that fill a new tensor, by name."""
    rules: dict[str, Rule] = {}
    for name, make in FUNCTIONAL.items():
        rules[name] = functools.partial(_functional, make)
    for name, make in LIKE.items():
        rules[name] = rules[f"{name}.generator"] = functools.partial(_like, make, 0)
    for overload in ("", ".generator"):
        rules[f"randint_like{overload}"] = functools.partial(_like, FILLS["random_.to"], 1)
    for overload in (".low_dtype", ".low_generator_dtype"):
        rules[f"randint_like{overload}"] = functools.partial(_like, _random_from, 2)
    for name, make in FACTORY.items():
        rules[name] = rules[f"{name}.generator"] = functools.partial(_factory, make, 0)
    rules["normal.float_float"] = functools.partial(_factory, _normal, 2)
    for overload, num_bounds in (("", 1), (".generator", 1), (".low", 2), (".low_generator", 2)):
        rules[f"randint{overload}"] = functools.partial(_randint, num_bounds)
    return rules


def _functional(make: Callable[..., Distribution], draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    return _fill(make, draw, (torch.empty_like(args[0]), *args[1:]), kwargs)


def _like(make: Callable, num_arguments: int, draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    tensor, *rest = args
    new = torch.empty_like(tensor, **_options(kwargs))
    return draw.fill(make(new.dtype, *rest[:num_arguments]), new, Tensor.copy_)


def _factory(make: Callable, num_arguments: int, draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    arguments, (size, *_) = args[:num_arguments], args[num_arguments:]
    new = torch.empty(size, **_options(kwargs))
    return draw.fill(make(new.dtype, *arguments), new, Tensor.copy_)


def _randint(num_bounds: int, draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    make = _random_from if num_bounds == 2 else FILLS["random_.to"]
    return _factory(make, num_bounds, draw, args, {"dtype": torch.int64} | _options(kwargs))


def _options(kwargs: dict) -> dict:
    return {key: value for key, value in kwargs.items() if key != "generator" and value is not None}


def _without(kwargs: dict, name: str) -> dict:
    return {key: value for key, value in kwargs.items() if key != name}


# ------------------------------------------------------------------------------------------------- positional


def positional_rules() -> dict[str, Rule]:
    """Return the rules of operators with one random number for each input element, by name."""
    return {
        "bernoulli": _bernoulli_of,
        "bernoulli_.Tensor": _bernoulli_tensor_,
        "bernoulli.Tensor": lambda draw, args, kwargs: _bernoulli_tensor_(
            draw, (torch.empty_like(args[0]), *args[1:]), kwargs
        ),
        "native_dropout": _native_dropout,
        "rrelu_with_noise": _rrelu,
        "rrelu_with_noise_": lambda draw, args, kwargs: args[0].copy_(_rrelu(draw, args, kwargs)),
        "normal.Tensor_float": _normal_of_tensors,
        "normal.float_Tensor": _normal_of_tensors,
        "normal.Tensor_Tensor": _normal_of_tensors,
    }


def _bernoulli_of(draw: Draw, args: tuple, _kwargs: dict) -> Tensor:
    probabilities = args[0]
    _check_floating("bernoulli", probabilities.dtype)
    return _below(draw, probabilities, torch.empty_like(probabilities))


def _bernoulli_tensor_(draw: Draw, args: tuple, _kwargs: dict) -> Tensor:
    tensor, probabilities = args[:2]
    _check_real("bernoulli_", tensor.dtype)
    _check_floating("bernoulli_", probabilities.dtype)
    if not isinstance(tensor, DTensor) and not isinstance(probabilities, DTensor):
        return _below(draw, probabilities.expand_as(tensor), tensor)
    alike = tensor.shape == probabilities.shape and type(tensor) is type(probabilities)
    if not alike or tensor.placements != probabilities.placements:
        raise UnsupportedRandomOperator.for_tensor(
            draw.op, tensor, "give the probabilities the shape and the placements of the result"
        )
    return _below(draw, probabilities, tensor)


def _below(draw: Draw, probabilities: Tensor, out: Tensor) -> Tensor:
    for unit, view, chance in draw.each(Unit24(), out, local_of(probabilities)):
        view.copy_(unit < chance)
    return out


def _native_dropout(draw: Draw, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    tensor, p = args[:2]
    train = args[2] if len(args) > 2 else kwargs.get("train")
    _check_floating("native_dropout", tensor.dtype)
    _check_probability("native_dropout", p)
    local = local_of(tensor)
    if train is False:
        return tensor.clone(), _wrapped(torch.ones_like(local, dtype=torch.bool), tensor)
    out, mask = torch.empty_like(local), torch.empty_like(local, dtype=torch.bool)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    for keep, x, y, m in draw.each(Bernoulli(torch.bool, 1 - p), tensor, out, mask):
        m.copy_(keep)
        y.copy_((x * keep).mul_(scale))
    return _wrapped(out, tensor), _wrapped(mask, tensor)


def _rrelu(draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    named = dict(zip(("self", "noise", "lower", "upper", "training"), args, strict=False)) | kwargs
    tensor, noise = named["self"], named["noise"]
    lower, upper = named.get("lower", 1 / 8), named.get("upper", 1 / 3)
    if not named.get("training", False):
        return torch.where(tensor > 0, tensor, tensor * ((lower + upper) / 2))
    out = torch.empty_like(local_of(tensor))
    for slope, x, y, n in draw.each(_uniform(tensor.dtype, lower, upper), tensor, out, local_of(noise)):
        n.copy_(torch.where(x <= 0, slope, torch.ones_like(slope)))
        y.copy_(x * n)
    return _wrapped(out, tensor)


def _normal_of_tensors(draw: Draw, args: tuple, kwargs: dict) -> Tensor:
    mean, std = (*args, 1.0)[:2] if len(args) < 2 else args[:2]
    mean, std = kwargs.get("mean", mean), kwargs.get("std", std)
    new = torch.empty_like(mean + std)  # the shape, dtype and placements of both together
    return draw.fill(_normal(new.dtype), new, Tensor.copy_) * std + mean


def _wrapped(local: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    return wrap(local, like.device_mesh, like.placements, like)
