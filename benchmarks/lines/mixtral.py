"""Train a Mixtral on one device: `python mixtral.py CONFIG`, a folder with the model's config.json."""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def train(config: MixtralConfig, num_steps: int) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
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
    print(train(MixtralConfig.from_pretrained(sys.argv[1]), num_steps=3))
