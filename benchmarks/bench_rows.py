"""What it costs that data parallelism computes on the rows of all ranks: steps of Hugging Face's LLaMA and Mixtral.

Two gloo ranks with one thread each run forward with labels, backward and AdamW under `vescale.optim.DDP`. In LLaMA only
the mean over labels mixes rows, and dropout draws slices of a global draw. The baseline is the same run without
recorded calls, so that slicing draws is left. In Mixtral the loss of the router mixes rows, too. Its baseline is
Mixtral without that loss; experts are `row_wise` in both. Each case has its own processes (`turns.py`). Times are
wall-clock times, because ranks wait for each other: run this where nothing else runs. It takes 8 GiB.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from huggingface import build
from measure import Result
from targets import Target, Targets
from torch.distributed.device_mesh import DeviceMesh
from turns import steps_in_turns

from vescale.optim import DDP, DistributedOptimizer

WORLD = 2
BATCH, SEQ, VOCAB = 4, 128, 2000
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
UNRECORDED = ", not recorded"


def run(num_rounds: int) -> Result:
    """Measure on forked gloo processes."""
    dropout, router = ", dropout", ", loss of the router"
    groups = {
        "LLaMA": {
            "LLaMA" + UNRECORDED: partial(_case, "LLaMA", {}, is_recorded=False),
            "LLaMA": partial(_case, "LLaMA", {}),
        },
        "LLaMA" + dropout: {
            "LLaMA" + dropout + UNRECORDED: partial(_case, "LLaMA", {"attention_dropout": 0.1}, is_recorded=False),
            "LLaMA" + dropout: partial(_case, "LLaMA", {"attention_dropout": 0.1}),
        },
        "Mixtral" + router: {
            "Mixtral": partial(_case, "Mixtral", EXPERTS),
            "Mixtral" + router: partial(_case, "Mixtral", EXPERTS, has_router_loss=True),
        },
    }
    seconds: dict[str, list[float]] = {}
    processor: dict[str, str] = {}
    reference: dict[str, str] = {}
    targets: list[Target] = []
    for name, makers in groups.items():
        baseline = next(iter(makers))
        for case, steps in steps_in_turns(makers, WORLD, "dp", num_rounds=num_rounds).items():
            seconds[case], reference[case] = steps.seconds, baseline
            processor[case] = f"{1e3 * statistics.median(steps.processor):.0f}"
        targets.append(Target(name, baseline, at_most=1.05 if "router" in name else 1.02))
    return Targets(
        f"Data parallelism as an axis of the program, gloo (4 layers, hidden 512, {BATCH} x {SEQ} tokens per rank)",
        "the baseline",
        seconds,
        reference,
        tuple(targets),
        {"processor, ms": processor},
    )


def _case(
    family: str, sizes: dict, mesh: DeviceMesh, *, is_recorded: bool = True, has_router_loss: bool = False
) -> Callable[[], float]:
    torch.set_num_threads(1)
    module = build(family, **SIZES, **sizes)
    model = DDP(module, mesh, row_wise=[r".*\.experts"] if family == "Mixtral" else [])
    if not is_recorded:
        model._rows._meet = None
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4, foreach=True)
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    arguments = {"output_router_logits": True} if has_router_loss else {}

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, **arguments).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
