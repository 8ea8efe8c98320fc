"""A `Plan` as text: what runs, in a few lines, and how two plans differ.

The first four lines are always there; a line about experts, numbers, recomputation or randomness is there if the plan
says something about it. A plan comes as `Any`, since its class imports this file.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator
from typing import Any

from ._checks import SCHEDULES
from ._memory import describe_stages
from ._units import format_bytes, format_percent


def describe(plan: Any) -> str:
    """Return what a plan runs, and its estimates if it has some."""
    degrees = " x ".join(f"{axis} {getattr(plan, axis)}" for axis in plan.axis_order)
    processes = "process" if plan.world_size == 1 else "processes"
    lines = [f"Plan: {plan.world_size} {processes} on {plan.device} = {degrees}", *map(str.rstrip, _parts(plan))]
    if plan.memory:
        lines.append("  estimated bytes per rank")
        lines += [f"    {line}" for line in describe_stages(plan.memory, limit=plan.limit_bytes)]
    return "\n".join(lines)


def _parts(plan: Any) -> Iterator[str]:
    activations = "sequence parallel" if plan.sequence_parallel else "full activations"
    yield f"  dp {plan.dp:<4} ZeRO-{plan.zero}, buckets of {format_bytes(plan.bucket_bytes)}{_sharding(plan)}"
    yield f"  tp {plan.tp:<4} module plan {plan.module_plan or 'auto'}, {plan.mode} mode, {activations}"
    yield f"  pp {plan.pp:<4} {_pipeline(plan)}"
    if plan.ep > 1 or plan.etp > 1:
        whole = f"each sharded over tp {plan.etp}" if plan.etp > 1 else f"over tp {plan.tp} as well" * (plan.tp > 1)
        yield f"  ep {plan.ep:<4} experts over these data-parallel ranks" + (f", {whole}" if whole else "")
    if numbers := _numbers(plan):
        yield f"  numbers {numbers}"
    if plan.recompute is not None:
        what = plan.recompute
        blocks = "every block" if what == 1 else f"every {what}. block"
        yield f"  recompute {blocks if isinstance(what, int) else ', '.join(what)}"
    if plan.random_stream != "torch":
        yield f"  random stream {plan.random_stream}"
    if plan.exact is not None:
        yield f"  exact mode of {plan.exact} blocks"


def _sharding(plan: Any) -> str:
    """Return the settings of data parallelism that are not the defaults."""
    found = [f"{plan.dp_replicate} replicas of the shards"] if plan.dp_replicate > 1 else []
    found += ["ordered sums"] if plan.reduction == "ordered" else []
    found += ["offloaded to host memory"] if plan.offload else []
    found += [] if plan.reshard_after_forward else ["parameters kept after forward"]
    found += [] if plan.units is None else [f"units {', '.join(plan.units) or 'none'}"]
    if plan.granularity is not None:
        found += [", ".join(f"{name} cut by {value}" for name, value in plan.granularity.items())]
    return "".join(f", {each}" for each in found)


def _pipeline(plan: Any) -> str:
    parts = plan.split if isinstance(plan.split, tuple) else ()
    split = " | ".join(part if isinstance(part, str) else " ".join(part) for part in parts) or plan.split
    stages = f", {plan.num_stages // plan.pp} stages per rank" if plan.num_stages > plan.pp else ""
    bubble = f", bubble {format_percent(plan.layout.bubble)}" if plan.schedule in SCHEDULES else ""
    return f"{plan.schedule}{stages}, {plan.num_microbatches} micro-batches, split {split}{bubble}"


def _numbers(plan: Any) -> str:
    names = {"param": "parameters", "grad": "gradients", "reduce": "sums", "master": "masters", "state": "state"}
    dtypes = {said: getattr(plan, f"{name}_dtype") for name, said in names.items()} | {"autocast": plan.autocast}
    found = [f"{said} {dtype}" for said, dtype in dtypes.items() if dtype is not None]
    found += [] if plan.clip_grad_norm is None else [f"gradients clipped to norm {plan.clip_grad_norm:g}"]
    return ", ".join(found)


def differences(plan: Any, other: Any) -> Iterator[str]:
    """Yield one line for each field in which two plans differ."""
    for field in dataclasses.fields(plan):
        ours, theirs = getattr(plan, field.name), getattr(other, field.name)
        if ours != theirs:
            if field.name in ("memory", "table"):
                ours, theirs = (f"{len(rows)} rows" for rows in (ours, theirs))
                yield f"{field.name}: {ours} -> {theirs}" + (", with other values" if ours == theirs else "")
            else:
                yield f"{field.name}: {reprlib.repr(ours)} -> {reprlib.repr(theirs)}"
