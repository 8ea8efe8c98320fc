"""A step of a LLaMA of a billion parameters on four processes, with deferred initialization and ZeRO 3.

float32 and AdamW take 16 bytes per parameter: 16 GB together, 4 GB per rank. No rank ever holds the full model. The
tensors of a rank are counted between the second backward and `step()`, when parameters, gradients and state exist. The
peak is the increase of the process's peak memory over the full program, including initialization. The C library is set
to return freed memory to the system, which it otherwise keeps for later. The machine needs 24 GiB.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
import warnings

import torch
from bench_zero_memory import Memory
from measure import Result
from transformers import LlamaConfig, LlamaForCausalLM

from vescale.dtensor import deferred_init, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import held_bytes, run_ranks

WORLD, BATCH, SEQ = 4, 1, 16
SIZES = {
    "vocab_size": 16000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
BYTES = 16  # per parameter: value, gradient, two moments


def run(num_rounds: int) -> Result:
    """Run two steps; ``num_rounds`` does not matter."""
    del num_rounds
    records = run_ranks(_train, WORLD, timeout=1500)
    num_parameters, unit, root = records[0]["parameters"], records[0]["unit"], records[0]["root"]
    share = BYTES * num_parameters / WORLD
    # whole: values and gradients of the root unit; values of the layer that runs and of the next; gradients of the one
    # that runs and of the two that are being reduced
    peak = share + 2 * root + 5 * unit
    rows = {}
    for rank, record in enumerate(records):
        rows[f"rank {rank}, tensors"] = record["counted"], share, 0.02 * share + unit
        rows[f"rank {rank}, peak of the process"] = record["peak"], peak, 0.02 * share + unit
    seconds = ", ".join(f"{record['seconds']:.0f}" for record in records)
    losses = ", ".join(f"{loss:.4f}" for loss in records[0]["losses"])
    notes = (f"losses of rank 0: {losses}", f"seconds from nothing to the end of two steps, by rank: {seconds}")
    title = f"LLaMA with {num_parameters:,} parameters, zero 3 on {WORLD} ranks, float32, AdamW"
    return Memory(title, "formula", {}, rows, "one layer of the model", notes)


def _train() -> dict[str, object]:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    _give_back_what_is_freed()
    start, before = time.perf_counter(), _peak()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = deferred_init(LlamaForCausalLM, LlamaConfig(**SIZES, use_cache=False))
    num_parameters = sum(p.numel() for p in model.parameters())
    unit = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    root = 4 * num_parameters - unit * len(model.model.layers)
    model = DDP(model, mesh["dp"], zero=3)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, SEQ), generator=generator)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        del loss
        gc.collect()
        counted = held_bytes()
        optimizer.step()
    if not losses[1] < losses[0]:
        raise RuntimeError(f"expected decreasing losses, got {losses}")
    return {
        "parameters": num_parameters,
        "unit": unit,
        "root": root,
        "counted": counted,
        "peak": _peak() - before,
        "losses": losses,
        "seconds": time.perf_counter() - start,
    }


def _give_back_what_is_freed() -> None:
    """Let malloc of glibc map every block of a MiB and more on its own; by default it soon begins to keep them."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    if not ctypes.CDLL(None).mallopt(mmap_threshold, 2**20):
        raise RuntimeError("mallopt refused a threshold of 1 MiB")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
