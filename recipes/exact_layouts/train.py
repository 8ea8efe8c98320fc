"""Train a small LLaMA in float32 under several plans, and compare each loss with that of one process, bit for bit.

    python recipes/exact_layouts/train.py            # starts 4 processes; writes losses.json

The model is that of Hugging Face, unmodified, with dropout in its attention. Gradients are clipped. Every training
starts from the same seed and sees the same batches, once with ``Plan(exact=8)`` and once without:

    one process                       the user's own loop, for the first with `vescale.dtensor.exact` around it
    ZeRO 3, tp x sequence, pp x dp    `vescale.parallelize`
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import vescale
from vescale.dtensor import exact, set_exact

HERE = Path(__file__).parent
NUM_RANKS, NUM_BLOCKS, LR, LIMIT = 4, 8, 2e-2, 1.0
BATCH, SEQ, VOCAB = 8, 16, 64
LAYOUTS = {
    "dp 4, ZeRO 3": {"dp": 4, "zero": 3},
    "dp 2 x tp 2, sequence parallel": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "pp 2 x dp 2, ZeRO 2": {"pp": 2, "dp": 2, "zero": 2},
}
ALONE, EXACT, ORDINARY = "one process", "exact", "ordinary"
Losses = dict[str, list[float]]


def build() -> nn.Module:
    """Return the model of every training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, attention_dropout=0.1)).train()


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Return tokens that count up by a step of their own: something to learn."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        start, step = torch.randint(1, VOCAB, (2, BATCH, 1), generator=generator)
        step = step % 4 + 1
        ids = (start + step * torch.arange(SEQ)) % VOCAB
        found.append({"input_ids": ids, "labels": ids})
    return found


def train_alone(steps: int, *, num_blocks: int | None) -> list[float]:
    """Return the losses of a loop in plain torch."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    torch.manual_seed(2)
    with contextlib.nullcontext() if num_blocks is None else exact(num_blocks=num_blocks):
        for batch in batches(steps):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def train(steps: int, *, num_blocks: int | None, **layout: int) -> list[float]:
    """Return the losses under a plan."""
    plan = vescale.Plan(exact=num_blocks, clip_grad_norm=LIMIT, **layout)
    model, optimizer = vescale.parallelize(plan, build(), functools.partial(torch.optim.AdamW, lr=LR))
    torch.manual_seed(2)
    losses = []
    for batch in batches(steps):
        loss = model(**model.local_batch(batch), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.global_loss(loss).item())
    set_exact(None)
    return losses


def run(rank: int, port: int, steps: int, out: Path) -> None:
    """Run all trainings on one rank; rank 0 writes them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Losses] = {}
    for mode, num_blocks in ((EXACT, NUM_BLOCKS), (ORDINARY, None)):
        results[mode] = {ALONE: train_alone(steps, num_blocks=num_blocks)}
        for name, layout in LAYOUTS.items():
            results[mode][name] = train(steps, num_blocks=num_blocks, **layout)
            if rank == 0:
                distance = max(distances(results[mode])[name])
                print(f"{mode:9} {name:31} largest distance to one process {distance:.1e}", flush=True)
    if rank == 0:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def distances(losses: Losses) -> Losses:
    """Return, of each layout, the distance of each loss to that of one process."""
    alone = losses[ALONE]
    return {
        name: [abs(a - b) for a, b in zip(curve, alone, strict=True)] for name, curve in losses.items() if name != ALONE
    }


def passed(results: dict[str, Losses]) -> bool:
    """Return whether all losses in exact mode are equal, and all other layouts differ from one process somewhere."""
    largest = {mode: [max(each) for each in distances(losses).values()] for mode, losses in results.items()}
    return not any(largest[EXACT]) and all(largest[ORDINARY])


def main() -> int:
    """Run the recipe; return 0 for PASS and 1 for FAIL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE / "losses.json")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(run, (port, options.steps, options.out), nprocs=NUM_RANKS, start_method="spawn")
    passing = passed(json.loads(options.out.read_text(encoding="utf-8")))
    print("PASS" if passing else "FAIL")
    return 0 if passing else 1


if __name__ == "__main__":
    sys.exit(main())
