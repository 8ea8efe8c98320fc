"""A whole training step of a tiny LLaMA: tensor parallel over two processes, in all modes, against stock torch.

The model is small on purpose: its kernels take little, so the ratio shows what an abstraction costs per operator. All
cases start from the same weights and train on the same tokens; the run stops if their losses differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from cases import MODES
from measure import Result, time_in_turns
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as stock
from transformers import LlamaConfig, LlamaForCausalLM

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale_testing import run_ranks

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
BATCH, SEQ = 4, 64
ONE, STOCK = "one process", "stock torch, tp 2"


def run(num_rounds: int) -> Result:
    """Measure on two forked gloo processes."""
    seconds = run_ranks(_on_each_rank, 2, num_rounds, timeout=600)[0]
    shape = f"{CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, {BATCH} x {SEQ} tokens"
    return Result(f"Training step of a tiny LLaMA ({shape}, float32, AdamW)", STOCK, seconds)


def _on_each_rank(num_rounds: int) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    one = _step(_model())
    steps = {
        ONE: one if dist.get_rank() == 0 else lambda: None,
        STOCK: _step(_parallelize_as_stock(_model(), mesh)),
    }
    for mode in MODES:
        steps[f"vescale {mode}, tp 2"] = _step(parallelize_module(_model(), mesh, plans.llama(), mode=mode))
    _check_same_loss({name: step() for name, step in {**steps, ONE: one}.items()})
    return time_in_turns(steps, num_rounds=num_rounds)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def _step(model: nn.Module) -> Callable[[], float]:
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _parallelize_as_stock(model: nn.Module, mesh: object) -> nn.Module:
    """Shard the same parameters as `plans.llama` with torch's own styles, as its tutorial does."""
    column, row = stock.ColwiseParallel, stock.RowwiseParallel
    plan = {
        "model.embed_tokens": row(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": column(),
        "model.layers.*.self_attn.o_proj": row(),
        "model.layers.*.mlp.gate_proj": column(),
        "model.layers.*.mlp.up_proj": column(),
        "model.layers.*.mlp.down_proj": row(),
        "lm_head": column(output_layouts=Replicate()),
    }
    return stock.parallelize_module(model, mesh, plan)


def _check_same_loss(losses: dict[str, float]) -> None:
    if max(losses.values()) - min(losses.values()) > 1e-5:
        raise RuntimeError(f"the cases do not train the same model: first losses {losses}")
