"""Which values a `Plan` accepts, field by field and in combination.

A check reads the fields of a plan and raises `ValueError` with the field, the value and the way out. What depends on
the model, such as names that match a module, is checked by `vescale.parallelize`. A plan comes as `Any`, since its
class imports this file.

    degrees       positive integers; dp_replicate * ep divides dp; etp is 1 or tp; cp is 1
    sharding      offload, units and kept parameters need ZeRO 3; granularity and replicas need ZeRO 1 to 3
    numbers       names of floating-point dtypes, a finite norm
    recomputation every k-th block, or names
    pipeline      a split with as many parts as stages
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ._checks import (
    ALL_SCHEDULES,
    DEVICES,
    LOOPED,
    ZERO_STAGES,
    check_bool,
    check_choice,
    check_int,
)

MODES = ("eager", "static", "compile")
AXES = ("pp", "dp", "tp")
REDUCTIONS = ("backend", "ordered")
STREAMS = ("torch", "philox")
DTYPES = ("float64", "float32", "bfloat16", "float16")
AUTOCAST_DTYPES = ("bfloat16", "float16")
GRANULARITIES = ("tensor", "rows", "expert")
_COUNTS = ("dp", "tp", "pp", "ep", "etp", "cp", "dp_replicate", "num_microbatches", "bucket_bytes")
_DTYPE_FIELDS = ("param_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype")


def check_plan(plan: Any) -> None:
    """Raise `ValueError` unless the fields of ``plan`` are valid, alone and together."""
    _check_values(plan)
    _check_degrees(plan)
    _check_sharding(plan)
    _check_names(plan)
    _check_split(plan)
    _check_exact(plan)


def _check_values(plan: Any) -> None:
    """Check each field by itself."""
    for name in _COUNTS:
        check_int("Plan", name, getattr(plan, name), at_least=1)
    for name, choices in (
        ("zero", ZERO_STAGES),
        ("schedule", ALL_SCHEDULES),
        ("device", DEVICES),
        ("mode", MODES),
        ("reduction", REDUCTIONS),
        ("random_stream", STREAMS),
    ):
        check_choice("Plan", name, getattr(plan, name), choices)
    for name in ("sequence_parallel", "offload", "reshard_after_forward"):
        check_bool("Plan", name, getattr(plan, name))
    for name in _DTYPE_FIELDS:
        check_choice("Plan", name, getattr(plan, name), (None, *DTYPES))
    check_choice("Plan", "autocast", plan.autocast, (None, *AUTOCAST_DTYPES))
    if plan.limit_bytes is not None:
        check_int("Plan", "limit_bytes", plan.limit_bytes, at_least=1)
    if plan.stages_per_rank is not None:
        check_int("Plan", "stages_per_rank", plan.stages_per_rank, at_least=1)
        if plan.schedule not in LOOPED:
            raise ValueError(
                f"Plan: expected stages_per_rank=None for schedule {plan.schedule!r}, which says it itself, got "
                f"{plan.stages_per_rank}; choose one of {', '.join(map(repr, LOOPED))} for other numbers"
            )
    norm = plan.clip_grad_norm
    is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
    if norm is not None and not (is_number and 0 < norm <= sys.float_info.max):
        raise ValueError(
            f"Plan: expected a positive number or None for clip_grad_norm, got {norm!r}; leave it out to measure the "
            "norm without clipping"
        )


def check_rows(plan: Any, name: str, kind: type) -> None:
    """Raise `ValueError` unless a field of results is a tuple of its kind."""
    rows = getattr(plan, name)
    if not isinstance(rows, tuple) or not all(isinstance(row, kind) for row in rows):
        raise ValueError(
            f"Plan: expected a tuple of {kind.__name__} for {name}, got {reprlib.repr(rows)}; leave it to generate_plan"
        )


def _check_degrees(plan: Any) -> None:
    order = plan.axis_order
    if not isinstance(order, tuple | list) or sorted(map(str, order)) != sorted(AXES):
        raise ValueError(f"Plan: expected 'pp', 'dp' and 'tp' once each in axis_order, got {order!r}")
    if plan.sequence_parallel and plan.tp == 1:
        raise ValueError(
            "Plan: expected tp > 1 for sequence_parallel, got tp = 1; set tp > 1 or sequence_parallel=False"
        )
    if plan.cp != 1:
        raise ValueError(
            f"Plan: expected cp=1, since context parallelism does not exist yet, got cp={plan.cp}; shard activations "
            "over the sequence with tp > 1 and sequence_parallel=True"
        )
    if plan.etp not in (1, plan.tp):
        raise ValueError(
            f"Plan: expected etp = 1 (whole experts) or etp = tp = {plan.tp} (matrices sharded over tp), got etp = "
            f"{plan.etp}; choose one of them"
        )
    inside = plan.dp_replicate * plan.ep
    if plan.dp % inside:
        raise ValueError(
            f"Plan: expected dp that dp_replicate * ep = {plan.dp_replicate} * {plan.ep} = {inside} divides, got dp = "
            f"{plan.dp}; replicas and ranks that spread experts are data-parallel ranks: use dp = "
            f"{-(-plan.dp // inside) * inside}, or other degrees"
        )


def _check_sharding(plan: Any) -> None:
    """Check settings that have an effect under some ZeRO stages alone."""
    for name, default, effect in (
        ("offload", False, "keeps shards of parameters in host memory"),
        ("units", None, "names modules whose parameters are gathered together"),
        ("reshard_after_forward", True, "says when gathered parameters are freed"),
    ):
        value = getattr(plan, name)
        if value != default and plan.zero != 3:
            raise ValueError(
                f"Plan: expected zero=3 for {name}={value!r}, which {effect}, got zero={plan.zero}; set zero=3 or "
                f"leave {name} out"
            )
    for name, usual, effect in (
        ("dp_replicate", 1, "replicates shards"),
        ("granularity", None, "says where parameters are cut into shards"),
    ):
        setting = getattr(plan, name)
        if setting != usual and plan.zero == 0:
            raise ValueError(
                f"Plan: expected zero=1, 2 or 3 for {name}={setting!r}, which {effect}, got zero=0, which shards "
                f"nothing; set zero or leave {name} out"
            )


def _check_names(plan: Any) -> None:
    """Check fields that name modules and parameters."""
    if plan.module_plan is not None and (not isinstance(plan.module_plan, str) or not plan.module_plan):
        raise ValueError(
            f"Plan: expected the name of a ready plan or None for module_plan, got {plan.module_plan!r}; pass a plan "
            "of your own to parallelize(module_plan=...)"
        )
    if plan.units is not None:
        _check_patterns("units", plan.units, "None, or names of modules and regular expressions, as a list,")
    if isinstance(plan.recompute, int) and not isinstance(plan.recompute, bool):
        check_int("Plan", "recompute", plan.recompute, at_least=1)
    elif plan.recompute is not None:
        expected = "None, a number k for every k-th block, or a list of names of modules and regular expressions"
        _check_patterns("recompute", plan.recompute, expected)
        if not plan.recompute:
            raise ValueError(f"Plan: expected {expected} for recompute, got no name; use None for no recomputation")
    if plan.granularity is not None:
        _check_granularity(plan.granularity)


def _check_patterns(field: str, value: object, expected: str) -> None:
    if not is_names(value):
        raise ValueError(f"Plan: expected {expected} for {field}, got {value!r}; write [r'layers\\.\\d+']")
    for pattern in value:
        _check_pattern(field, pattern)


def _check_pattern(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Plan: expected regular expressions in {field}, got {pattern!r} ({error}); correct it"
        ) from None


def _check_granularity(granularity: Any) -> None:
    if not isinstance(granularity, Mapping) or not is_names(tuple(granularity)):
        raise ValueError(
            f"Plan: expected None or a dict from names of parameters for granularity, got {granularity!r}; write "
            "{r'.*weight': 'rows'}"
        )
    for pattern, value in granularity.items():
        _check_pattern("granularity", pattern)
        is_name = isinstance(value, str) and value in GRANULARITIES
        is_rows = isinstance(value, list | tuple) and len(value) == 2 and value[0] == "dim0" and _is_count(value[1])
        if is_name or is_rows or _is_count(value):
            continue
        names = ", ".join(map(repr, GRANULARITIES))
        raise ValueError(
            f"Plan: expected {names}, ('dim0', rows) or a number of elements for granularity[{pattern!r}], got "
            f"{value!r}; choose one of them"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def _check_split(plan: Any) -> None:
    if plan.split == "uniform":
        return
    each = plan.num_stages // plan.pp
    stages = f"pp = {plan.pp}" + (f" and {each} stages per rank" if each > 1 else "")
    if is_names(plan.split):
        if len(plan.split) != plan.num_stages - 1 or len(set(plan.split)) != len(plan.split):
            raise ValueError(
                f"Plan: expected {plan.num_stages - 1} different FQNs in split for {stages}, got {list(plan.split)}; "
                "name the first module of each stage after the first"
            )
    elif isinstance(plan.split, list | tuple) and all(map(is_names, plan.split)):
        if len(plan.split) != plan.num_stages:
            raise ValueError(
                f"Plan: expected {plan.num_stages} lists in split for {stages}, got {len(plan.split)}; write one list "
                "of modules per stage"
            )
    else:
        raise ValueError(
            f"Plan: expected 'uniform', a list of FQNs or one list of FQNs per stage for split, got {plan.split!r}"
        )


def is_names(value: object) -> TypeGuard[Sequence[str]]:
    """Return whether a value is a list of texts that are not empty."""
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)


def _check_exact(plan: Any) -> None:
    """Check what exact mode cannot combine with."""
    if plan.exact is None:
        return
    check_int("Plan", "exact", plan.exact, at_least=1)
    for axis in ("dp", "tp"):
        if plan.exact % (degree := getattr(plan, axis)):
            raise ValueError(
                f"Plan: expected exact to be a multiple of {axis} = {degree}, whose ranks hold whole blocks, got "
                f"exact={plan.exact}; use exact={-(-plan.exact // degree) * degree}, the same in all plans to compare"
            )
    for name, usual, why in (
        ("reduce_dtype", None, "one rank alone does not round to it"),
        ("offload", False, "gradients in host memory have no exact form"),
    ):
        if (value := getattr(plan, name)) != usual:
            raise ValueError(f"Plan: expected {name}={usual!r} for exact={plan.exact}, got {value!r}: {why}")
