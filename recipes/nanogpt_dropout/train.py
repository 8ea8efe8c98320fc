"""Train a small GPT with dropout 0.1 everywhere, sharded in several ways, and compare with one process.

    python recipes/nanogpt_dropout/train.py            # starts 4 processes; writes losses.json and the figure

Every training starts from the same seed and sees the same batches, 20 steps of AdamW:

    one process                  plain tensors, stock torch
    dp 4, tp 4, dp 2 x tp 2      DTensors, with the random rules of vescale.dtensor
    the same                     DTensors, with stock torch's randomness (`disabled("random")`)

The model (`model.py`) is not changed. Its parameters become DTensors, and hooks say where partial sums are reduced.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from vescale.dtensor import InterleavedShard, disabled, init_device_mesh

HERE = Path(__file__).parent
NUM_RANKS = 4
BATCH = 8
LAYOUTS = {"dp 4": (4, 1), "tp 4": (1, 4), "dp 2 x tp 2": (2, 2)}
OURS, STOCK = "vescale.dtensor", "stock randomness"
BOUNDS = {"float64": 1e-10, "float32": 1e-3}

# Heads, dtype, and with whose randomness. 3 heads do not divide over 2 or 4 ranks: attention is then not sharded.
RUNS = [(12, "float64", (OURS, STOCK)), (12, "float32", (OURS,)), (3, "float64", (OURS,))]

# What the tensor-parallel axis shards, by the end of the parameter's name. All other parameters are replicated.
SHARDED = {
    "c_attn.weight": InterleavedShard(0, 3),  # a part of the queries, of the keys and of the values
    "c_attn.bias": InterleavedShard(0, 3),
    "attn.c_proj.weight": Shard(1),
    "c_fc.weight": Shard(0),
    "c_fc.bias": Shard(0),
    "mlp.c_proj.weight": Shard(1),
    "lm_head.weight": Shard(0),
    "wte.weight": Shard(0),
}


def batches(config: GPTConfig, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and next tokens, both (batch, time), of a random walk with preferences: something to learn."""
    generator = torch.Generator().manual_seed(1)
    preferences = torch.randn(config.vocab_size, config.vocab_size, generator=generator).mul(3).softmax(-1)
    tokens = torch.randint(config.vocab_size, (steps, BATCH, 1), generator=generator)
    for _ in range(config.block_size):
        following = torch.multinomial(preferences[tokens[..., -1].flatten()], 1, generator=generator)
        tokens = torch.cat([tokens, following.view(steps, BATCH, 1)], dim=-1)
    targets = tokens[..., 1:].clone()
    targets[:, ::3, : config.block_size // 2] = -1  # sequences with a prompt that does not count
    return list(zip(tokens[..., :-1], targets, strict=True))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make the parameters DTensors on a (dp, tp) mesh, and reduce partial sums where they leave a sharded layer."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = next((p for end, p in SHARDED.items() if f"{prefix}.{name}".endswith(end)), Replicate())
            if parameter not in made:
                tensor = distribute_tensor(parameter.detach(), mesh, [Replicate(), placement], src_data_rank=None)
                made[parameter] = nn.Parameter(tensor)
            setattr(module, name, made[parameter])
        if prefix.endswith(("wte", "c_proj")):
            module.register_forward_hook(lambda _module, _args, output: on_tp_whole(output))
    return model


def on_tp_whole(tensor: DTensor) -> DTensor:
    """Return `tensor` replicated along tp."""
    return tensor.redistribute(placements=[tensor.placements[0], Replicate()])


def train(model: nn.Module, config: GPTConfig, steps: int, mesh: DeviceMesh | None = None) -> list[float]:
    """Train and return the losses; with a mesh the batch is sharded over its first axis."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    torch.manual_seed(1337)
    losses = []
    for idx, targets in batches(config, steps):
        if mesh is not None:
            placements = [Shard(0), Replicate()]
            idx, targets = (distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (idx, targets))
        with implicit_replication():  # masks and positions are plain tensors
            loss = model(idx, targets)
            loss.backward()
        if mesh is not None:
            loss = loss.full_tensor()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(heads: int, dtype: str, rules: tuple[str, ...], steps: int) -> dict[str, list[float]]:
    """Return the losses of all trainings by name; called on every rank."""
    config = GPTConfig(n_head=heads)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(config).to(getattr(torch, dtype))

    losses = {"one process": train(build(), config, steps)}
    for layout, sizes in LAYOUTS.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for name in rules:
            with disabled("random") if name == STOCK else contextlib.nullcontext():
                losses[f"{layout}, {name}"] = train(shard(build(), mesh), config, steps, mesh)
    return losses


def run(rank: int, port: int, steps: int, out: Path) -> None:
    """Run all comparisons on one rank; rank 0 reports."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # hints on speed, many
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for heads, dtype, rules in RUNS:
        title = f"{heads} heads, {dtype}"
        results[title] = compare(heads, dtype, rules, steps)
        if rank == 0:
            report(title, results[title])
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def distance(curve: list[float], losses: dict[str, list[float]]) -> float:
    """Return the largest distance of a curve to that of one process."""
    return max(abs(a - b) for a, b in zip(curve, losses["one process"], strict=True))


def report(title: str, losses: dict[str, list[float]]) -> None:
    """Print the last loss of each training and its distance to one process."""
    print(title)
    for name, curve in losses.items():
        print(f"  {name:30} last loss {curve[-1]:.6f}   largest distance {distance(curve, losses):.1e}", flush=True)


def passed(results: dict[str, dict[str, list[float]]]) -> bool:
    """Return whether every training with our rules equals one process, and every one with stock torch differs."""
    verdicts = []
    for title, losses in results.items():
        bound = BOUNDS[title.split(", ")[1]]
        for name, curve in losses.items():
            same = distance(curve, losses) < bound
            verdicts.append(same != name.endswith(STOCK))
    return all(verdicts)


def main() -> int:
    """Run the recipe; return 0 for PASS and 1 for FAIL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
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
