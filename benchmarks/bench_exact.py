"""What exact mode costs: steps of tiny LLaMA and Mixtral, and of a transformer of linear layers, in one process.

Each model takes four turns: an ordinary step, a step inside of ``vescale.dtensor.exact`` with 8 blocks, and two
ordinary steps after that. The first of these finds caches that hold other data; the second shows what the mode leaves
behind: nothing. A step is forward, backward, clipping and AdamW. One process shows the cost of the forms alone; what
they gather on a mesh comes on top. The first two steps, in which kernel calls are tested, are warm-up. One thread in
all cases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from huggingface import build
from measure import time_in_turns
from targets import Target, Targets
from torch import nn

from vescale.dtensor import exact

NUM_BLOCKS = 8
BATCH, SEQ, VOCAB = 8, 64, 512
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def run(num_rounds: int) -> Targets:
    """Measure in this process."""
    makers = {"linear layers": _layers, "LLaMA": _causal("LLaMA", {}), "Mixtral": _causal("Mixtral", EXPERTS)}
    seconds: dict[str, list[float]] = {}
    reference: dict[str, str] = {}
    targets = []
    for name, make in makers.items():
        step = make()
        after = {f"{name}, first after it": step, f"{name}, after it": step}
        cases = {name: step, f"{name}, exact": _exactly(step), **after}
        seconds |= time_in_turns(cases, num_rounds=num_rounds)
        reference |= dict.fromkeys(cases, name)
        targets.append(Target(f"{name}, after it", name, at_most=1.05))
    return Targets(
        f"Exact mode in one process ({BATCH} x {SEQ} tokens, {NUM_BLOCKS} blocks, float32)",
        "the ordinary step",
        seconds,
        reference,
        tuple(targets),
    )


def _exactly(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with exact(num_blocks=NUM_BLOCKS):
            step()

    return run


def _layers() -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    x = torch.randn(BATCH * SEQ, 256)
    return _step(model, lambda: model(x).square().mean())


def _causal(family: str, sizes: dict[str, int]) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        model = build(family, **SIZES, **sizes)
        ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
        return _step(model, lambda: model(input_ids=ids, labels=ids).loss)

    return make


def _step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # every step has the same shapes, of experts, too

    def step() -> None:
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
