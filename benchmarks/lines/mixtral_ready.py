"""Train a Mixtral with tensor, sequence and expert parallelism: `torchrun … mixtral_ready.py CONFIG`."""

import sys

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import init_device_mesh


def train(config: MixtralConfig, num_steps: int) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, plans.plan_for(model, sequence_parallel=True), mode="static")
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
    dist.init_process_group()
    print(train(MixtralConfig.from_pretrained(sys.argv[1]), num_steps=3))
