"""Train an OPT on one device: `python opt.py CONFIG`, a folder with the model's config.json."""

import sys

import torch
from transformers import OPTConfig, OPTForCausalLM


def train(config: OPTConfig, num_steps: int) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
