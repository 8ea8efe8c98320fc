"""``--dry-run``: mesh, every parameter's placement, bytes per rank and schedule; in one process and without storage."""

from __future__ import annotations

from collections import defaultdict

import torch
from config import RECIPE, Config, model_config, resumed_layout
from data import load_tokens
from transformers import MixtralForCausalLM

import vescale
from vescale.dmodule import describe, plans
from vescale.pipe import PipelinePlan, format_table, split_units

AXES = ("pp", "dp", "tp")


def print_dry_run(config: Config) -> None:
    """Print what :mod:`train` would build."""
    layout = config.layout
    torch.set_default_dtype(config.torch_dtype)
    model = vescale.deferred_init(MixtralForCausalLM, model_config(config, load_tokens(config)[1]))
    print(f"{RECIPE}: {config.preset}, {config.dtype}, {layout}; resumes under {resumed_layout(config)}")
    _print_mesh(config)

    pipeline = PipelinePlan(schedule=config.schedule, num_microbatches=config.microbatches_for(layout))
    stages = split_units(model, pipeline, layout.pp)
    stage_of_unit = {unit: stage for stage, units in enumerate(stages.stages) for unit in units}
    module_plan = plans.plan_for(model, degree=layout.tp, sequence_parallel=config.sequence_parallel)
    parameters: dict[int, int] = defaultdict(int)
    print("\nparameters: stage, name, global shape, placement over tp -> shard\n")
    for tensor in describe(model, {"tp": layout.tp}, module_plan):
        stage = next(stage for unit, stage in stage_of_unit.items() if f"{tensor.name}.".startswith(f"{unit}."))
        parameters[stage] += tensor.local_bytes
        print(f"  {stage}  {tensor}")
    _print_bytes(config, parameters)
    print(f"\nschedule {config.schedule}, {pipeline.num_microbatches} micro-batches")
    print(format_table(pipeline.actions(layout.pp)))


def _print_mesh(config: Config) -> None:
    layout = config.layout
    ranks = torch.arange(layout.world_size).view(layout.pp, layout.dp, layout.tp)
    print(f"\nmesh: axes {AXES}, ranks")
    for stage in range(layout.pp):
        rows = "  ".join(f"dp{dp}: tp {ranks[stage, dp].tolist()}" for dp in range(layout.dp))
        print(f"  pp{stage}  {rows}")


def _print_bytes(config: Config, parameters: dict[int, int]) -> None:
    """Print what a rank of each stage holds; AdamW keeps two values per parameter, ZeRO divides them."""
    layout = config.layout
    print("\nbytes per rank without activations (largest shard)")
    print(f"{'stage':>7} {'parameters':>12} {'gradients':>12} {'AdamW':>12} {'sum':>12}")
    for stage, size in sorted(parameters.items()):
        gradients = size / layout.dp if layout.zero == 2 else size
        states = 2 * size / layout.dp if layout.zero else 2 * size
        cells = " ".join(f"{value / 2**20:9.2f}MiB" for value in (size, gradients, states, size + gradients + states))
        print(f"{stage:>7} {cells}")
