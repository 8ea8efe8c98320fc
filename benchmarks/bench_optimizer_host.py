"""Host time of an optimizer step for many small parameters: ``DistributedOptimizer`` against the torch optimizer.

2,000 parameters of 16 elements, so that arithmetic costs next to nothing and the time is that of the host. The
reference is one step of the torch optimizer, in the same variant, on 2,000 flat tensors of the same sizes. One process,
one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import Result, time_in_turns
from targets import Target, Targets
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import run_ranks

NUM_PARAMETERS, SHAPE = 2000, (4, 4)
VARIANTS = ("foreach", "fused")
STAGES = {"a module": None, "zero 0": 0, "zero 1": 1, "zero 2": 2}


def run(num_rounds: int) -> Result:
    """Measure in a forked process."""
    (seconds,) = run_ranks(_on_the_rank, 1, num_rounds, timeout=1500)
    reference = {name: f"{name.partition(',')[0]}, torch.optim.AdamW" for name in seconds}
    targets = tuple(Target(name, of, at_most=1.1) for name, of in reference.items() if name != of)
    title = f"Host time of an AdamW step for {NUM_PARAMETERS} parameters of {SHAPE[0] * SHAPE[1]} elements"
    return Targets(title, "torch.optim.AdamW", seconds, reference, targets)


def _on_the_rank(num_rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    cases: dict[str, Callable[[], object]] = {}
    for variant in VARIANTS:
        cases[f"{variant}, torch.optim.AdamW"] = _plain(variant)
        for name, zero in STAGES.items():
            model = _model() if zero is None else DDP(_model(), mesh["dp"], zero=zero)
            torch.stack([param.square().sum() for param in model.parameters()]).sum().backward()
            optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-3, **{variant: True})
            cases[f"{variant}, {name}"] = optimizer.step
    return time_in_turns(cases, num_rounds=num_rounds)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(SHAPE)) for _ in range(NUM_PARAMETERS)])


def _plain(variant: str) -> Callable[[], object]:
    flat = [nn.Parameter(param.detach().flatten()) for param in _model()]
    for param in flat:
        param.grad = torch.ones_like(param)
    return torch.optim.AdamW(flat, lr=1e-3, **{variant: True}).step
