"""Tensor-parallel modules whose parameters are cast have the same masters at every ZeRO stage and in every mode."""

import torch
from torch import nn

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

WHOLE = [{"tp": Replicate()}]
PLAN = {
    "parameter": {"0.(weight|bias)": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}},
    "forward": {"0.input": WHOLE, "2.output": WHOLE},
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def masters_after_training(mesh, zero, mode):
    module = parallelize_module(build(), mesh["tp"], PLAN)
    set_mode(module, mode)
    model = DDP(module, mesh["dp"], bucket_bytes=300, zero=zero, param_dtype=torch.bfloat16)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    first = optimizer.full_state_dict()["master_weights"]
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        (model(x.chunk(2)[mesh.get_local_rank("dp")]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, optimizer.full_state_dict()["master_weights"]


@ranks(4, timeout=120)
def test_masters_are_the_same():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    original, expected = dict(build().named_parameters()), None
    for zero in (0, 2, 3):
        for mode in ("eager", "static"):
            first, last = masters_after_training(mesh, zero, mode)
            expected = expected or last
            for fqn, value in original.items():
                assert torch.equal(first[fqn], value), (zero, mode, fqn)
                assert torch.equal(last[fqn], expected[fqn]), (zero, mode, fqn)
                assert not torch.equal(last[fqn], value)
