"""The counter-based stream on one core: what its elements cost beside the stock generator's, whole and in shards.

The stock generator draws one element after the other. The counter-based one computes each from its index: more work
for an element, but a rank computes its own elements only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from measure import Result, time_in_turns

from vescale.dtensor import random
from vescale.dtensor._layout.boxes import Box
from vescale.dtensor._random.philox.cipher import Key
from vescale.dtensor._random.philox.elements import sample_box
from vescale.dtensor._random.philox.values import Uniform

NUMEL = 2**20
SHAPE = (1024, 1024)
BASELINE = "torch, uniform_"

DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "bernoulli_(0.9)": lambda x: x.bernoulli_(0.9),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
}


def run(num_rounds: int) -> Result:
    """Measure in this process."""
    cases: dict[str, Callable[[], object]] = {}
    for name, draw in DRAWS.items():
        for stream in ("torch", "philox"):
            cases[f"{stream}, {name}"] = functools.partial(_draw, stream, draw, torch.ones(NUMEL))
    rows, columns = ((512, 0), (512, 1024)), ((0, 512), (1024, 512))
    cases["philox, uniform_ of half the rows"] = functools.partial(_sample, rows)
    cases["philox, uniform_ of half the columns"] = functools.partial(_sample, columns)
    cases["philox, uniform_ of 4 elements, and the context"] = functools.partial(
        _draw, "philox", DRAWS["uniform_"], torch.ones(4)
    )
    seconds = time_in_turns(cases, num_rounds=num_rounds)
    return Result(f"Draws of {NUMEL} float32 elements (1 ms is {1e6 / NUMEL:.2f} ns each)", BASELINE, seconds)


def _draw(stream: str, draw: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    with random.stream(stream):
        draw(tensor)


def _sample(box: Box) -> None:
    for _ in sample_box(Uniform(torch.float32), Key(1, 2), SHAPE, box, torch.device("cpu")):
        pass
