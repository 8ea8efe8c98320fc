"""Train an OPT with tensor parallelism, for which there is no ready plan: `torchrun … opt_derived.py CONFIG`."""

import functools
import os
import sys

import torch
from transformers import OPTConfig, OPTForCausalLM

import vescale


def train(config: OPTConfig, num_steps: int) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    plan = vescale.Plan(tp=int(os.environ["WORLD_SIZE"]), mode="static")
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    model, optimizer = vescale.parallelize(plan, model, adamw)
    losses = []
    for step in range(num_steps):
        tokens = torch.randint(config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(OPTConfig.from_pretrained(sys.argv[1]), num_steps=3))
