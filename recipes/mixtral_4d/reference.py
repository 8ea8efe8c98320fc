"""The single-process program that the parallel run must equal: plain PyTorch, no veScale.

Run by ``train.py`` in a process of its own: ``python reference.py CONFIG.json OUT`` writes ``OUT/reference.jsonl`` (a
line per step) and ``OUT/reference.safetensors`` (the parameters after the last step).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
from config import Config, model_config
from data import global_batch, load_tokens
from safetensors.torch import save_file
from transformers import MixtralForCausalLM


def train(config: Config, out: Path) -> None:
    """Train on one device and write what the parallel run is compared with."""
    tokens, vocab_size = load_tokens(config)
    torch.set_default_dtype(config.torch_dtype)
    torch.manual_seed(config.seed)
    model = MixtralForCausalLM(model_config(config, vocab_size)).to(config.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    with (out / "reference.jsonl").open("w") as lines:
        for step in range(config.steps):
            start = time.perf_counter()
            batch = {name: value.to(config.device) for name, value in global_batch(tokens, config, step).items()}
            loss = model(**batch).loss
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "seconds": seconds}
            print(json.dumps(row), file=lines, flush=True)
    save_file(
        {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}, out / "reference.safetensors"
    )


if __name__ == "__main__":
    config = Config.from_json(Path(sys.argv[1]).read_text())
    exact = contextlib.nullcontext()
    if config.dtype == "float64":  # the model casts to float32 inside; keep both sides in float64
        from vescale_testing import keep_float64

        exact = keep_float64()
    with exact:
        train(config, Path(sys.argv[2]))
